"""The source's side of hand-offs: the gRPC servicer that drives handoff.SourceHandoff. One event loop, no torch."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..proto import kv_pb2_grpc
from .errors import DiptychError
from .kv_layout import KVLayout, KVMemory
from .transport.base import Transport


class SourcePort(Protocol):
    """What the source needs of its worker."""

    def end_lease(self, handoff_id: str) -> None:
        """The blocks leased for this hand-off may be freed. Called once a hand-off, on the loop; must not block."""
        ...


class HandoffSource(kv_pb2_grpc.KVHandoffServicer):
    """Every method runs on the worker's event loop."""

    def __init__(
        self,
        incarnation: str,
        layout: KVLayout,
        memory: KVMemory,
        transports: Mapping[str, Transport],
        port: SourcePort,
        lease_s: float = 10.0,
    ) -> None:
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        raise NotImplementedError

    def offer(self, handoff_id: str, num_prompt_tokens: int) -> None:
        """Open a hand-off of that many tokens. Raises HandoffError when the id was used before: ids are single-use."""
        raise NotImplementedError

    def segment(
        self,
        handoff_id: str,
        first_block: int,
        block_ids: Sequence[int],
        generations: Sequence[int],
        first_layer: int,
        num_layers: int,
    ) -> None:
        """Announce blocks that are readable and leased. A hand-off that has ended meanwhile ignores it."""
        raise NotImplementedError

    def seal(self, handoff_id: str, num_computed: int, output_token_ids: Sequence[int]) -> None:
        """No more segments: the sequence continues after these tokens. Ignored once the hand-off has ended."""
        raise NotImplementedError

    def abort(self, handoff_id: str, error: DiptychError) -> None:
        """Give up a hand-off; its sink is told why. Idempotent."""
        raise NotImplementedError

    async def close(self) -> None:
        """Abort what is open."""
        raise NotImplementedError
