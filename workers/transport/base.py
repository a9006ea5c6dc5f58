"""Interface of transports, which move KV: a Transport is one process's end, a KVReader its connection to one source.

It knows regions of memory and runs of bytes in them; what they mean is kv/layout.py's. The sink pulls. `KVReader.read`
returns when every byte has landed. When it raises, `may_still_land` of the TransportError says whether bytes could
still arrive later; after a cancelled read they always could. The target blocks must then be quarantined until
`KVReader.settled` returns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...proto import kv_pb2
from ..common.errors import TransportError
from ..kv.layout import Copies, Region

if TYPE_CHECKING:  # CUDA IPC does without gRPC
    from ...proto import kv_pb2_grpc
    from ..common.channel import Metadata


@dataclass(frozen=True, slots=True)
class Source:
    """The source, as its Opened announcement described it (layout and incarnation already checked)."""

    handoff_id: str
    sink_incarnation: str
    opened: kv_pb2.Opened
    stub: "kv_pb2_grpc.KVHandoffAsyncStub"
    metadata: "Metadata" = ()  # of every call


class KVReader(ABC):
    lands_on_device = False  # whether it reads into device memory, where our pool is there; else into host memory
    num_receivers = 0  # other ranks of ours that read and convert parts of segments themselves, into device memory
    first_rank = 0  # that receives a part, where several do: another one for each reader

    @abstractmethod
    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        """Pull the bytes of `segment`: `copies` says where they lie in the source's pool, in the order of its layout's
        runs, and where in `into`, one of the regions that the transport knows, each goes.

        Several reads may run at once. Raises TransportError, or WorkerLost (nothing can land) where the source is gone.
        """

    async def receive(self, rank: int, parts: kv_pb2.RankParts, num_bytes: int) -> None:
        """Have another rank, from 1 to `num_receivers`, read parts of segments and write them into our pool. num_bytes:
        of all of them. As `read`; ChecksumMismatch too."""
        raise AssertionError("no other rank receives")

    async def settled(self) -> None:  # noqa: B027
        """Return once no byte of a failed or cancelled read can land any more."""


class Transport(ABC):
    name: str

    def suits(self, request: kv_pb2.SubscribeRequest) -> bool:
        """Return whether this sink, which has the transport too, should read our pool by it."""
        return True

    def publish(self, opened: kv_pb2.Opened) -> None:  # noqa: B027
        """Add what sinks must know, where the address of the gRPC server is not enough."""

    def is_described(self, opened: kv_pb2.Opened) -> bool:
        """Return whether a source has published it there."""
        return True

    @abstractmethod
    async def connect(self, source: Source) -> KVReader:
        """Connect to a source. Raises TransportError when it cannot be reached or its endpoint is malformed."""

    def serve(self, num_open: int) -> None:  # noqa: B027
        """Tell the transport how many of our hand-offs are open; meanwhile it takes part in its peers' reads if it
        must."""

    def share_memory(self, is_computing: bool) -> None:  # noqa: B027
        """Tell the transport whether the engine computes: then it leaves memory bandwidth to the engine."""

    def forget(self, incarnation: str) -> None:  # noqa: B027
        """Drop what is kept about a peer process that is dead; reads from it end."""

    async def close(self) -> None:  # noqa: B027
        """Release sockets, threads and registrations."""


def usable_transports(
    request: kv_pb2.SubscribeRequest, ours: Mapping[str, Transport], narrowed_to: str | None
) -> list[str]:
    """Find the transports by which this sink may read our pool, the best first. `narrowed_to`: the dtype in which KV is
    sent, where it is narrower than the pool's. Raises TransportError where there is none."""
    if narrowed_to is not None:
        if "grpc" in ours and "grpc" in request.transports:
            return ["grpc"]
        raise TransportError(
            f"only gRPC can convert KV to {narrowed_to}: give both workers the transport grpc, or unset wire_dtype"
        )
    common = [name for name in dict.fromkeys(request.transports) if name in ours]
    usable = [name for name in common if ours[name].suits(request)]
    if usable:
        return usable
    here, there = ", ".join(ours), ", ".join(request.transports)
    raise TransportError(
        f"no transport reaches the sink: the source has {here or 'none'}, the sink {there or 'none'}; give both "
        "grpc, because the others work only within a machine or with trusted_rdma_fabric"
    )
