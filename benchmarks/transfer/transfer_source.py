"""The far ends that transfer.py reads from, each a process of its own: `python transfer_source.py ROLE`.

    shared_memory, nixl, grpc   a HandoffSource with that transport; "shared_memory:small": its pool in pages of 4 KiB
    raw                         a NIXL agent without Diptych, which sends every notification back
    tcp                         a socket that answers the first 8 bytes (a size) with so many

Each prints one line of JSON: what it takes to reach it. It ends when its standard input does.
"""

import asyncio
import ctypes
import json
import mmap
import os
import random
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from diptych.proto import kv_pb2_grpc
from diptych.workers.common.channel import bind, make_server
from diptych.workers.handoff.ports import EngineCommands
from diptych.workers.handoff.source import HandoffSource
from diptych.workers.handoff.types import HandoffSealed, SegmentReady
from diptych.workers.kv.layout import KVLayout, Region
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.pool_file import PoolFile
from diptych.workers.kv.segment import Segment
from diptych.workers.transport.nixl_thread import SERVE_POLL_S, UCX_SETTINGS
from diptych.workers.transport.select import make_transports

LAYOUT = KVLayout("bfloat16", block_size=16, num_layers=4, num_kv_heads=2, head_dim=8, model_id="benchmark")
assert LAYOUT.block_bytes == 4096
POOL_BYTES = 128 << 20
NUM_BLOCKS = POOL_BYTES // LAYOUT.block_bytes
NUM_SMALL = 2000  # whole hand-offs of one block that are on offer
SPIN, SLEEP = b"spin", b"sleep"  # notifications: how the raw agent waits for the next one


def make_pool(file: PoolFile | None = None) -> KVMemory:
    """A pool in private memory that asks for huge pages, or in a memory file."""
    if file is None:
        pool = mmap.mmap(-1, POOL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pool.madvise(mmap.MADV_HUGEPAGE)
    else:
        pool = file.map(POOL_BYTES)
        file.seal()
    pool[:] = random.Random(0).randbytes(1 << 20) * (POOL_BYTES >> 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
    return KVMemory(LAYOUT, NUM_BLOCKS, Region(address, POOL_BYTES, memoryview(pool), file=file))


def pool_file(*, in_small_pages: bool) -> PoolFile | None:
    if in_small_pages:
        fd = os.memfd_create("benchmark", os.MFD_ALLOW_SEALING)
        return PoolFile(fd, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), "small")
    return PoolFile.make(POOL_BYTES, small_pages=True)


class Worker:
    """The engine and the requests of a HandoffSource. Nothing is computed here: blocks are offered again and again."""

    def post(self, command: Callable[[EngineCommands], object]) -> None: ...
    def handed_off(self, sealed: HandoffSealed) -> None: ...
    def forget(self, key: str) -> None: ...


async def serve_handoffs(role: str) -> None:
    transport, _, pages = role.partition(":")
    memory = make_pool(pool_file(in_small_pages=pages == "small") if transport == "shared_memory" else None)
    transports = make_transports([transport], [memory.region])
    source = HandoffSource("source", memory, transports, Worker(), Worker(), lease_s=3600.0)
    server = make_server(None)
    kv_pb2_grpc.add_KVHandoffServicer_to_server(source, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    source.offer("whole", NUM_BLOCKS * LAYOUT.block_size)
    source.on_event(
        SegmentReady("whole", Segment(0, tuple(range(NUM_BLOCKS)), (0,) * NUM_BLOCKS, 0, LAYOUT.num_layers))
    )
    for number in range(NUM_SMALL):
        source.offer(f"small-{number}", LAYOUT.block_size)
        source.on_event(SegmentReady(f"small-{number}", Segment(0, (number,), (0,), 0, LAYOUT.num_layers)))
        source.on_event(HandoffSealed(f"small-{number}", None, LAYOUT.block_size, (1,)))
    tell(f"127.0.0.1:{port}")
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    await source.close()
    for each in transports.values():
        await each.close()


def raw_agent(name: str, region: Region) -> Any:
    """A NIXL agent with UCX set up as Diptych's is, and `region` registered."""
    for setting, value in {**UCX_SETTINGS, "NIXL_LOG_LEVEL": "FATAL", "UCX_NET_DEVICES": "lo"}.items():
        os.environ.setdefault(setting, value)
    from nixl import _api as nixl

    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(region.address, region.num_bytes, 0, "")], "DRAM")
    return agent


def serve_raw() -> None:
    memory = make_pool()
    agent = raw_agent("raw-source", memory.region)
    tell([memory.region.address, agent.get_agent_metadata().hex()])
    agent.add_remote_agent(bytes.fromhex(sys.stdin.readline()))
    spin_until = 0.0
    while time.monotonic() < spin_until or not select.select([sys.stdin], [], [], SERVE_POLL_S)[0]:
        for message in [m for messages in agent.get_new_notifs().values() for m in messages]:
            spin_until = time.monotonic() + 1 if message == SPIN else 0.0
            agent.send_notif("raw-sink", message)


def serve_tcp() -> None:
    view = make_pool().region.view
    assert view is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tell(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        while size := int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big"):
            connection.sendall(view[:size])


def tell(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    match sys.argv[1]:
        case "raw":
            serve_raw()
        case "tcp":
            serve_tcp()
        case name:
            asyncio.run(serve_handoffs(name))
