"""Executes launched steps: when they are waited for, or at once on a thread of their own. Knows no batch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Protocol

from ..common.cores import bind_this_thread
from ..core.runner import InFlightStep, LayerWatch
from ..core.sequence import IsHere, SampledToken

Compute = Callable[[], list[SampledToken]]


class DeferredStep:
    """An InFlightStep that is computed when it is waited for, on the waiting thread."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def sample(self, is_here: IsHere) -> None:
        """Do nothing: no step with a grammar is launched ahead."""

    def tokens(self) -> list[SampledToken]:
        return self._compute()

    def abandon(self) -> None:
        """Do nothing: it has not begun."""


class StepExecutor(Protocol):
    """Computes steps in order, on a thread of its own."""

    @property
    def runs_ahead(self) -> bool:
        """Return whether a step may be submitted before the previous one is over."""
        ...

    def submit(self, compute: Compute) -> "Future[list[SampledToken]]": ...

    def check(self) -> None:
        """Check the ranks while there is nothing to compute. See Runner.check."""
        ...

    def close(self) -> None:
        """End the thread. Idempotent; returns when nothing is computed any more."""
        ...


class ThreadExecutor:
    """A StepExecutor. It stays on `cores`, where there are any."""

    runs_ahead = True

    def __init__(self, cores: Sequence[int] | None) -> None:
        self._executor = ThreadPoolExecutor(1, "diptych-compute", initializer=bind_this_thread, initargs=(cores,))

    def submit(self, compute: Compute) -> "Future[list[SampledToken]]":
        return self._executor.submit(compute)

    def check(self) -> None:
        return

    def close(self) -> None:
        self._executor.shutdown()


def submit_step(
    executor: StepExecutor, make: Callable[[LayerWatch | None], Compute], watch: LayerWatch | None
) -> InFlightStep:
    """`make` gives what computes, and tells the watch that it is given; `watch` hears of it where the tokens are waited
    for, on that thread."""
    if watch is None:
        return _Queued(executor.submit(make(None)))
    told: SimpleQueue[int | None] = SimpleQueue()
    future = executor.submit(make(LayerWatch(watch.ends, told.put)))
    future.add_done_callback(lambda _: told.put(None))
    return _Watched(future, watch, told)


class _Queued:
    def __init__(self, future: "Future[list[SampledToken]]") -> None:
        self._future = future

    def sample(self, is_here: IsHere) -> None:
        """Do nothing: no step with a grammar is launched ahead."""

    def tokens(self) -> list[SampledToken]:
        return self._future.result()

    def abandon(self) -> None:
        if not self._future.cancel():
            self._future.exception()


class _Watched(_Queued):
    def __init__(
        self, future: "Future[list[SampledToken]]", watch: LayerWatch, told: "SimpleQueue[int | None]"
    ) -> None:
        """`told`: layers, and None when nothing more comes."""
        super().__init__(future)
        self._watch, self._told = watch, told

    def tokens(self) -> list[SampledToken]:
        try:
            while (end := self._told.get()) is not None:
                self._watch.reached(end)
        finally:
            wait([self._future])  # whatever went wrong, nothing is computed any more
        return super().tokens()
