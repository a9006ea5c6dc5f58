"""KV over NIXL (UCX): the sink reads the source's registered pool, within a machine, or by RDMA where that is allowed.

The source's engine has no part in a read: blocks are protected by the lease, and by the release that must be answered
"held" before what was read is used. The agent lives on nixl_thread.py's thread.

What a link of device memory carries is measured when a sink connects: UCX may read it over TCP, and says nothing of it
(0.5 GB/s where the link has 49). A link slower than LEAST_BYTES_S is refused, and the sink takes the next transport,
which goes by pinned host memory (gRPC).
"""

import asyncio
import logging
import time
from collections.abc import Sequence

import numpy as np

from ...proto import kv_pb2
from ..common.errors import TransportError
from ..kv.device_kv import CudaDriver
from ..kv.layout import Copies, Region
from ..kv.staging import Staging
from .base import KVReader, Source, Transport
from .machine import this_machine
from .nixl_thread import Endpoint, NixlThread, memory_type
from .tracked_reader import TrackedReader

CONNECT_TIMEOUT_S = 10.0
MAX_METADATA_BYTES = 1 << 20
PROBE_BYTES, NUM_PROBES = 8 << 20, 3
LEAST_BYTES_S = 2e9  # gRPC carries 1.1 to 1.5 GB/s, and copies on both sides

log = logging.getLogger("diptych.transport")


class NixlReader(TrackedReader):
    def __init__(self, thread: NixlThread, incarnation: str, endpoint: Endpoint) -> None:
        super().__init__()
        self.lands_on_device = endpoint.memory == "VRAM"
        self._thread = thread
        self._incarnation = incarnation
        self._endpoint = endpoint

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        if (copies.remote + copies.lengths).max(initial=0) > self._endpoint.num_bytes:
            raise TransportError("the source announced a block that it does not have")
        await self.wait_for(self._thread.read(self._incarnation, copies, into), copies.num_bytes)

    async def cut(self) -> None:
        """Close the connection, and wait until that is done."""
        await asyncio.wrap_future(self._thread.forget(self._incarnation))


class NixlTransport(Transport):
    """Starts the process's NIXL thread. Raises ImportError or TransportError where NIXL is not usable.

    driver: of the device that regions are on, if any is. staging: into which links are measured, where they are of
    device memory; None: they are not. has_rdma: between machines too, by whose fabric anybody on it can read and write
    the pool. UCX listens on no port.
    """

    name = "nixl"

    def __init__(
        self,
        regions: Sequence[Region],
        driver: CudaDriver | None = None,
        staging: Staging | None = None,
        *,
        has_rdma: bool = False,
    ) -> None:
        self._pool, self._staging = regions[0], staging
        self._rates: dict[str, tuple[Endpoint, float]] = {}  # of links that were measured, bytes/s, by incarnation
        self._thread = NixlThread(regions, driver, has_rdma=has_rdma)
        self._has_rdma = has_rdma
        self._is_serving = False

    def suits(self, request: kv_pb2.SubscribeRequest) -> bool:
        """Refuse reads from device memory into host memory of the same machine: UCX emulates them, slower than gRPC."""
        if request.machine != this_machine():
            return self._has_rdma
        return self._pool.view is not None or request.on_device

    def is_described(self, opened: kv_pb2.Opened) -> bool:
        return opened.HasField("nixl")

    def publish(self, opened: kv_pb2.Opened) -> None:
        opened.nixl.CopyFrom(self.endpoint())

    def endpoint(self) -> kv_pb2.NixlEndpoint:
        return kv_pb2.NixlEndpoint(
            agent_name=self._thread.agent_name,
            metadata=self._thread.metadata,
            base_address=self._pool.address,
            num_bytes=self._pool.num_bytes,
            device_id=self._pool.device_id,
            memory=memory_type(self._pool),
        )

    async def connect(self, source: Source) -> KVReader:
        endpoint = self._checked(source.opened.nixl)
        incarnation = source.opened.source_incarnation
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._thread.connect(incarnation, endpoint)), CONNECT_TIMEOUT_S)
        except TimeoutError as e:
            raise TransportError("NIXL did not load the source's endpoint in time") from e
        reader = NixlReader(self._thread, incarnation, endpoint)
        if endpoint.memory == "VRAM" and self._staging is not None and self._staging.on_device is not None:
            await self._check_rate(reader, incarnation, endpoint, self._staging)
        return reader

    def serve(self, num_open: int) -> None:
        if self._is_serving != (num_open > 0):
            self._is_serving = num_open > 0
            self._thread.serve(self._is_serving)

    def share_memory(self, is_computing: bool) -> None:
        self._thread.budget.is_sharing = is_computing and self._pool.view is not None

    def forget(self, incarnation: str) -> None:
        self._rates.pop(incarnation, None)
        self._thread.forget(incarnation)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.stop)

    async def _check_rate(self, reader: NixlReader, incarnation: str, endpoint: Endpoint, staging: Staging) -> None:
        """Raise TransportError for a link that is slower than the next transport would be. Each is measured once."""
        known = self._rates.get(incarnation)
        if known is None or known[0] != endpoint:
            rate = await self._rate(reader, endpoint, staging)
            self._rates[incarnation] = known = endpoint, rate
            log.info("NIXL reads the device memory of %s at %.1f GB/s", incarnation, rate / 1e9)
        if known[1] < LEAST_BYTES_S:
            raise TransportError(
                f"UCX reads the source's device memory at {known[1] / 1e9:.2f} GB/s, less than "
                f"{LEAST_BYTES_S / 1e9:.0f}: as over TCP (UCX_PROTO_INFO=y shows its path)"
            )

    async def _rate(self, reader: NixlReader, endpoint: Endpoint, staging: Staging) -> float:
        """Measure reads of the beginning of the source's pool, in bytes/s: the best, after one that connects."""
        into = staging.on_device
        assert into is not None
        num_bytes = min(PROBE_BYTES, endpoint.num_bytes, into.num_bytes)
        place, seconds = await staging.take(num_bytes), list[float]()
        try:
            copies = Copies(*(np.array([number], dtype=np.int64) for number in (0, place.start, num_bytes)))
            for _ in range(1 + NUM_PROBES):
                began = time.perf_counter()
                await reader.read(kv_pb2.Segment(), copies, into)
                seconds.append(time.perf_counter() - began)
            return num_bytes / max(min(seconds[1:]), 1e-9)
        finally:
            await reader.settled()
            staging.give_back(place)

    @staticmethod
    def _checked(message: kv_pb2.NixlEndpoint) -> Endpoint:
        if message.num_bytes == 0 or message.base_address + message.num_bytes > 1 << 64:
            raise TransportError(f"a pool of {message.num_bytes:,} bytes at {message.base_address:#x} is impossible")
        if message.memory not in ("DRAM", "VRAM") or not 0 < len(message.metadata) <= MAX_METADATA_BYTES:
            raise TransportError("the source's NIXL endpoint is malformed")
        return Endpoint(
            message.agent_name,
            message.metadata,
            message.base_address,
            message.num_bytes,
            message.device_id,
            message.memory,
        )
