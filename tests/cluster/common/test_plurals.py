"""One of a thing is not several."""

from diptych.cluster.common.plurals import count


def test_one_is_singular_and_none_is_not() -> None:
    assert [count(n, "worker") for n in (0, 1, 2, 4096)] == ["0 workers", "1 worker", "2 workers", "4,096 workers"]
