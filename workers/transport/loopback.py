"""KV between workers of one process, for tests: memory to memory, in steps, so that other tasks run in between."""

import asyncio
from collections.abc import Sequence

from ...proto import kv_pb2
from ..errors import TransportError
from ..kv_layout import KVMemory
from .base import Reader, Source, Transport
from .runs import Scatter, gather, runs_of

STEP_BYTES = 1 << 16


class LoopbackReader(Reader):
    def __init__(self, registry: dict[str, KVMemory], incarnation: str, memory: KVMemory) -> None:
        self._registry = registry
        self._incarnation = incarnation
        self._memory = memory

    async def read(self, segment: kv_pb2.Segment, blocks: Sequence[int]) -> int:
        layers = segment.first_layer, segment.num_layers
        source, target = self._look_up(), self._memory
        if any(block >= source.num_blocks for block in segment.block_ids):
            raise TransportError("the source announced a block that it does not have")
        assert source.view is not None and target.view is not None
        scatter = Scatter(target.view, runs_of(target, blocks, *layers))
        num_bytes = scatter.num_missing
        for piece in gather(source.view, runs_of(source, segment.block_ids, *layers), STEP_BYTES):
            self._look_up()
            scatter.write(piece)
            await asyncio.sleep(0)
        return num_bytes

    def _look_up(self) -> KVMemory:
        try:
            return self._registry[self._incarnation]
        except KeyError as e:
            raise TransportError(f"no worker {self._incarnation} in this process") from e


class LoopbackTransport(Transport):
    """`registry`: the memory of each living worker by its incarnation."""

    name = "loopback"

    def __init__(self, registry: dict[str, KVMemory]) -> None:
        self._registry = registry

    def endpoint(self) -> None:
        return None

    async def connect(self, source: Source, memory: KVMemory) -> Reader:
        incarnation = source.opened.source_incarnation
        if incarnation not in self._registry:
            raise TransportError(f"no worker {incarnation} in this process")
        return LoopbackReader(self._registry, incarnation, memory)
