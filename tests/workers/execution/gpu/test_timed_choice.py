"""Choice between a kernel here and others: the fastest one, of those that give the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.execution.common.timed_choice import NUM_RUNS, Contest, Work, fastest, made_on, timed_on

ONES = torch.ones(3, 2)
PROMPTS = Contest("prompts", "attended to", 40)


class Library:
    """A library, as far as its name goes."""

    def __init__(self, name: str = "a library") -> None:
        self.name = name


LIBRARY: Any = Library()


def chosen(own_s: float, other_s: float, other: Work, *more: tuple[Any, float, Work], **changes: Any) -> object:
    each = [own_s, other_s, *(took for _, took, _ in more)]
    times = [took for best in each for took in (9.0, *[best] * NUM_RUNS)]

    def timed(work: Work) -> tuple[float, Tensor]:
        return times.pop(0), work()

    others = [(LIBRARY, other), *((library, work) for library, _, work in more)]
    return fastest(replace(PROMPTS, **changes), lambda: ONES, others, timed)


def test_the_faster_one_computes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert chosen(2e-3, 1e-3, lambda: ONES + 1e-3) is LIBRARY
    assert "prompts are attended to by a library: 40 tokens take 1000 us, by our own kernel 2000 us" in caplog.text
    assert chosen(1e-3, 2e-3, lambda: ONES) is None
    assert "prompts are attended to by our own kernel: 40 tokens take 1000 us, by a library 2000 us" in caplog.text


def test_the_fastest_of_several_computes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    second = Library("another")
    assert chosen(3e-3, 2e-3, lambda: ONES, (second, 1e-3, lambda: ONES)) is second
    assert "by another: 40 tokens take 1000 us, by a library 2000 us, by our own kernel 3000 us" in caplog.text
    assert chosen(3e-3, 2e-3, lambda: ONES, (second, 1e-3, lambda: ONES + 1)) is LIBRARY
    assert chosen(2e-3, 1e-3, lambda: ONES + 1, (second, 3e-3, lambda: ONES)) is None


@pytest.mark.parametrize("is_relative", [False, True])
@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_one_that_gives_something_else_does_not(
    wrong: float, is_relative: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(2e-3, 1e-3, lambda: ONES + wrong, is_relative=is_relative) is None
    assert "prompts are not attended to by a library: its results differ by" in caplog.text


def test_differences_are_relative_where_that_is_asked_for() -> None:
    def near() -> Tensor:
        return ONES + 0.1

    assert chosen(2e-3, 1e-3, near, tolerance=0.11) is LIBRARY
    assert chosen(2e-3, 1e-3, near, tolerance=0.11, is_relative=True) is LIBRARY
    times = iter([2e-3] * (1 + NUM_RUNS) + [1e-3] * (1 + NUM_RUNS))
    large = replace(PROMPTS, is_relative=True)
    assert fastest(large, lambda: ONES * 10, [(LIBRARY, lambda: ONES * 10.1)], lambda work: (next(times), work()))


def test_one_that_fails_or_gives_another_shape_does_not(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Tensor:
        raise ModuleNotFoundError("No module named 'triton.experimental'")

    assert chosen(2e-3, 1e-3, fail) is None
    assert "by a library: it fails (ModuleNotFoundError: No module named 'triton.experimental')" in caplog.text
    assert chosen(2e-3, 1e-3, lambda: ONES[:1]) is None
    assert "by a library: it fails (AssertionError: it gives [1, 2], not [3, 2])" in caplog.text


def test_without_a_result_of_our_own_nothing_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    assert fastest(PROMPTS, fail, [(LIBRARY, lambda: ONES)], lambda work: (1e-3, work())) is None
    assert "prompts are attended to by our own kernel: it is compared with no other (no memory)" in caplog.text


def test_work_runs_on_the_lane() -> None:
    """Late: after it was queued, and before it is timed."""
    lane, calls = FakeDevice().lane("main"), list[Tensor]()

    def work() -> Tensor:
        calls.append(ONES)
        return ONES * len(calls)

    took, result = timed_on(lane, 4)(work)
    assert took >= 0 and len(calls) == 4 and torch.equal(result, ONES * 4)
    assert made_on(lane, lambda: "made") == "made"
