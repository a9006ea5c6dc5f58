"""A source worker without an engine, as a process: offers sealed hand-offs "h0", "h1", ... of its whole pool.

Run it by fork_command, with TRANSPORT NUM_BLOCKS SEED LEASE_S NUM_HANDOFFS. Prints one line of JSON; ends when it is
killed, or with the process that started it. For "cuda_ipc" the pool is on a fake device, whose memory others can map;
for "pieces" on two of them, for the same transport.
"""

import asyncio
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from diptych.proto import kv_pb2_grpc
from diptych.workers.common.channel import bind, make_server
from diptych.workers.common.parent_process import end_with_parent
from diptych.workers.handoff.ports import EngineCommands
from diptych.workers.handoff.source import HandoffSource
from diptych.workers.handoff.types import HandoffSealed
from diptych.workers.kv.layout import KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.transport.select import make_transports

from ..support.handoff_pair import make_memory, seal_event, segment_event

PIECES = "pieces"
LAYOUT = KVLayout("float32", block_size=16, num_layers=3, num_kv_heads=4, head_dim=64, model_id="m")


class Worker:
    """The engine and the requests of a HandoffSource."""

    def post(self, command: Callable[[EngineCommands], object]) -> None:
        command(self)

    def end_lease(self, handoff_id: str, reads: Sequence[tuple[int, float]] = ()) -> None:
        print(json.dumps({"ended": handoff_id}), flush=True)

    def caught_up(self, handoff_id: str) -> None:
        raise AssertionError("no hand-off here is live")

    def handed_off(self, sealed: HandoffSealed) -> None:
        raise AssertionError("no hand-off here is live")

    def forget(self, key: str) -> None:
        raise AssertionError("no request of a router is here")


def make_pool(transport: str, num_blocks: int, content: bytes | None = None) -> KVMemory:
    if transport == PIECES:
        from ..support.gpu.fake_ranks import make_pieces

        return make_pieces(replace(LAYOUT, tensor_parallel=2), num_blocks, content)
    if transport == "cuda_ipc":
        from ..support.gpu.fake_cuda import make_device_memory

        return make_device_memory(LAYOUT, num_blocks, content)
    return make_memory(LAYOUT, num_blocks, content=content or b"", in_file=True)


def transport_name(transport: str) -> str:
    return "cuda_ipc" if transport == PIECES else transport


async def _serve() -> NoReturn:
    transport, num_blocks, seed, lease_s, num_handoffs = sys.argv[1], *map(int, sys.argv[2:])
    memory = make_pool(transport, num_blocks, random.Random(seed).randbytes(num_blocks * LAYOUT.block_bytes))
    transports = make_transports([transport_name(transport)], [memory.region], device=memory.device)
    worker = Worker()
    source = HandoffSource(f"source-{seed}", memory, transports, worker, worker, lease_s=lease_s)
    server = make_server(None)
    kv_pb2_grpc.add_KVHandoffServicer_to_server(source, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    for number in range(num_handoffs):
        source.offer(f"h{number}", num_blocks * LAYOUT.block_size)
        for first in range(0, num_blocks, 64):
            blocks = range(first, min(first + 64, num_blocks))
            source.on_event(segment_event(f"h{number}", first, blocks, [1] * len(blocks), 0, LAYOUT.num_layers))
        source.on_event(seal_event(f"h{number}", num_blocks * LAYOUT.block_size, [7]))
    print(json.dumps({"address": f"127.0.0.1:{port}", "incarnation": f"source-{seed}"}), flush=True)
    await asyncio.Event().wait()
    raise AssertionError("it waits for ever")


def main() -> int:
    end_with_parent()
    asyncio.run(_serve())
    return 1
