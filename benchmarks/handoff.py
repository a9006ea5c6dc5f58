"""How fast KV moves between two processes of this machine: memmove, then NIXL and gRPC, by size and by piece.

    python benchmarks/handoff.py [--json] [--transport nixl --transport grpc] [--seconds 0.3]

GB/s are medians of reads through the same Reader that hand-offs use, over pools too large for the caches, also as a
share of one thread's memmove of the same size. "Segments" are runs of adjacent blocks; "pieces" are 16 MiB in shuffled
runs.
Round trips: a renewal of a lease, and a whole hand-off of one block, from subscription to release.
"""

import argparse
import asyncio
import ctypes
import json
import mmap
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from diptych.proto import kv_pb2, kv_pb2_grpc, worker_pb2
from diptych.workers.channel import bind, make_server, open_channel
from diptych.workers.errors import ConfigError
from diptych.workers.handoff_sink import HandoffSink
from diptych.workers.handoff_source import HandoffSource
from diptych.workers.handoff_types import Reservation
from diptych.workers.kv_layout import KVLayout, KVMemory, Region
from diptych.workers.timings import PullTimes
from diptych.workers.transport.base import Reader, Source
from diptych.workers.transport.select import make_transports

LAYOUT = KVLayout("bfloat16", block_size=16, num_layers=4, num_kv_heads=2, head_dim=8, model_id="benchmark")
assert LAYOUT.block_bytes == 4096
POOL_BYTES = 128 << 20
NUM_BLOCKS = POOL_BYTES // LAYOUT.block_bytes
SIZES = [4 << 10 << 2 * i for i in range(7)]  # 4 KiB, 16 KiB, ... 16 MiB
NUM_SMALL = 2000  # whole hand-offs of one block that are on offer


def make_pool() -> KVMemory:
    pool = mmap.mmap(-1, POOL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool.madvise(mmap.MADV_HUGEPAGE)
    pool[:] = random.Random(0).randbytes(1 << 20) * (POOL_BYTES >> 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
    return KVMemory(LAYOUT, NUM_BLOCKS, Region(address, POOL_BYTES, memoryview(pool)))


# The source: a process of its own


class Leases:
    def end_lease(self, handoff_id: str) -> None:
        """Nothing is computed here: blocks are offered again and again."""


async def serve(transport: str) -> None:
    memory = make_pool()
    transports = make_transports([transport], memory)
    source = HandoffSource("source", memory, transports, Leases(), lease_s=3600.0)
    server = make_server(None)
    kv_pb2_grpc.add_KVHandoffServicer_to_server(source, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    blocks = range(NUM_BLOCKS)
    source.offer("whole", NUM_BLOCKS * LAYOUT.block_size)
    source.segment("whole", 0, blocks, [0] * NUM_BLOCKS, 0, LAYOUT.num_layers)
    for number in range(NUM_SMALL):
        source.offer(f"small-{number}", LAYOUT.block_size)
        source.segment(f"small-{number}", 0, [number], [0], 0, LAYOUT.num_layers)
        source.seal(f"small-{number}", LAYOUT.block_size, [1])
    print(json.dumps(f"127.0.0.1:{port}"), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    await source.close()
    for each in transports.values():
        await each.close()


@asynccontextmanager
async def source_process(transport: str) -> AsyncGenerator[str]:
    arguments = [__file__, "--serve", "--transport", transport]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise ConfigError(f"the source process for {transport} did not start; see its message above")
        yield json.loads(line)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


# The sink, and what it measures


@dataclass
class Engine:
    """Blocks for one small hand-off at a time."""

    async def reserve(self, key: str, num_tokens: int) -> Reservation:
        return Reservation((0,), 0)

    async def commit(self, key: str, num_computed: int, output_token_ids: list[int], times: PullTimes) -> None: ...
    async def fail(self, key: str, quarantine: bool) -> None: ...
    async def settle(self, key: str) -> None: ...


@dataclass(frozen=True)
class Measured:
    segments: dict[int, float]  # bytes -> bytes a second
    pieces: dict[int, float]
    renew_s: float
    handoff_s: float


async def median_s(once: Callable[[int], Awaitable[object]], seconds: float) -> float:
    """`once` gets the number of the repetition; a few are not counted."""
    times: list[float] = []
    for number in range(3):
        await once(number)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        await once(3 + len(times))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def walk(size: int) -> Callable[[int], int]:
    """Where repetition n reads: on through the pool, so that no cache holds it."""
    return lambda n: n * max(size, 1 << 20) % (POOL_BYTES - size + 1)


async def memmove_bandwidth(seconds: float) -> dict[int, float]:
    source, target = make_pool(), make_pool()
    found: dict[int, float] = {}
    for size in SIZES:
        at = walk(size)

        async def copy(number: int, size: int = size, at: Callable[[int], int] = at) -> None:
            ctypes.memmove(target.address + at(number), source.address + at(number), size)

        found[size] = size / await median_s(copy, seconds)
    return found


Reads = list[tuple[kv_pb2.Segment, list[int]]]  # each with its target blocks


def segment_of(blocks: Sequence[int]) -> kv_pb2.Segment:
    """Of hand-off "whole", in which position and block id are the same."""
    return kv_pb2.Segment(
        first_block=blocks[0],
        block_ids=blocks,
        generations=[0] * len(blocks),
        first_layer=0,
        num_layers=LAYOUT.num_layers,
    )


def in_a_row(size: int) -> Reads:
    """Reads of `size` bytes in one run, through the whole pool."""
    at, count = walk(size), size // LAYOUT.block_bytes
    firsts = [at(number) // LAYOUT.block_bytes for number in range(min(POOL_BYTES // size, 64))]
    return [(segment_of(range(first, first + count)), list(range(first, first + count))) for first in firsts]


def in_pieces(size: int) -> Reads:
    """Reads of 16 MiB in runs of `size` bytes: the source's in order, ours shuffled."""
    total, count = SIZES[-1] // LAYOUT.block_bytes, size // LAYOUT.block_bytes
    starts = list(range(0, total, count))
    random.Random(size).shuffle(starts)
    targets = [start + i for start in starts for i in range(count)]
    firsts = range(0, NUM_BLOCKS, total)
    return [(segment_of(range(f, f + total)), [f + block for block in targets]) for f in firsts]


async def bandwidth(reader: Reader, reads_of: Callable[[int], Reads], seconds: float) -> dict[int, float]:
    found: dict[int, float] = {}
    for size in SIZES:
        reads = reads_of(size)
        num_bytes = len(reads[0][1]) * LAYOUT.block_bytes
        found[size] = num_bytes / await median_s(lambda n, r=reads: reader.read(*r[n % len(r)]), seconds)
    return found


async def measure(transport: str, seconds: float) -> Measured:
    memory = make_pool()
    transports = make_transports([transport], memory)
    async with source_process(transport) as address, open_channel(address) as channel:
        stub = kv_pb2_grpc.KVHandoffStub(channel)
        request = kv_pb2.SubscribeRequest(
            handoff_id="whole",
            source_incarnation="source",
            sink_incarnation="sink/0",
            layout=LAYOUT.to_proto(),
            transports=[transport],
        )
        stream = stub.Subscribe(request)
        opened = (await stream.read()).opened
        reader = await transports[transport].connect(Source("whole", "sink/0", opened, stub), memory)
        by_segment = await bandwidth(reader, in_a_row, seconds)
        by_piece = await bandwidth(reader, in_pieces, seconds)
        renewal = kv_pb2.RenewRequest(handoff_id="whole", sink_incarnation="sink/0")
        renew_s = await median_s(lambda _: stub.Renew(renewal), seconds)
        sink = HandoffSink("sink", memory, transports, Engine())

        async def hand_off(number: int) -> None:
            named = worker_pb2.HandoffSource(handoff_id=f"small-{number}", address=address, incarnation="source")
            await sink.pull("k", named, 10.0)

        handoff_s = await median_s(hand_off, min(seconds, 1.0))
        await sink.close()
        stream.cancel()
    for each in transports.values():
        await each.close()
    return Measured(by_segment, by_piece, renew_s, handoff_s)


# What it says


def human(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def show(name: str, result: dict[int, float], memmove: dict[int, float]) -> None:
    cells = [f"{result[size] / 1e9:6.2f} ({result[size] / memmove[size]:4.0%})" for size in SIZES]
    print(f"{name:14}" + "".join(f"{cell:>16}" for cell in cells))


async def main(transports: Sequence[str], seconds: float, as_json: bool) -> None:
    memmove = await memmove_bandwidth(seconds)
    results = {name: await measure(name, seconds) for name in transports}
    if as_json:
        print(json.dumps({"memmove": memmove, **{name: asdict(result) for name, result in results.items()}}))
        return
    print("GB/s (share of memmove)")
    print(" " * 14 + "".join(f"{human(size):>16}" for size in SIZES))
    show("memmove", memmove, memmove)
    for name, result in results.items():
        show(f"{name} segments", result.segments, memmove)
        show(f"{name} pieces", result.pieces, dict.fromkeys(SIZES, memmove[SIZES[-1]]))
    for name, result in results.items():
        print(f"{name}: renewal {result.renew_s * 1e6:.0f} µs, hand-off of a block {result.handoff_s * 1e3:.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", action="append", choices=["nixl", "grpc"], help="may be given twice")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.transport[0]))
    else:
        asyncio.run(main(given.transport or ["nixl", "grpc"], given.seconds, given.json))
