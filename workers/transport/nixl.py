"""KV over NIXL (UCX): the sink reads the source's registered pool, within a machine, or by RDMA where that is allowed.

The source's engine has no part in a read: blocks are protected by the lease, and by the release that must be answered
"held" before what was read is used. The agent lives on nixl_thread.py's thread. Where each rank of a worker has a
device of its own, each has an agent in its own process (rank_agent.py): a read is split by the pieces of the two pools,
and every rank reads into its own piece, from whichever pieces of the source have what it needs.

What a link of device memory carries is measured when a sink connects: UCX may read it over TCP, and says nothing of it
(0.5 GB/s where the link has 49). A link slower than LEAST_BYTES_S is refused, and the sink takes the next transport,
which goes by pinned host memory (gRPC).
"""

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import numpy as np

from ...proto import kv_pb2
from ..common.errors import TransportError
from ..kv.device_kv import CudaDriver
from ..kv.layout import Copies, Region
from ..kv.staging import Staging
from .base import KVReader, Source, Transport
from .machine import this_machine
from .nixl_agent import VRAM, Endpoint, NixlAgent, endpoints_of, published
from .nixl_thread import NixlThread
from .rank_agent import RankAgent
from .runs import by_pieces
from .tracked_reader import TrackedReader

CONNECT_TIMEOUT_S = 10.0
PROBE_BYTES, NUM_PROBES = 8 << 20, 3
LEAST_BYTES_S = 2e9  # gRPC carries 1.1 to 1.5 GB/s, and copies on both sides

log = logging.getLogger("diptych.transport")


class NixlReader(TrackedReader):
    def __init__(
        self,
        agents: Sequence[NixlAgent],
        incarnation: str,
        endpoints: Sequence[Endpoint],
        receivers: Sequence[RankAgent] = (),
        number: int = 0,
    ) -> None:
        """agents: of the pieces of our pool, the first one of other regions too. endpoints: of the source's pieces.
        receivers: all agents of other ranks, where each can convert what it reads. number: of this reader."""
        super().__init__()
        self.num_receivers = len(receivers)
        self.first_rank = number % (1 + len(receivers))
        self._receivers = receivers
        # A device's memory is read straight into a device's, the host's into the host's.
        self.lands_on_device = endpoints[0].memory == agents[0].endpoint.memory
        self._agents, self._incarnation, self._endpoints = agents, incarnation, endpoints

    @property
    def piece_bytes(self) -> int:
        """Bytes of each piece of the source's pool."""
        return self._endpoints[0].num_bytes

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        if not copies.num_bytes:
            return
        own, far = self._agents[0].endpoint, self.piece_bytes
        if (copies.remote + copies.lengths).max() > far * len(self._endpoints):
            raise TransportError("the source announced a block that it does not have")
        is_pool = into.address == own.base_address
        near = own.num_bytes if is_pool else into.num_bytes
        reads: list[Future[None]] = []
        for part in by_pieces(copies, far, near):
            # All of a part's runs are in one piece on each side.
            piece, rank = int(part.remote[0]) // far, int(part.local[0]) // near
            inside = Copies(part.remote - piece * far, part.local - rank * near, part.lengths)
            reads.append(self._agents[rank].read(self._incarnation, piece, inside, None if is_pool else into))
        await self.wait_for(copies.num_bytes, *reads)

    async def receive(self, rank: int, parts: kv_pb2.RankParts, num_bytes: int) -> None:
        parts.incarnation = self._incarnation
        await self.wait_for(num_bytes, self._receivers[rank - 1].receive(parts))

    async def cut(self) -> None:
        """Close the connections, and wait until that is done."""
        forgotten = (asyncio.wrap_future(agent.forget(self._incarnation)) for agent in self._agents)
        await asyncio.gather(*forgotten, return_exceptions=True)


class NixlTransport(Transport):
    """Starts the process's NIXL thread. Raises ImportError or TransportError where NIXL is not usable.

    regions: the pool, and what is read into besides. driver: of the device that regions are on, if any is. staging:
    into which links are measured, where they are of device memory; None: they are not. rank_links: to the agents of the
    other ranks, where each rank's piece of the pool is on its own device. has_rdma: between machines too, by whose
    fabric anybody on it can read and write the pool. UCX listens on no port.
    """

    name = "nixl"

    def __init__(
        self,
        regions: Sequence[Region],
        driver: CudaDriver | None = None,
        staging: Staging | None = None,
        rank_links: Sequence[socket.socket] = (),
        *,
        has_rdma: bool = False,
    ) -> None:
        pool, *others = regions
        assert pool.pieces is None or rank_links, "UCX registers the memory of one device"
        piece = replace(pool, num_bytes=pool.num_bytes // (1 + len(rank_links)))
        self._pool, self._staging = pool, staging
        # Of links that were measured, bytes/s of each rank, by incarnation.
        self._rates: dict[str, tuple[Sequence[Endpoint], list[float]]] = {}
        self._thread = NixlThread([piece, *others], driver, has_rdma=has_rdma)
        self._has_rdma, self._numbers = has_rdma, count()
        self._is_serving = False
        try:
            others = _rank_agents(rank_links, has_rdma)
        except TransportError:
            self._thread.stop()
            raise
        self._agents: list[NixlAgent] = [self._thread, *others]
        self._receivers = others if all(agent.can_receive for agent in others) else []

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
        return published([agent.endpoint for agent in self._agents])

    async def connect(self, source: Source) -> KVReader:
        endpoints = endpoints_of(source.opened.nixl)
        incarnation = source.opened.source_incarnation
        connecting = (asyncio.wrap_future(agent.connect(incarnation, endpoints)) for agent in self._agents)
        try:
            await asyncio.wait_for(asyncio.gather(*connecting), CONNECT_TIMEOUT_S)
        except TimeoutError as e:
            raise TransportError("NIXL did not load the source's endpoint in time") from e
        reader = NixlReader(self._agents, incarnation, endpoints, self._receivers, next(self._numbers))
        if endpoints[0].memory == VRAM and self._staging is not None and self._staging.on_device is not None:
            await self._check_rates(reader, incarnation, endpoints, self._staging)
        return reader

    def serve(self, num_open: int) -> None:
        if self._is_serving != (num_open > 0):
            self._is_serving = num_open > 0
            for agent in self._agents:
                agent.serve(self._is_serving)

    def share_memory(self, is_computing: bool) -> None:
        self._thread.budget.is_sharing = is_computing and self._pool.view is not None

    def forget(self, incarnation: str) -> None:
        self._rates.pop(incarnation, None)
        for agent in self._agents:
            agent.forget(incarnation)

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(agent.stop) for agent in self._agents))

    async def _check_rates(
        self, reader: NixlReader, incarnation: str, endpoints: Sequence[Endpoint], staging: Staging
    ) -> None:
        """Raise TransportError for a link that is slower than the next transport would be. Each is measured once."""
        known = self._rates.get(incarnation)
        if known is None or known[0] != endpoints:
            rates = [await link_rate(reader, 0, staging)]
            for rank, agent in enumerate(self._receivers, 1):  # one by one: they may share a network card
                rates.append(await asyncio.wrap_future(agent.measure(incarnation, rank % len(endpoints))))
            self._rates[incarnation] = known = endpoints, rates
            all_rates = ", ".join(f"{rate / 1e9:.1f}" for rate in rates)
            log.info("NIXL reads the device memory of %s at %s GB/s", incarnation, all_rates)
        slowest = min(known[1])
        if slowest < LEAST_BYTES_S:
            raise TransportError(
                f"UCX reads the source's device memory at {slowest / 1e9:.2f} GB/s, less than "
                f"{LEAST_BYTES_S / 1e9:.0f}: as over TCP (UCX_PROTO_INFO=y shows its path)"
            )


async def link_rate(reader: NixlReader, piece: int, staging: Staging) -> float:
    """Measure reads of the beginning of one piece of the source's pool into `staging`, in bytes/s: the best, after one
    that connects. Raises TransportError."""
    into, piece_bytes = staging.on_device, reader.piece_bytes
    assert into is not None
    num_bytes = min(PROBE_BYTES, piece_bytes, into.num_bytes)
    place, seconds = await staging.take(num_bytes), list[float]()
    try:
        run = piece * piece_bytes, place.start, num_bytes
        copies = Copies(*(np.array([number], dtype=np.int64) for number in run))
        for _ in range(1 + NUM_PROBES):
            began = time.perf_counter()
            await reader.read(kv_pb2.Segment(), copies, into)
            seconds.append(time.perf_counter() - began)
        return num_bytes / max(min(seconds[1:]), 1e-9)
    finally:
        await reader.settled()
        staging.give_back(place)


def _rank_agents(links: Sequence[socket.socket], has_rdma: bool) -> list[RankAgent]:
    """Have the other ranks make their agents, all at one time. Raises TransportError."""
    with ThreadPoolExecutor(max(len(links), 1)) as threads:
        made = [threads.submit(RankAgent, rank, link, has_rdma=has_rdma) for rank, link in enumerate(links, 1)]
    failed = [error for agent in made if (error := agent.exception()) is not None]
    if failed:
        for agent in made:
            if agent.exception() is None:
                agent.result().stop()
        raise failed[0]
    return [agent.result() for agent in made]
