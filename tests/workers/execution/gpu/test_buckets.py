import pytest

from benchmarks.gpu.gpu_engine.models import SHAPES
from diptych.workers.execution.gpu.buckets import StepSizes, bucket_for, row_buckets, token_buckets
from diptych.workers.execution.gpu.rank_steps import graph_tokens_of


def test_rows() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(3) == (1, 2, 3)
    assert row_buckets(8) == (1, 2, 4, 8)
    assert row_buckets(33) == (1, 2, 4, 8, 16, 24, 32, 33)
    assert row_buckets(256)[-6:] == (112, 128, 160, 192, 224, 256)
    assert len(row_buckets(256)) == 19


@pytest.mark.parametrize("largest", [1, 5, 64, 100, 300, 1000])
def test_every_number_of_rows_has_the_smallest_bucket_that_holds_it(largest: int) -> None:
    buckets = row_buckets(largest)
    assert list(buckets) == sorted(set(buckets))
    for num in range(1, largest + 1):
        assert bucket_for(buckets, num) == min(size for size in buckets if size >= num)
    assert bucket_for(buckets, largest + 1) is None


def test_rows_of_a_step_with_drafts() -> None:
    """As many as the scheduler allows (max_drafted); none without speculation."""
    assert [StepSizes(num).max_rows for num in (1, 6, 300)] == [1, 6, 300]
    assert [StepSizes(num, 5).max_rows for num in (1, 6, 300)] == [17, 102, 556]


def test_tokens() -> None:
    assert token_buckets(0) == token_buckets(7) == ()
    assert token_buckets(512) == (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
    assert token_buckets(100) == (8, 16, 32, 64, 96)
    assert bucket_for((), 1) is None


def test_longer_steps_of_a_mixture_are_graphs() -> None:
    assert (graph_tokens_of(SHAPES["8b"]), graph_tokens_of(SHAPES["v2-lite"])) == (512, 2048)
