"""How a Runner computes what it was given. Knows no batch."""

from collections.abc import Callable

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
