"""Hand-offs between two processes: exact bytes, and sources that die or stop in the middle."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from diptych.proto import worker_pb2
from diptych.workers.common.errors import DiptychError, LeaseLost, TransportError, WorkerLost
from diptych.workers.handoff.pull import PullResult
from diptych.workers.handoff.sink import HandoffSink
from diptych.workers.kv.memory import KVMemory
from diptych.workers.transport.runs import gather
from diptych.workers.transport.select import make_transports

from ..support.forked import ForkedProcess, fork_command
from ..support.gpu.fake_cuda import seen_by_host
from ..support.handoff_pair import SinkEngine, until_quiet
from .handoff_process import PIECES, main, make_pool, transport_name

pytestmark = pytest.mark.e2e

NUM_BLOCKS = 256  # 24 MiB
TRANSPORTS = ["shared_memory", "nixl", "grpc", "cuda_ipc", PIECES]  # the last two by fake devices


@dataclass
class SourceProcess:
    process: ForkedProcess
    address: str
    incarnation: str
    seed: int

    def named(self, number: int = 0) -> worker_pb2.HandoffSource:
        return worker_pb2.HandoffSource(handoff_id=f"h{number}", address=self.address, incarnation=self.incarnation)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def next_end(self) -> str:
        return json.loads(await asyncio.to_thread(self.process.stdout.readline))["ended"]


@asynccontextmanager
async def source_process(
    transport: str, seed: int = 1, lease_s: int = 10, num_handoffs: int = 1
) -> AsyncIterator[SourceProcess]:
    with fork_command(main, [transport, *map(str, (NUM_BLOCKS, seed, lease_s, num_handoffs))], os.environ) as process:
        try:
            ready = json.loads(await asyncio.to_thread(process.stdout.readline))
            yield SourceProcess(process, ready["address"], ready["incarnation"], seed)
        finally:
            process.kill()


@asynccontextmanager
async def receive(transport: str, engine: SinkEngine) -> AsyncIterator[tuple[HandoffSink, KVMemory]]:
    """The result with the pool, for a test to read."""
    memory = make_pool(transport, NUM_BLOCKS)
    transports = make_transports([transport_name(transport)], [memory.region], device=memory.device)
    sink = HandoffSink("sink", memory, transports, engine)
    try:
        yield sink, memory if memory.device is None else seen_by_host(memory)
    finally:
        await sink.close()
        for each in transports.values():
            await each.close()


def shuffled_table() -> tuple[int, ...]:
    return tuple(random.Random(9).sample(range(NUM_BLOCKS), NUM_BLOCKS))


def check(memory: KVMemory, source: SourceProcess, table: tuple[int, ...]) -> None:
    assert memory.region.view is not None
    theirs = memoryview(random.Random(source.seed).randbytes(memory.region.num_bytes))
    for position, block in enumerate(table):
        sides = (theirs, position), (memory.region.view, block)
        sent, got = (b"".join(gather(view, memory.runs([of], 0, 3), 1 << 20)) for view, of in sides)
        assert got == sent, f"position {position}"


async def outcome(pull: Awaitable[PullResult]) -> PullResult | DiptychError:
    try:
        return await pull
    except DiptychError as error:
        return error


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_byte_crosses_and_the_lease_ends(transport: str) -> None:
    engine = SinkEngine(table=shuffled_table())
    async with source_process(transport) as source, receive(transport, engine) as (sink, memory):
        result = await sink.pull("k", source.named(), 30.0)
        assert (result.transport, result.num_bytes) == (transport_name(transport), memory.region.num_bytes)
        check(memory, source, engine.table)
        assert await source.next_end() == "h0"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_source_fails_its_pulls_and_the_sink_lives_on(transport: str) -> None:
    engine = SinkEngine(table=shuffled_table())
    async with receive(transport, engine) as (sink, memory):
        async with source_process(transport, seed=1, num_handoffs=30) as source:
            pulls = [asyncio.create_task(outcome(sink.pull(f"k{n}", source.named(n), 30.0))) for n in range(30)]
            await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
            source.signal(signal.SIGKILL)
            outcomes = await asyncio.gather(*pulls)
        assert isinstance(next(o for o in outcomes if not isinstance(o, DiptychError)), PullResult)
        lost = [o for o in outcomes if isinstance(o, DiptychError)]
        assert lost and all(isinstance(o, WorkerLost | TransportError) for o in lost), lost
        await until_quiet(sink)
        failed = {call[1]: call[2] for call in engine.calls if call[0] == "fail"}  # type: ignore[index,misc]
        assert len(failed) == len(lost)
        settled = {call[1] for call in engine.calls if call[0] == "settle"}  # type: ignore[index,misc]
        assert settled == {key for key, is_quarantined in failed.items() if is_quarantined}
        async with source_process(transport, seed=2) as another:
            await sink.pull("again", another.named(), 30.0)
            check(memory, another, engine.table)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_stopped_source_is_noticed_by_its_lease_and_nothing_lands_later(transport: str) -> None:
    """Stopped once the pull has begun. Its memory can still be read: what counts is that nothing commits."""
    engine = SinkEngine(table=shuffled_table())
    async with (
        source_process(transport, lease_s=1, num_handoffs=1) as source,
        receive(transport, engine) as (sink, memory),
    ):
        pull = asyncio.create_task(outcome(sink.pull("k", source.named(), 30.0)))
        await engine.until("reserve")
        source.signal(signal.SIGSTOP)
        error = await pull
        if isinstance(error, PullResult):
            check(memory, source, engine.table)  # it was through before the signal came
            return
        assert isinstance(error, WorkerLost | TransportError | LeaseLost), error
        await until_quiet(sink)
        assert memory.region.view is not None
        memory.region.view[:] = b"\0" * memory.region.num_bytes  # the blocks are another sequence's now
        source.signal(signal.SIGCONT)
        assert await source.next_end() == "h0"
        assert memory.region.view == bytes(memory.region.num_bytes)
