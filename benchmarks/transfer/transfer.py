"""Measures the speed of KV between two processes of this machine, and what decoding loses meanwhile.

    python -m benchmarks.transfer.transfer [--seconds 0.3] [--json] [--no-decode]

Segments: one run of bytes each, through the Readers that hand-offs use, beside one thread's memmove (huge pages), a TCP
socket on the loopback interface, and a NIXL agent without Diptych that reads one descriptor. Pieces: four reads at
once, as a pull has them, of 16 MiB each in runs that lie in order at the source and shuffled here. All take turns at
each size, over pools too large for the caches; figures are medians. Then: notifications of NIXL there and back, a
renewal of a lease, a whole hand-off of one block, and decode steps while the same process reads without a pause.
"""

import argparse
import asyncio
import ctypes
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diptych.proto import kv_pb2, kv_pb2_grpc, worker_pb2
from diptych.workers.common.channel import open_channel
from diptych.workers.handoff.pull import MAX_READS
from diptych.workers.handoff.sink import HandoffSink
from diptych.workers.handoff.types import Reservation
from diptych.workers.kv.layout import Copies
from diptych.workers.kv.memory import KVMemory
from diptych.workers.transport.base import KVReader, Source
from diptych.workers.transport.machine import this_machine
from diptych.workers.transport.select import make_transports

from .transfer_decode import DecodeFigures, decode_while
from .transfer_source import LAYOUT, POOL_BYTES, SLEEP, SPIN, make_pool, raw_agent

SIZES = [16 << 10 << 2 * i for i in range(7)]  # 16 KiB, 64 KiB, ... 64 MiB
PIECES = [4 << 10 << 2 * i for i in range(5)]  # 4 KiB, 16 KiB, ... 1 MiB
TOTAL = 16 << 20  # bytes of a read in pieces
BURST = 5
SOURCE = str(Path(__file__).with_name("transfer_source.py"))

Once = Callable[[int], Awaitable[object]]  # gets the number of the repetition
Figures = dict[str, dict[int, float]]  # who -> size -> seconds


@asynccontextmanager
async def source_process(role: str) -> AsyncGenerator[tuple[Any, asyncio.StreamWriter]]:
    """Yield what the source process reported of itself, and its standard input."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, SOURCE, role, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline()), process.stdin
    finally:
        process.stdin.close()
        await process.wait()


async def take_turns(contenders: dict[str, Once], seconds: float) -> dict[str, float]:
    """Median seconds of each. In each turn a contender runs BURST times; the first is not counted, for it finds its
    threads asleep and its code out of the caches."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    number, end = 0, time.perf_counter() + seconds * len(contenders)
    while time.perf_counter() < end or number < 2 * BURST:
        for name, once in contenders.items():
            for repetition in range(BURST):
                start = time.perf_counter()
                await once(number + repetition)
                if repetition:
                    times[name].append(time.perf_counter() - start)
        number += BURST
    return {name: statistics.median(found) for name, found in times.items()}


# What is read


def in_a_row(size: int) -> list[Copies]:
    """Reads of `size` bytes in one run, on through the pool, so that no cache holds what comes next."""
    starts = [n * max(size, 1 << 20) % (POOL_BYTES - size + 1) for n in range(64)]
    return [Copies(*(np.array([n], dtype=np.int64) for n in (start, start, size))) for start in starts]


def in_pieces(size: int) -> list[Copies]:
    """Reads of TOTAL bytes in runs of `size`: the source's in order, ours shuffled."""
    lengths = np.full(TOTAL // size, size, dtype=np.int64)
    order = np.array(random.Random(size).sample(range(len(lengths)), len(lengths)), dtype=np.int64)
    ranked = np.arange(len(lengths), dtype=np.int64)
    return [Copies(base + ranked * size, base + order * size, lengths) for base in range(0, POOL_BYTES, TOTAL)]


def segment_of(copies: Copies) -> kv_pb2.Segment:
    """The blocks of hand-off "whole", in which position and block id are the same."""
    first, count = int(copies.remote[0]) // LAYOUT.block_bytes, copies.num_bytes // LAYOUT.block_bytes
    ids = range(first, first + count)
    return kv_pb2.Segment(
        first_block=first, block_ids=ids, generations=[0] * count, first_layer=0, num_layers=LAYOUT.num_layers
    )


# Who reads


def at_once(once: Once) -> Once:
    """MAX_READS of them, as in a pull."""

    async def all_of_them(number: int) -> None:
        await asyncio.gather(*(once(number * MAX_READS + i) for i in range(MAX_READS)))

    return all_of_them


def memmove(ours: KVMemory, theirs: KVMemory, reads: Sequence[Copies]) -> Once:
    near, far = ours.region.address, theirs.region.address
    plans = [list(zip(r.local + near, r.remote + far, r.lengths, strict=True)) for r in reads]
    plans = [[tuple(map(int, row)) for row in plan] for plan in plans]

    async def once(number: int) -> None:
        for target, source, size in plans[number % len(plans)]:
            ctypes.memmove(target, source, size)

    return once


def tcp(ours: KVMemory, line: socket.socket, reads: Sequence[Copies]) -> Once:
    assert ours.region.view is not None
    view = ours.region.view

    async def once(number: int) -> None:
        copies = reads[number % len(reads)]
        at, missing = int(copies.local[0]), copies.num_bytes
        line.sendall(missing.to_bytes(8, "big"))
        while missing:
            count = line.recv_into(view[at : at + missing])
            at, missing = at + count, missing - count

    return once


def through(reader: KVReader, ours: KVMemory, reads: Sequence[Copies]) -> Once:
    named = [(segment_of(copies), copies) for copies in reads]
    return lambda number: reader.read(*named[number % len(named)], ours.region)


@dataclass
class RawNixl:
    """NIXL without Diptych, on the thread that asks."""

    agent: Any
    ours: KVMemory
    base: int

    def one_descriptor(self, reads: Sequence[Copies]) -> Once:
        async def once(number: int) -> None:
            copies = reads[number % len(reads)]
            at, size = int(copies.local[0]), copies.num_bytes
            near = self.agent.get_xfer_descs([(self.ours.region.address + at, size, 0)], "DRAM")
            far = self.agent.get_xfer_descs([(self.base + at, size, 0)], "DRAM")
            handle = self.agent.initialize_xfer("READ", near, far, "raw-source")
            state = self.agent.transfer(handle)
            while state != "DONE":
                assert state != "ERR"
                state = self.agent.check_xfer_state(handle)
            handle.release()

        return once

    def notify(self, message: bytes) -> Once:
        async def once(number: int) -> None:
            self.agent.send_notif("raw-source", message)
            while not self.agent.get_new_notifs():
                pass

        return once


@dataclass
class Engine:
    """Blocks for one small hand-off at a time."""

    async def reserve(self, key: str, num_tokens: int) -> Reservation:
        return Reservation((0,), 0)

    def begin(self, key: str, *rest: object) -> None: ...
    async def commit(self, key: str, *rest: object) -> None: ...
    async def fail(self, key: str, quarantine: bool) -> None: ...
    async def settle(self, key: str) -> None: ...


@dataclass
class Connected:
    """A worker's end of one transport, and its source."""

    reader: KVReader
    stub: "kv_pb2_grpc.KVHandoffAsyncStub"
    hand_off: Once
    share_memory: Callable[[bool], None]
    ours: KVMemory

    async def renew(self, number: int) -> None:
        await self.stub.Renew(kv_pb2.RenewRequest(handoff_id="whole", sink_incarnation="sink/0"))


@asynccontextmanager
async def connected(role: str, ours: KVMemory) -> AsyncGenerator[Connected]:
    name = role.partition(":")[0]
    transports = make_transports([name], [ours.region])
    async with source_process(role) as (address, _), open_channel(address) as channel:
        stub = kv_pb2_grpc.KVHandoffStub(channel)
        whole = {"handoff_id": "whole", "source_incarnation": "source", "sink_incarnation": "sink/0"}
        request = kv_pb2.SubscribeRequest(**whole, layout=LAYOUT.to_proto(), transports=[name], machine=this_machine())
        stream = stub.Subscribe(request)
        opened = (await stream.read()).opened
        reader = await transports[name].connect(Source("whole", "sink/0", opened, stub))
        sink = HandoffSink("sink", ours, transports, Engine())

        async def hand_off(number: int) -> None:
            small = worker_pb2.HandoffSource(handoff_id=f"small-{number}", address=address, incarnation="source")
            await sink.pull("k", small, 10.0)

        yield Connected(reader, stub, hand_off, transports[name].share_memory, ours)
        await sink.close()
        stream.cancel()
    for each in transports.values():
        await each.close()


@dataclass
class Results:
    machine: str
    segments: Figures
    pieces: Figures
    round_trips: dict[str, float]  # seconds
    decode: DecodeFigures | None


async def measure(seconds: float, with_decode: bool) -> Results:
    ours, theirs = make_pool(), make_pool()
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(connected("shared_memory", ours))
        small = await stack.enter_async_context(connected("shared_memory:small", ours))
        nixl = await stack.enter_async_context(connected("nixl", ours))
        grpc = await stack.enter_async_context(connected("grpc", ours))
        (base, metadata), stdin = await stack.enter_async_context(source_process("raw"))
        port, _ = await stack.enter_async_context(source_process("tcp"))
        line = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        raw = RawNixl(raw_agent("raw-sink", ours.region), ours, base)
        raw.agent.add_remote_agent(bytes.fromhex(metadata))
        stdin.write(raw.agent.get_agent_metadata().hex().encode() + b"\n")

        segments: Figures = {}
        for size in SIZES:
            reads = in_a_row(size)
            contenders = {
                "memmove": memmove(ours, theirs, reads),
                "TCP": tcp(ours, line, reads),
                "one NIXL descriptor": raw.one_descriptor(reads),
                "shared memory": through(shared.reader, ours, reads),
                "the same, small pages": through(small.reader, ours, reads),
                "NIXL": through(nixl.reader, ours, reads),
                "gRPC": through(grpc.reader, ours, reads),
            }
            note(segments, size, await take_turns(contenders, seconds))
        pieces: Figures = {}
        for size in PIECES:
            reads = in_pieces(size)
            contenders = {
                "memmove": at_once(memmove(ours, theirs, reads)),
                "shared memory": at_once(through(shared.reader, ours, reads)),
                "the same, small pages": at_once(through(small.reader, ours, reads)),
                "NIXL": at_once(through(nixl.reader, ours, reads)),
                "gRPC": at_once(through(grpc.reader, ours, reads)),
            }
            note(pieces, size, await take_turns(contenders, seconds))
        once = {
            "notification, both ends spin": raw.notify(SPIN),
            "notification, far end sleeps 1 ms at a time": raw.notify(SLEEP),
            "renewal of a lease (gRPC)": nixl.renew,
            "hand-off of one block over shared memory": shared.hand_off,
            "hand-off of one block over NIXL": nixl.hand_off,
            "hand-off of one block over gRPC": grpc.hand_off,
        }
        round_trips: dict[str, float] = {}
        for name, call in once.items():
            round_trips |= await take_turns({name: call}, min(seconds, 1.0))
        decode: DecodeFigures | None = None
        if with_decode:
            read = through(shared.reader, ours, in_pieces(256 << 10))
            decode = await decode_while(read, TOTAL, shared.share_memory)
    return Results(machine(), segments, pieces, round_trips, decode)


def note(figures: Figures, size: int, found: dict[str, float]) -> None:
    for name, seconds in found.items():
        figures.setdefault(name, {})[size] = seconds


# What it says


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{os.cpu_count()} cores, {', '.join(sorted(names)) or 'unknown CPU'}"


def human(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def show(title: str, figures: Figures, cell: Callable[[str, int], str]) -> None:
    sizes = list(next(iter(figures.values())))
    print(f"\n{title:24}" + "".join(f"{human(size):>14}" for size in sizes))
    for name in figures:
        print(f"{name:24}" + "".join(f"{cell(name, size):>14}" for size in sizes))


def show_all(results: Results) -> None:
    segments, pieces = results.segments, results.pieces

    def speed(figures: Figures, name: str, num_bytes: int, size: int) -> str:
        share = figures["memmove"][size] / figures[name][size]
        return f"{num_bytes / figures[name][size] / 1e9:.2f} ({share:.0%})"

    print(results.machine)
    show("segments, GB/s", segments, lambda name, size: speed(segments, name, size, size))
    show("segments, µs", segments, lambda name, size: f"{segments[name][size] * 1e6:.0f}")
    show("pieces, GB/s", pieces, lambda name, size: speed(pieces, name, MAX_READS * TOTAL, size))
    show("µs a piece", pieces, lambda name, size: f"{pieces[name][size] / (MAX_READS * TOTAL // size) * 1e6:.2f}")
    print()
    for name, seconds in results.round_trips.items():
        print(f"{name}: {seconds * 1e6:.0f} µs")
    if results.decode is not None:
        print(results.decode.sentence())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-decode", action="store_true", help="leave out the decode steps, which take half a minute")
    given = parser.parse_args()
    found = asyncio.run(measure(given.seconds, not given.no_decode))
    if given.json:
        print(json.dumps(found, default=vars))
    else:
        show_all(found)
