"""KV between workers of one process, for tests: memory to memory, in steps, so that other tasks run in between."""

import asyncio

from ...proto import kv_pb2
from ..common.errors import TransportError
from ..kv.layout import Copies, Region, Runs
from ..kv.memory import KVMemory
from .base import KVReader, Source, Transport
from .runs import Scatter, gather

STEP_BYTES = 1 << 16


class LoopbackReader(KVReader):
    def __init__(self, registry: dict[str, KVMemory], incarnation: str) -> None:
        self._registry = registry
        self._incarnation = incarnation

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        source = self._look_up()
        if (copies.remote + copies.lengths).max(initial=0) > source.num_bytes:
            raise TransportError("the source announced a block that it does not have")
        assert source.view is not None and into.view is not None
        scatter = Scatter(into.view, copies.into)
        for piece in gather(source.view, Runs(copies.remote, copies.lengths), STEP_BYTES):
            self._look_up()
            scatter.write(piece)
            await asyncio.sleep(0)

    def _look_up(self) -> Region:
        try:
            return self._registry[self._incarnation].region
        except KeyError as e:
            raise TransportError(f"no worker {self._incarnation} in this process") from e


class LoopbackTransport(Transport):
    """`registry`: the memory of each living worker by its incarnation."""

    name = "loopback"

    def __init__(self, registry: dict[str, KVMemory]) -> None:
        self._registry = registry

    async def connect(self, source: Source) -> KVReader:
        incarnation = source.opened.source_incarnation
        if incarnation not in self._registry:
            raise TransportError(f"no worker {incarnation} in this process")
        return LoopbackReader(self._registry, incarnation)
