"""How a Runner computes what it was given: when it is waited for, or at once on a thread of its own. Knows no batch."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from .cores import bind_this_thread
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
