"""NIXL agents as the transport sees them: what each has registered, how peers reach it, and what it is asked for.

A pool in the memory of one device has one agent. Where each rank of a worker has a device of its own, each has an
agent, in its own process (rank_agent.py), that has registered its piece of the pool. No NIXL.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from typing import Protocol

from ...proto import kv_pb2
from ..common.errors import TransportError
from ..kv.layout import Copies, Region

MAX_METADATA_BYTES = 1 << 20
MAX_PIECES = 256
DRAM, VRAM = "DRAM", "VRAM"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of an agent and of the pool, or the piece of one, that it has registered."""

    agent_name: str
    metadata: bytes
    base_address: int
    num_bytes: int
    device_id: int
    memory: str  # DRAM or VRAM

    def to_proto(self) -> kv_pb2.NixlEndpoint:
        return kv_pb2.NixlEndpoint(**asdict(self))

    @classmethod
    def from_proto(cls, message: kv_pb2.NixlEndpoint) -> "Endpoint":
        """Raises TransportError."""
        if message.num_bytes == 0 or message.base_address + message.num_bytes > 1 << 64:
            raise TransportError(f"a pool of {message.num_bytes:,} bytes at {message.base_address:#x} is impossible")
        if message.memory not in (DRAM, VRAM) or not 0 < len(message.metadata) <= MAX_METADATA_BYTES:
            raise TransportError("the source's NIXL endpoint is malformed")
        return cls(**{each.name: getattr(message, each.name) for each in fields(cls)})


class NixlAgent(Protocol):
    """Every method returns at once. Futures raise TransportError."""

    @property
    def endpoint(self) -> Endpoint: ...

    def connect(self, incarnation: str, endpoints: Sequence[Endpoint]) -> "Future[None]":
        """Make a peer known, by the endpoints of all pieces of its pool; idempotent."""
        ...

    def read(self, incarnation: str, piece: int, copies: Copies, into: Region | None = None) -> "Future[None]":
        """Read from a piece of a peer's pool into a region of ours; None: into what `endpoint` names. It cannot be
        cancelled: bytes may land until the future is done."""
        ...

    def forget(self, incarnation: str) -> "Future[None]":
        """Close the connections to a peer; reads from it fail."""
        ...

    def serve(self, is_serving: bool) -> None:
        """Take part in peers' reads, or do not."""
        ...

    def stop(self) -> None:
        """Fail what is under way, and end. Blocks; idempotent."""
        ...


def memory_type(region: Region) -> str:
    """Return NIXL's name of the memory type of a region."""
    return VRAM if region.view is None and not region.is_fake else DRAM


def published(endpoints: Sequence[Endpoint]) -> kv_pb2.NixlEndpoint:
    """Describe a pool by the endpoints of its pieces, or of the whole."""
    if len(endpoints) == 1:
        return endpoints[0].to_proto()
    num_bytes = sum(each.num_bytes for each in endpoints)
    return kv_pb2.NixlEndpoint(num_bytes=num_bytes, pieces=[each.to_proto() for each in endpoints])


def endpoints_of(message: kv_pb2.NixlEndpoint) -> tuple[Endpoint, ...]:
    """Return the endpoints of a source's pool, whose pieces are of one size and memory type. Raises TransportError."""
    if not message.pieces:
        return (Endpoint.from_proto(message),)
    if len(message.pieces) > MAX_PIECES:
        raise TransportError(f"the source's pool has {len(message.pieces)} pieces, more than {MAX_PIECES}")
    found = tuple(Endpoint.from_proto(piece) for piece in message.pieces)
    are_alike = len({(each.num_bytes, each.memory) for each in found}) == 1
    if not are_alike or message.num_bytes != sum(each.num_bytes for each in found):
        raise TransportError("the pieces of the source's pool are not of one size and kind, or not all of it")
    return found
