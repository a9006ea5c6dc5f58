"""Interfaces through which the two sides of a hand-off use their worker: the engine, and the streams to routers."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..common.timings import PullTimes
from .types import HandoffSealed, Reservation, Seal


class EngineCommands(Protocol):
    """Commands that a source gives its engine, on the engine's thread."""

    def end_lease(self, handoff_id: str, reads: Sequence[tuple[int, float]] = ()) -> None:
        """The hand-off is over: free its leased blocks. Called once a hand-off. `reads`: (bytes, seconds), as its sink
        reports them with the release; unchecked."""
        ...

    def caught_up(self, handoff_id: str) -> None:
        """The sink of a running sequence has read nearly all that was announced. May come often."""
        ...


class SourceEngine(Protocol):
    def post(self, command: Callable[[EngineCommands], object]) -> None:
        """Run `command` on the engine's thread; returns at once."""
        ...


class SourceRequests(Protocol):
    """The worker's streams to its routers."""

    def handed_off(self, sealed: HandoffSealed) -> None:
        """A running sequence stopped here, after all its tokens were sent, or a prefix is computed: tell its router."""
        ...

    def forget(self, key: str) -> None:
        """Forget a request that was handed off. Idempotent."""
        ...


class SinkPort(Protocol):
    """Commands that a sink gives its engine; awaited on the loop."""

    async def reserve(self, key: str, num_tokens: int) -> Reservation:
        """May wait, and be cancelled: `fail` follows then. Raises OutOfBlocks, or what ended the request meanwhile."""
        ...

    def begin(self, key: str, seal: Seal) -> None:
        """All is read: compute on, and let nothing of it be seen until `commit`; `fail` drops it. Must not block."""
        ...

    async def commit(self, key: str, seal: Seal, times: PullTimes) -> None:
        """The blocks hold the sequence's KV: it runs from here on. `fail` follows if it raises."""
        ...

    async def fail(self, key: str, quarantine: bool) -> None:
        """The KV will not come: free the blocks, or keep them aside until `settle`. Idempotent."""
        ...

    async def settle(self, key: str) -> None:
        """Free the quarantined blocks: no byte can land in them any more."""
        ...
