"""Pools that another worker maps by CUDA IPC: how long they stay mapped, and copies that keep them mapped."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from diptych.proto import kv_pb2
from diptych.workers.common.errors import HandoffError, WorkerLost
from diptych.workers.handoff.sink import HandoffSink
from diptych.workers.kv.device_kv import CopyRows
from diptych.workers.kv.layout import KVLayout
from diptych.workers.transport.base import Source
from diptych.workers.transport.cuda_ipc import CudaIpcTransport
from diptych.workers.transport.select import make_transports

from ...support.gpu.fake_cuda import FakeCuda, make_device_memory
from ...support.handoff_pair import (
    Served,
    SinkEngine,
    failure,
    receive,
    seal_event,
    serve,
    start,
    until_quiet,
)

LAYOUT = KVLayout("float32", block_size=16, num_layers=3, num_kv_heads=4, head_dim=16, model_id="m")
NUM_TOKENS = 70
BLOCKS = (6, 7, 1, 4, 3)


class SlowCopies(FakeCuda):
    """Copies that end when the test ends them."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def copy(self, rows: Sequence[CopyRows]) -> None:
        self.has_begun.set()
        self.may_end.wait()
        super().copy(rows)


async def until_begun(cuda: SlowCopies) -> None:
    await asyncio.to_thread(cuda.has_begun.wait)


@asynccontextmanager
async def mapped_pair(cuda: SlowCopies) -> AsyncIterator[tuple[Served, HandoffSink, SinkEngine]]:
    """A source and a sink with CUDA IPC only; the sink copies with `cuda`. At the end nothing is mapped."""
    theirs, ours = make_device_memory(LAYOUT, 20), make_device_memory(LAYOUT, 20, driver=cuda)
    assert theirs.device is not None and ours.device is not None
    far = make_transports(("cuda_ipc",), [theirs.region], device=theirs.device)
    near = make_transports(("cuda_ipc",), [ours.region, *ours.device.staging.regions], device=ours.device)
    engine = SinkEngine(table=(1, 2, 3, 4, 5))
    try:
        async with (
            serve(memory=theirs, transports=far) as served,
            receive(engine, memory=ours, transports=near, staging=ours.device.staging) as (sink, _),
        ):
            served.source.offer("h", NUM_TOKENS)
            served.announce(BLOCKS[:3], layout=LAYOUT)
            yield served, sink, engine
    finally:
        for transport in (*far.values(), *near.values()):
            await transport.close()
    assert not cuda.opened


async def test_blocks_are_quarantined_while_the_device_may_write_them() -> None:
    cuda = SlowCopies()
    async with mapped_pair(cuda) as (served, sink, engine):
        pull = start(sink, served)
        await until_begun(cuda)
        served.source.abort("h", HandoffError("given up"))
        await failure(pull)
        await engine.until("fail")
        assert ("fail", "k", True) in engine.calls and cuda.opened
        assert ("settle", "k") not in engine.calls
        cuda.may_end.set()
        await until_quiet(sink)
        assert engine.calls[-1] == ("settle", "k")


async def test_a_source_lost_in_a_read_is_unmapped_when_the_read_ends() -> None:
    cuda = SlowCopies()
    async with mapped_pair(cuda) as (served, sink, engine):
        pull = start(sink, served)
        await until_begun(cuda)
        await served.stop()
        assert isinstance(await failure(pull), WorkerLost)
        assert cuda.opened  # it is being read
        cuda.may_end.set()
        await until_quiet(sink)
        assert engine.calls[-1] == ("settle", "k")


async def test_another_incarnation_is_refused() -> None:
    async with mapped_pair(SlowCopies()) as (served, sink, _):
        error = await failure(start(sink, served, incarnation="the one before"))
        assert isinstance(error, WorkerLost) and "another process" in error.message


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that does not tell of the end of a process."""

    def pidfd_open(process: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)


@pytest.mark.usefixtures("untold")
async def test_what_is_not_read_for_a_while_is_unmapped_and_mapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.workers.transport.cuda_ipc.IDLE_S", 0.0)
    closed, loop = asyncio.Event(), asyncio.get_running_loop()

    class Watched(SlowCopies):
        def close(self, address: int) -> None:
            super().close(address)
            loop.call_soon_threadsafe(closed.set)

    cuda = Watched()
    cuda.may_end.set()
    async with mapped_pair(cuda) as (served, sink, _):
        pull = start(sink, served)
        await closed.wait()
        served.announce(BLOCKS[3:], 3, layout=LAYOUT)
        served.source.on_event(seal_event("h", NUM_TOKENS, [7]))
        await pull
        assert cuda.num_opens > 1


@pytest.mark.usefixtures("untold")
async def test_what_is_read_for_long_stays_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until a mapping is closed starts again whenever it is over, until the read has ended."""
    start_use, drop_idle = CudaIpcTransport.start, CudaIpcTransport._drop_idle
    used: list[tuple[CudaIpcTransport, Any]] = []
    asked: asyncio.Queue[int] = asyncio.Queue()  # how many used it, each time

    def started(transport: CudaIpcTransport, peer: Any, job: Any) -> Any:
        used.append((transport, peer))
        return start_use(transport, peer, job)

    def dropped(transport: CudaIpcTransport, peer: Any) -> None:
        asked.put_nowait(peer.num_users)
        drop_idle(transport, peer)

    monkeypatch.setattr(CudaIpcTransport, "start", started)
    monkeypatch.setattr(CudaIpcTransport, "_drop_idle", dropped)
    cuda = SlowCopies()
    async with mapped_pair(cuda) as (served, sink, _):
        pull = start(sink, served)
        await until_begun(cuda)
        monkeypatch.setattr("diptych.workers.transport.cuda_ipc.IDLE_S", 0.0)
        transport, peer = used[-1]
        transport._rest(peer)  # another use of it ends
        assert [await asked.get() for _ in range(3)] == [1, 1, 1]
        assert cuda.opened and cuda.num_opens == 1
        served.announce(BLOCKS[3:], 3, layout=LAYOUT)
        served.source.on_event(seal_event("h", NUM_TOKENS, [7]))
        cuda.may_end.set()
        await pull
        while await asked.get():
            pass


async def test_a_pool_stays_mapped_as_long_as_its_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer: what is mapped keeps the memory of a process that has ended."""
    monkeypatch.setattr("diptych.workers.transport.cuda_ipc.IDLE_S", 0.0)
    closed, loop = asyncio.Event(), asyncio.get_running_loop()

    class Watched(FakeCuda):
        def close(self, address: int) -> None:
            super().close(address)
            loop.call_soon_threadsafe(closed.set)

    theirs, cuda = make_device_memory(LAYOUT, 4), Watched()
    ours = make_device_memory(LAYOUT, 4, driver=cuda)
    assert theirs.device is not None and ours.device is not None
    [far] = make_transports(("cuda_ipc",), [theirs.region], device=theirs.device).values()
    [near] = make_transports(("cuda_ipc",), [ours.region], device=ours.device).values()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            opened = kv_pb2.Opened(source_incarnation="s")
            far.publish(opened)
            assert opened.cuda_ipc.process == os.getpid()
            opened.cuda_ipc.process = process.pid
            source = Source("h", "sink/1", opened, cast(Any, None))
            await near.connect(source)
            for _ in range(3):
                await near.connect(source)  # whose uses end
                await asyncio.sleep(0)
            assert cuda.opened and cuda.num_opens == 1 and not closed.is_set()
            process.kill()
            await closed.wait()
            assert not cuda.opened
        finally:
            await near.close()
            await far.close()
