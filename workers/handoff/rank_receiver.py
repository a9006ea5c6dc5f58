"""Receives parts of segments in the process of another rank than 0, which divides segments among all ranks.

rank 0   SegmentReceiver: parts ──dealt in turn──> itself, and the other ranks (transport/rank_agent.py)
rank k   RankReceiver: each part is read into a staging buffer on this rank's device, which converts it into the
         pieces of all ranks: what a rank's network card carries, the links between the devices distribute
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from ...proto import kv_pb2
from ..kv.bridge import Bridge
from ..kv.layout import KVLayout, Region
from ..kv.memory import KVMemory
from ..kv.segment import Read, Segment
from ..transport.nixl import NixlReader, link_rate
from ..transport.nixl_agent import Endpoint, NixlAgent
from .segment_receiver import SegmentReceiver


class RankReceiver:
    """A PartsReceiver. It has an event loop on a thread of its own, until it is closed."""

    def __init__(self, memory: KVMemory) -> None:
        """memory: of all ranks, on this rank's device."""
        assert memory.device is not None
        self._memory, self._staging = memory, memory.device.staging
        self._bridges: dict[bytes, Bridge] = {}  # the newest, by the source's layout
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diptych-rank-receiver", daemon=True)
        self._thread.start()

    @property
    def regions(self) -> Sequence[Region]:
        return self._staging.regions

    def measure(self, agent: NixlAgent, endpoints: Sequence[Endpoint], link: kv_pb2.RankLink) -> "Future[float]":
        reader = NixlReader([agent], link.incarnation, endpoints)
        return asyncio.run_coroutine_threadsafe(link_rate(reader, link.piece, self._staging), self._loop)

    def receive(self, agent: NixlAgent, endpoints: Sequence[Endpoint], parts: kv_pb2.RankParts) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(self._receive(agent, endpoints, parts), self._loop)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _receive(self, agent: NixlAgent, endpoints: Sequence[Endpoint], message: kv_pb2.RankParts) -> None:
        reader = NixlReader([agent], message.incarnation, endpoints)
        receiver = SegmentReceiver(reader, self._bridge(message), self._memory, self._staging, verify=message.verify)
        table, parts = tuple(message.table), (Segment.from_proto(part, len(part.block_ids)) for part in message.parts)
        try:
            await receiver.receive_parts([Read(0, part, table, message.first_token) for part in parts])
        finally:
            await receiver.settled()

    def _bridge(self, message: kv_pb2.RankParts) -> Bridge:
        """Make a bridge once for the layout of the newest source."""
        key = message.layout.SerializeToString() + message.num_pool_blocks.to_bytes(8, "little")
        if key not in self._bridges:
            layout = KVLayout.from_proto(message.layout)
            self._bridges = {key: Bridge(self._memory, layout, message.num_pool_blocks)}
        return self._bridges[key]

    async def _ended(self) -> None:
        """Wait for what is under way, and for the threads that convert."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_default_executor()
