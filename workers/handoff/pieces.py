"""A pool's bytes as they leave over gRPC, piece by piece, out of host memory or off a device. No torch."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import NamedTuple

from ..kv.layout import ROWS, KVLayout, KVMemory, Runs
from ..kv.segment import Segment
from ..kv.wire import vector_bytes
from ..transport.runs import gather, in_parts

PART_BYTES = 4 << 20  # copied off a device at once


class Leaving(NamedTuple):
    """Runs of a pool that leave alike."""

    runs: Runs
    chunk_bytes: int  # copied at once: whole where they are narrowed
    like: KVLayout  # of their layers, where they are narrowed


def leaving(memory: KVMemory, segment: Segment, wire: str, most_bytes: int) -> Iterator[Leaving]:
    """All of a segment, in the wire's order. most_bytes: to copy at once, about."""
    layout = memory.layout
    if wire == layout.dtype:
        runs = memory.runs(segment.block_ids, segment.first_layer, segment.num_layers)
        yield Leaving(runs.merged(), most_bytes, layout)
        return
    for stretch in layout.stretches(segment.first_layer, segment.num_layers):
        like = stretch.like
        whole_bytes = vector_bytes(like.dtype, like.head_dim) if like.packing == ROWS else like.layer_bytes
        runs = layout.runs_of(stretch, memory.num_blocks, segment.block_ids).merged()
        yield Leaving(runs, max(most_bytes // whole_bytes, 1) * whole_bytes, like)


async def pieces(memory: KVMemory, runs: Runs, chunk_bytes: int) -> AsyncGenerator[bytes, None]:
    """Copy the runs out, in pieces of `chunk_bytes` (the last may be shorter).

    Blocks may be reused while a device is read, so a piece is good only if they are still leased when it comes; out of
    host memory it is copied in that very moment. Of a device one part is read ahead of what was asked for.
    """
    if memory.device is None:
        assert memory.region.view is not None
        for piece in gather(memory.region.view, runs, chunk_bytes):
            yield piece
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
