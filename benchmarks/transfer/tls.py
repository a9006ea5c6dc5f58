"""Cost of TLS to a hand-off over gRPC: bytes a second, processor time a GB, and the time of a new connection.

    python -m benchmarks.transfer.tls [--repeat 7] [--json FILE]

The KV of a prompt of 4,096 tokens of the 135 M shape (90 MiB) moves from a process with a HandoffSource to this one, as
a pull reads it: four parts of 4 MiB at a time. With and without TLS take turns; figures are medians. `source` and
`sink`: processor time of each process. `connected`: until the first call on a new channel is answered. Workers keep
their channels, so that only the first hand-off between two of them pays this in its time to first token.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from diptych.proto import kv_pb2, kv_pb2_grpc
from diptych.workers.common.channel import bind, make_server, open_channel, server_credentials
from diptych.workers.common.tls import TlsFiles, make_identity
from diptych.workers.handoff.pull import MAX_READS
from diptych.workers.handoff.source import HandoffSource
from diptych.workers.handoff.types import SegmentReady
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.segment import Segment
from diptych.workers.transport.base import KVReader, Source
from diptych.workers.transport.machine import this_machine
from diptych.workers.transport.select import make_transports

from .transfer import in_a_row, segment_of, take_turns
from .transfer_source import LAYOUT, NUM_BLOCKS, Worker, make_pool, tell

NUM_BYTES = 4096 * 30 * 2 * 3 * 64 * 2  # tokens, layers, K and V, KV heads, head_dim, bfloat16
PART = 4 << 20
HANDOFF = {"handoff_id": "whole", "sink_incarnation": "sink/0"}


@dataclass(frozen=True)
class Row:
    tls: bool
    gb_s: float
    source_cpu_s: float  # a GB
    sink_cpu_s: float
    connected_ms: float

    def show(self) -> None:
        print(
            f"{'TLS' if self.tls else 'plain':6} {self.gb_s:6.2f} GB/s, CPU s/GB: source {self.source_cpu_s:.2f}, "
            f"sink {self.sink_cpu_s:.2f}; connected in {self.connected_ms:.1f} ms",
            flush=True,
        )


class Side:
    """A source, with or without TLS, and what was measured of it."""

    def __init__(self, address: str, tls: TlsFiles | None, pid: int, reader: KVReader, ours: KVMemory) -> None:
        self._address, self._tls, self._source = address, tls, psutil.Process(pid)
        self._reader, self._ours = reader, ours
        self.times: list[tuple[float, float, float]] = []  # seconds: of a hand-off, of either process

    async def hand_off(self) -> None:
        parts = in_a_row(PART)[:POOL_PARTS]
        named = [(segment_of(copies), copies) for copies in parts]
        left = iter([named[i % len(named)] for i in range(NUM_BYTES // PART)])

        async def pull() -> None:
            for segment, copies in left:
                await self._reader.read(segment, copies, self._ours.region)

        began, source, sink = time.perf_counter(), _cpu_s(self._source), time.process_time()
        await asyncio.gather(*(pull() for _ in range(MAX_READS)))
        ended = time.perf_counter()
        self.times.append((ended - began, _cpu_s(self._source) - source, time.process_time() - sink))

    async def connect(self, _number: int) -> None:
        async with open_channel(self._address, self._tls) as channel:
            await kv_pb2_grpc.KVHandoffStub(channel).Renew(kv_pb2.RenewRequest(**HANDOFF))

    def row(self, connected_s: float) -> Row:
        seconds, source, sink = (statistics.median(column) for column in zip(*self.times, strict=True))
        gb = NUM_BYTES // PART * PART / 1e9
        return Row(self._tls is not None, gb / seconds, source / gb, sink / gb, 1e3 * connected_s)


POOL_PARTS = NUM_BLOCKS * LAYOUT.block_bytes // PART


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def files_in(folder: Path) -> TlsFiles:
    return TlsFiles(*(str(folder / name) for name in ("ca", "cert", "key")))


async def serve(tls: TlsFiles | None) -> None:
    """Source process: one hand-off of its whole pool is on offer, again and again, until its standard input ends."""
    memory = make_pool()
    transports = make_transports(["grpc"], [memory.region])
    source = HandoffSource("source", memory, transports, Worker(), Worker(), lease_s=3600.0)
    server = make_server(None)
    kv_pb2_grpc.add_KVHandoffServicer_to_server(source, server)
    port = bind(server, "127.0.0.1", 0, server_credentials(tls) if tls is not None else None)
    await server.start()
    source.offer("whole", NUM_BLOCKS * LAYOUT.block_size)
    whole = Segment(0, tuple(range(NUM_BLOCKS)), (0,) * NUM_BLOCKS, 0, LAYOUT.num_layers)
    source.on_event(SegmentReady("whole", whole))
    tell(f"127.0.0.1:{port}")
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    await source.close()


@asynccontextmanager
async def side(tls: TlsFiles | None, ours: KVMemory) -> AsyncGenerator[Side]:
    pipe = asyncio.subprocess.PIPE
    folder = [] if tls is None else [str(Path(tls.ca).parent)]
    command = [sys.executable, "-m", "benchmarks.transfer.tls", "--serve", *folder]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        address = json.loads(await process.stdout.readline())
        async with open_channel(address, tls) as channel:
            stub = kv_pb2_grpc.KVHandoffStub(channel)
            request = kv_pb2.SubscribeRequest(
                **HANDOFF,
                source_incarnation="source",
                layout=LAYOUT.to_proto(),
                transports=["grpc"],
                machine=this_machine(),
            )
            stream = stub.Subscribe(request)
            opened = (await stream.read()).opened  # type: ignore[union-attr]
            reader = await make_transports(["grpc"], [ours.region])["grpc"].connect(
                Source("whole", "sink/0", opened, stub)
            )
            yield Side(address, tls, process.pid, reader, ours)
            stream.cancel()
    finally:
        process.stdin.close()
        await process.wait()


async def measure(repeat: int) -> list[Row]:
    ours, identity = make_pool(), make_identity("benchmark")
    with tempfile.TemporaryDirectory() as name:
        for part in ("ca", "cert", "key"):
            (Path(name) / part).write_bytes(getattr(identity, part))
        async with side(None, ours) as plain, side(files_in(Path(name)), ours) as encrypted:
            for i in range(-1, repeat):  # the first warms both up
                for each in (plain, encrypted):
                    await each.hand_off()
                    if i < 0:
                        each.times.clear()
            connected = await take_turns({"plain": plain.connect, "TLS": encrypted.connect}, 1.0)
            return [plain.row(connected["plain"]), encrypted.row(connected["TLS"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs="?", const="", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(files_in(Path(args.serve)) if args.serve else None))
        return
    rows = asyncio.run(measure(args.repeat))
    for row in rows:
        row.show()
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
