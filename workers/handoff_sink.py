"""The sink's side of hand-offs: drives handoff.SinkHandoff for each pull. One event loop, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..proto import worker_pb2
from .kv_layout import KVLayout, KVMemory
from .transport.base import Transport


@dataclass(frozen=True, slots=True)
class Reservation:
    block_ids: tuple[int, ...]  # the whole table for the prompt
    num_held: int  # leading positions that are valid already (prefix cache)


@dataclass(frozen=True, slots=True)
class PullResult:
    num_bytes: int
    waited_s: float  # from the call to the commit
    transport: str


class SinkPort(Protocol):
    """What the sink needs of its engine; awaited on the loop."""

    async def reserve(self, key: str, num_prompt_tokens: int) -> Reservation:
        """Raises OutOfBlocks, or what ended the request meanwhile."""
        ...

    async def commit(self, key: str, num_computed: int, output_token_ids: list[int]) -> None:
        """The blocks hold the sequence's KV: it runs from here on."""
        ...

    async def fail(self, key: str, quarantine: bool) -> None:
        """The KV will not come: free the blocks, or keep them aside until `settle`. Idempotent."""
        ...

    async def settle(self, key: str) -> None:
        """No byte can land in the quarantined blocks any more."""
        ...


class HandoffSink:
    """Every method runs on the worker's event loop."""

    def __init__(
        self,
        incarnation: str,
        layout: KVLayout,
        memory: KVMemory,
        transports: Mapping[str, Transport],
        port: SinkPort,
        token: str | None = None,
    ) -> None:
        raise NotImplementedError

    async def pull(self, sequence_key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> PullResult:
        """Bring a sequence's KV here and commit it, within `timeout_s`.

        Raises HandoffError and its kin, WorkerLost, OutOfBlocks or DeadlineExceeded; the blocks are then back or in
        quarantine. Cancelling it cleans up likewise.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Wait for what is being cleaned up, and hang up."""
        raise NotImplementedError
