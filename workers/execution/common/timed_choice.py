"""Choice between a kernel here and others that compute the same: the fastest one, on the device itself.

No table says which: all are timed at load, with random numbers of a layer's own sizes. One that fails, or gives
something else than the kernel here, is not taken. The log says which was chosen, and why others were not.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from ...device.device import Lane

MOST_TOKENS = 4096
TOLERANCE = 2e-2  # of bfloat16 results of random numbers: two roundings of numbers below 4, or of the largest
NUM_RUNS = 3  # after a first one, which may compile; the least time counts

log = logging.getLogger("diptych.worker")

Work = Callable[[], Tensor]
Timed = Callable[[Work], tuple[float, Tensor]]  # seconds that it took, and what it gave


class Named(Protocol):
    @property
    def name(self) -> str: ...


Other = TypeVar("Other", bound=Named)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contest:
    """Names of what is computed, and how far results may differ."""

    what: str  # in the plural: "prompts"
    done: str  # with them: "attended to"
    num_tokens: int
    tolerance: float = TOLERANCE  # of the largest difference
    is_relative: bool = False  # to the largest result
    own: str = "our own kernel"  # name of what the others are compared with


def fastest(contest: Contest, own: Work, others: Sequence[tuple[Other, Work]], timed: Timed) -> Other | None:
    """Return the one of `others` that gives what the kernel here does in the least time, if in less than it."""
    what, done = contest.what, contest.done
    try:
        own_time, due = _best(own, timed)
    except RuntimeError as e:  # of too little memory, say
        log.warning("%s are %s by %s: it is compared with no other (%s)", what, done, contest.own, e)
        return None
    times: list[tuple[float, Other | None]] = [(own_time, None)]
    for other, work in others:
        try:
            took, found = _best(work, timed)
            error = _error(contest, due, found)
        except Exception as e:  # noqa: BLE001 (a library that refuses, or a compiler that fails: each in its own way)
            log.warning("%s are not %s by %s: it fails (%s: %s)", what, done, other.name, type(e).__name__, e)
            continue
        if error <= contest.tolerance:
            times.append((took, other))
        else:
            log.warning("%s are not %s by %s: its results differ by %.3g", what, done, other.name, error)
    times.sort(key=lambda each: each[0])
    if len(times) > 1:
        names = [contest.own if other is None else other.name for _, other in times]
        first, *slower = (took * 1e6 for took, _ in times)
        rest = "".join(f", by {name} {took:.0f} us" for name, took in zip(names[1:], slower, strict=True))
        log.info("%s are %s by %s: %d tokens take %.0f us%s", what, done, names[0], contest.num_tokens, first, rest)
    return times[0][1]


def works(what: str, done: str, other: Named, work: Callable[[], object]) -> bool:
    """Return whether `work` ends without an error. What is the fastest at one size may refuse another. what, done: as
    Contest has them."""
    try:
        work()
    except Exception as e:  # noqa: BLE001 (as in fastest)
        log.warning("%s are not %s by %s: it fails at some sizes (%s: %s)", what, done, other.name, type(e).__name__, e)
        return False
    return True


def _best(work: Work, timed: Timed) -> tuple[float, Tensor]:
    """Least seconds of some runs, and what the first gave."""
    first, result = timed(work)
    return min(first, *(timed(work)[0] for _ in range(NUM_RUNS))), result


def _error(contest: Contest, due: Tensor, found: Tensor) -> float:
    assert found.shape == due.shape, f"it gives {list(found.shape)}, not {list(due.shape)}"
    error = (due.float() - found.float()).abs().max()
    return float(error / due.float().abs().max() if contest.is_relative else error)


def timed_on(lane: Lane, num_calls: int = 1) -> Timed:
    """Time what runs on a lane. num_calls: of a run, whose mean time is taken."""

    def timed(work: Work) -> tuple[float, Tensor]:
        results = list[Tensor]()

        def run() -> None:
            results[:] = [work()]

        began = time.perf_counter()
        for _ in range(num_calls):
            lane.run(run)
        lane.record().wait()
        return (time.perf_counter() - began) / num_calls, results[0]

    return timed


def made_on(lane: Lane, make: Callable[[], T]) -> T:
    """Return what `make` makes on a lane, once it is there."""
    made = list[T]()
    lane.run(lambda: made.append(make()))
    lane.record().wait()
    return made[0]
