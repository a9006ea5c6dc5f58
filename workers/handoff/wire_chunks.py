"""Reads a pool's bytes in chunks for gRPC, from host or device memory. No torch."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import NamedTuple

from ..kv.dtypes import vector_bytes
from ..kv.layout import ROWS, KVLayout, Runs
from ..kv.memory import KVMemory
from ..kv.packing import to_wire
from ..kv.segment import Segment
from ..transport.runs import gather, in_parts

PART_BYTES = 4 << 20  # copied off a device at once


class WireRuns(NamedTuple):
    """Runs of a pool that are sent in the same way."""

    runs: Runs
    chunk_bytes: int  # copied at once; whole vectors or layers where the dtype is narrowed
    uniform: KVLayout  # layout of their layers, where the dtype is narrowed


def wire_runs(memory: KVMemory, segment: Segment, wire: str, most_bytes: int) -> Iterator[WireRuns]:
    """Find the runs of a segment, in the wire's order. most_bytes: about so many are copied at once."""
    layout = memory.layout
    if wire == layout.dtype:
        runs = memory.runs(segment.block_ids, segment.first_layer, segment.num_layers)
        yield WireRuns(runs.merged(), most_bytes, layout)
        return
    for group in layout.layer_groups(segment.first_layer, segment.num_layers):
        uniform = group.uniform
        whole_bytes = vector_bytes(uniform.dtype, uniform.head_dim) if uniform.packing == ROWS else uniform.layer_bytes
        runs = layout.runs_of(group, memory.num_blocks, segment.block_ids).merged()
        yield WireRuns(runs, max(most_bytes // whole_bytes, 1) * whole_bytes, uniform)


async def wire_chunks(memory: KVMemory, segment: Segment, wire: str, most_bytes: int) -> AsyncGenerator[bytes, None]:
    """Read a segment in the dtype `wire`, in chunks of at most `most_bytes`.

    Blocks may be reused while they are read: a chunk is valid only if they are still leased when it comes.
    """
    for part in wire_runs(memory, segment, wire, most_bytes):
        async with aclosing(read_chunks(memory, part.runs, part.chunk_bytes)) as chunks:
            async for chunk in chunks:
                if wire == memory.layout.dtype:
                    yield chunk
                    continue
                narrowed = await asyncio.to_thread(to_wire, chunk, part.uniform, wire)
                for start in range(0, len(narrowed), most_bytes):
                    yield narrowed[start : start + most_bytes]


async def read_chunks(memory: KVMemory, runs: Runs, chunk_bytes: int) -> AsyncGenerator[bytes, None]:
    """Copy the runs out, in chunks of `chunk_bytes` (the last may be shorter).

    Blocks may be reused while a device is read, so a chunk is valid only if they are still leased when it comes. Out of
    host memory it is copied in that very moment; of a device one part is read ahead.
    """
    if memory.device is None:
        assert memory.region.view is not None
        for chunk in gather(memory.region.view, runs, chunk_bytes):
            yield chunk
        return
    part_bytes = max(PART_BYTES // chunk_bytes, 1) * chunk_bytes
    reads = (asyncio.ensure_future(asyncio.to_thread(memory.device.read, p)) for p in in_parts(runs, part_bytes))
    ahead = next(reads, None)
    try:
        while ahead is not None:
            part = await ahead
            ahead = next(reads, None)
            for start in range(0, len(part), chunk_bytes):
                yield part[start : start + chunk_bytes]
    finally:
        if ahead is not None:
            ahead.cancel()  # its thread ends by itself: it only reads
