"""How long the oldest of several waits has been under way, by a clock that the tests set."""

import pytest

from diptych.workers.ranks import waits
from diptych.workers.ranks.waits import Waits


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_the_oldest_counts_whichever_begins_or_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, each = Clock(), Waits()
    monkeypatch.setattr(waits, "time", clock)
    assert each.longest_s() == 0
    first, second = each.waiting(), each.waiting()
    first.__enter__()
    clock.now_s += 5
    second.__enter__()
    clock.now_s += 2
    assert each.longest_s() == 7
    with each.waiting():
        clock.now_s += 1
    assert each.longest_s() == 8
    first.__exit__(None, None, None)  # no later than the second
    assert each.longest_s() == 3
    second.__exit__(None, None, None)
    clock.now_s += 1
    assert each.longest_s() == 0


def test_one_that_fails_is_over() -> None:
    each = Waits()
    with pytest.raises(KeyError), each.waiting():
        raise KeyError("x")
    assert each.longest_s() == 0
