"""Turns of what drafts on a device on which a worker takes part in steps of others, whose experts it shares.

passes of this worker alone          hold ──> they are computed ──> the next batch, or check
passes that need the others' experts share ──> a step of all workers, of nothing but passes
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from ...device.device import Lane
from ...ranks.agreed_step import PassesSize

T = TypeVar("T")


class SharedPasses(Protocol):
    """Passes of drafts that all workers compute together."""

    @property
    def lane(self) -> Lane: ...

    def serve(self, size: PassesSize) -> None:
        """Launch passes without a draft of this worker's own: experts for the others' rows."""
        ...

    def close(self) -> None:
        """Free their graphs: none is launched any more. Idempotent."""
        ...


class DraftTurns(Protocol):
    def begin(self) -> None:
        """Wait until all workers have loaded what drafts, however long that takes; then steps begin. Raises
        RankLost."""
        ...

    def hold(self) -> None:
        """Wait until nothing is under way on the device, and nothing comes there but by the calling thread, until its
        next batch or `check`. Raises RankLost."""
        ...

    def add(self, passes: SharedPasses) -> None:
        """Note what serves the others' drafts. Once, before `begin`."""
        ...

    def share(self, size: PassesSize, compute: Callable[[PassesSize], T]) -> T:
        """Compute a draft with the others: `compute` is given the size that all agree on. Raises RankLost, also where
        it raises anything."""
        ...
