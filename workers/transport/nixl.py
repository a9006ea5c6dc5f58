"""KV over NIXL (UCX: shared memory, RDMA, TCP as UCX chooses): the sink reads the source's registered pool.

The source's engine has no part in a read: blocks are protected by the lease, and by the release that must be answered
"held" before what was read is used. The agent lives on nixl_thread.py's thread.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from ...proto import kv_pb2
from ..errors import TransportError
from ..kv_layout import KVMemory
from .base import Reader, Source, Transport
from .nixl_thread import Endpoint, NixlThread, Piece

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 20.0
SLOWEST_BYTES_S = 20e6  # a link slower than this counts as broken
SETTLE_S = 10.0  # then the connection is cut, which ends what is still under way
MAX_METADATA_BYTES = 1 << 20


class NixlReader(Reader):
    def __init__(self, thread: NixlThread, incarnation: str, endpoint: Endpoint, memory: KVMemory) -> None:
        self._thread = thread
        self._incarnation = incarnation
        self._endpoint = endpoint
        self._memory = memory
        self._landing: set[Future[None]] = set()

    async def read(self, segment: kv_pb2.Segment, blocks: Sequence[int]) -> int:
        remote = np.array(segment.block_ids, dtype=np.uint32)
        if len(remote) != len(blocks) or remote.max(initial=0) >= self._endpoint.num_blocks:
            raise TransportError("the source announced a block that it does not have")
        layers = range(segment.first_layer, segment.first_layer + segment.num_layers)
        num_bytes = len(blocks) * len(layers) * self._memory.layer_bytes
        piece = Piece(remote.astype(np.int32), np.array(blocks, dtype=np.int32), layers)
        landing = self._thread.read(self._incarnation, piece)
        self._landing.add(landing)
        landing.add_done_callback(self._landing.discard)
        timeout = READ_TIMEOUT_S + num_bytes / SLOWEST_BYTES_S
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(landing)), timeout)
        except TimeoutError as e:
            message = f"a NIXL read of {num_bytes:,} bytes did not end in {timeout:.0f} s"
            raise TransportError(message, may_still_land=True) from e
        return num_bytes

    async def settled(self) -> None:
        landing = [asyncio.wrap_future(future) for future in list(self._landing)]
        if not landing:
            return
        _, late = await asyncio.wait(landing, timeout=SETTLE_S)
        if late:
            await asyncio.wrap_future(self._thread.forget(self._incarnation))
        await asyncio.gather(*landing, return_exceptions=True)  # how they ended is of no interest any more


class NixlTransport(Transport):
    """Starts the process's NIXL thread. Raises ImportError or TransportError where NIXL is not usable.

    `loopback_only`: UCX, which knows no token, listens on the loopback interface alone.
    """

    name = "nixl"

    def __init__(self, memory: KVMemory, *, loopback_only: bool = True) -> None:
        self._memory = memory
        self._thread = NixlThread(memory, loopback_only=loopback_only)
        self._is_serving = False

    def endpoint(self) -> kv_pb2.NixlEndpoint:
        return kv_pb2.NixlEndpoint(
            agent_name=self._thread.agent_name,
            metadata=self._thread.metadata,
            base_address=self._memory.address,
            num_bytes=self._memory.num_bytes,
            device_id=self._memory.device_id,
            memory=self._thread.memory_type,
        )

    async def connect(self, source: Source, memory: KVMemory) -> Reader:
        assert memory.address == self._memory.address, "the registered pool is another"
        endpoint = self._checked(source.opened.nixl)
        incarnation = source.opened.source_incarnation
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._thread.connect(incarnation, endpoint)), CONNECT_TIMEOUT_S)
        except TimeoutError as e:
            raise TransportError("NIXL did not take the source's endpoint in time") from e
        return NixlReader(self._thread, incarnation, endpoint, memory)

    def serve(self, num_open: int) -> None:
        if self._is_serving != (num_open > 0):
            self._is_serving = num_open > 0
            self._thread.serve(self._is_serving)

    def forget(self, incarnation: str) -> None:
        self._thread.forget(incarnation)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.stop)

    def _checked(self, message: kv_pb2.NixlEndpoint) -> Endpoint:
        num_blocks, rest = divmod(message.num_bytes, self._memory.block_bytes)
        if rest or num_blocks == 0 or message.base_address + message.num_bytes > 1 << 64:
            raise TransportError(f"the source's pool of {message.num_bytes:,} bytes does not hold whole blocks")
        if message.memory not in ("DRAM", "VRAM") or not 0 < len(message.metadata) <= MAX_METADATA_BYTES:
            raise TransportError("the source's NIXL endpoint is malformed")
        return Endpoint(
            message.agent_name,
            message.metadata,
            message.base_address,
            num_blocks,
            message.device_id,
            message.memory,
        )
