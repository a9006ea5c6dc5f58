"""How a Runner computes what it was given: when it is waited for, or at once on a thread of its own. Knows no batch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue

from .cores import bind_this_thread
from .runner import LayerWatch
from .sequence import SampledToken

Compute = Callable[[], list[SampledToken]]


class Deferred:
    """A Launched that is computed when it is waited for, by whoever waits."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def tokens(self) -> list[SampledToken]:
        return self._compute()

    def abandon(self) -> None:
        """It has not begun."""


class ComputeThread:
    """Computes what is launched, one after another. It stays on `cores`, where there are any."""

    def __init__(self, cores: Sequence[int] | None) -> None:
        self._executor = ThreadPoolExecutor(1, "diptych-compute", initializer=bind_this_thread, initargs=(cores,))

    def launch(self, compute: Compute) -> "_Queued":
        return _Queued(self._executor.submit(compute))

    def launch_watched(self, make: Callable[[LayerWatch], Compute], watch: LayerWatch) -> "_Watched":
        """`make` gives what computes, and tells the watch that it is given; `watch` hears of it where the tokens are
        waited for, on that thread."""
        told: SimpleQueue[int | None] = SimpleQueue()
        compute = make(LayerWatch(watch.ends, told.put))

        def run() -> list[SampledToken]:
            try:
                return compute()
            finally:
                told.put(None)

        return _Watched(self._executor.submit(run), watch, told)

    def close(self) -> None:
        """Idempotent; returns when nothing is computed any more."""
        self._executor.shutdown()


class _Queued:
    def __init__(self, future: "Future[list[SampledToken]]") -> None:
        self._future = future

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
