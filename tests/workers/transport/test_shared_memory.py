"""Properties of shared memory only: which process receives a pool, what it maps, and when it unmaps it."""

import asyncio
import gc
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diptych.kernels.cpu.load import library
from diptych.proto import kv_pb2
from diptych.workers.common.errors import HandoffError, LeaseLost, TransportError
from diptych.workers.kv.layout import Copies, Region
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.pool_file import NAME, PoolFile
from diptych.workers.transport import file_server, shared_memory
from diptych.workers.transport.base import KVReader, Source, Transport
from diptych.workers.transport.file_server import FileServer
from diptych.workers.transport.grpc import GrpcTransport
from diptych.workers.transport.shared_memory import SharedMemoryTransport

from ...support.handoff_pair import (
    RESERVE,
    SMALL,
    SinkEngine,
    failure,
    make_memory,
    piece,
    receive,
    serve,
    start,
    until_quiet,
)


def source_of(endpoint: kv_pb2.SharedMemoryEndpoint, incarnation: str = "s") -> Source:
    opened = kv_pb2.Opened(source_incarnation=incarnation, transport="shared_memory", shared_memory=endpoint)
    return Source("h", "sink/1", opened, stub=None)  # type: ignore[arg-type]


def endpoint_of(transport: SharedMemoryTransport) -> kv_pb2.SharedMemoryEndpoint:
    opened = kv_pb2.Opened()
    transport.publish(opened)
    return opened.shared_memory


async def read(reader: KVReader, theirs: KVMemory, ours: KVMemory) -> None:
    """All of it."""
    blocks = range(theirs.num_blocks)
    await reader.read(kv_pb2.Segment(), Copies.of(theirs.runs(blocks, 0, 3), ours.runs(blocks, 0, 3)), ours.region)


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """Their pools are unmapped now, and not while a test counts."""
    gc.collect()


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def num_mappings() -> int:
    """Of memory files of pools."""
    return sum(NAME in line or re.search(r"/kv( \(deleted\))?$", line) is not None for line in _maps())


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


NUM_BLOCKS = 16


@dataclass
class Pair:
    theirs: KVMemory
    ours: KVMemory
    far: SharedMemoryTransport
    near: SharedMemoryTransport

    async def reader(self, incarnation: str = "s") -> KVReader:
        return await self.near.connect(source_of(endpoint_of(self.far), incarnation))


@asynccontextmanager
async def pair(num_blocks: int = 4) -> AsyncIterator[Pair]:
    theirs, ours = make_memory(SMALL, num_blocks, seed=1, in_file=True), make_memory(SMALL, num_blocks)
    far, near = SharedMemoryTransport(theirs.region), SharedMemoryTransport(ours.region)
    try:
        yield Pair(theirs, ours, far, near)
    finally:
        await near.close()
        await far.close()


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("field", "value"),
    [("socket", ""), ("socket", "x" * 101), ("socket", "a\0b"), ("token", b""), ("token", b"x" * 33), ("num_bytes", 0)],
)
async def test_a_malformed_endpoint_is_refused(field: str, value: object) -> None:
    async with pair() as it:
        endpoint = endpoint_of(it.far)
        setattr(endpoint, field, value)
        with pytest.raises(TransportError, match="malformed"):
            await it.near.connect(source_of(endpoint))


async def test_who_does_not_know_the_token_gets_nothing_and_who_does_is_served_after() -> None:
    async with pair() as it:
        endpoint = endpoint_of(it.far)
        with pytest.raises(TransportError, match="the connection was closed"):
            await it.near.connect(
                source_of(kv_pb2.SharedMemoryEndpoint(socket=endpoint.socket, token=bytes(32), num_bytes=1))
            )
        await read(await it.reader(), it.theirs, it.ours)
        assert it.ours.region.view == it.theirs.region.view


async def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_server, "TIMEOUT_S", 0.01)
    async with pair() as it:
        with socket.socket(socket.AF_UNIX) as line:
            line.setblocking(False)
            await asyncio.get_running_loop().sock_connect(line, f"\0{endpoint_of(it.far).socket}")
            assert await asyncio.get_running_loop().sock_recv(line, 1) == b""


@pytest.mark.parametrize("kind", ["unsealed", "too small", "no file"])
async def test_what_could_not_be_read_safely_is_not_mapped(kind: str) -> None:
    """A file that its owner can make shorter would end the process that reads it."""
    own, other = os.pipe()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SMALL.block_bytes)
    small = make_memory(SMALL, 1, in_file=True).region.file
    assert small is not None
    async with pair(num_blocks=64) as it:
        server = FileServer({"unsealed": unsealed, "too small": small.reader_fd, "no file": own}[kind])
        num_bytes = SMALL.block_bytes if kind == "unsealed" else it.theirs.region.num_bytes << 20
        endpoint = kv_pb2.SharedMemoryEndpoint(socket=server.name, token=server.token, num_bytes=num_bytes)
        with pytest.raises(TransportError, match="no sealed memory file"):
            await it.near.connect(source_of(endpoint))
        await server.close()
    for fd in (own, other, unsealed):
        os.close(fd)


async def test_one_mapping_serves_all_hand_offs_of_a_source_and_nothing_is_left() -> None:
    await asyncio.to_thread(int)  # the loop's own descriptors and threads
    descriptors, mappings = num_descriptors(), num_mappings()
    async with pair() as it:
        endpoint_of(it.far)
        before = num_mappings()
        assert before == mappings + 1, "our own pool"
        readers = await asyncio.gather(*(it.reader() for _ in range(20)))
        for reader in readers:
            await read(reader, it.theirs, it.ours)
        assert num_mappings() == before + 1
        await it.reader("another process")
        assert num_mappings() == before + 2
        it.near.forget("s")
        await until(lambda: num_mappings() == before + 1)
    del it
    await until(lambda: num_mappings() == mappings)
    assert num_descriptors() == descriptors


async def test_a_connection_that_is_given_up_leaves_nothing() -> None:
    async with pair() as it:
        await it.reader("first")
        await asyncio.sleep(0)
        descriptors = num_descriptors()
        for _ in range(5):
            connecting = asyncio.create_task(it.reader())
            await asyncio.sleep(0)
            it.near.forget("s")
            with pytest.raises(TransportError, match="is closed"):
                await connecting
        await until(lambda: num_descriptors() <= descriptors)


async def test_a_source_that_ends_is_unmapped_and_read_no_more() -> None:
    async with pair() as it:
        reader = await it.reader()
        mapped = num_mappings()
        await it.far.close()
        await until(lambda: num_mappings() == mapped - 1)
        with pytest.raises(TransportError, match="is closed"):
            await read(reader, it.theirs, it.ours)
        with pytest.raises(TransportError, match="does not pass"):
            await it.near.connect(source_of(kv_pb2.SharedMemoryEndpoint(socket="gone", token=bytes(32), num_bytes=1)))


SOURCE = """
import sys, time, asyncio
from diptych.proto import kv_pb2
from diptych.workers.transport.shared_memory import SharedMemoryTransport
from tests.support.handoff_pair import SMALL, make_memory
async def main():
    transport = SharedMemoryTransport(make_memory(SMALL, 16, seed=1, in_file=True).region)
    opened = kv_pb2.Opened()
    transport.publish(opened)
    print(opened.shared_memory.SerializeToString().hex(), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_read_of_a_source_that_was_killed_ends_and_its_bytes_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed while one part is copied, which arrives; the next ones do not begin, and the pool is unmapped."""
    begun, go_on, copy = threading.Event(), threading.Event(), shared_memory._copy  # pyright: ignore[reportPrivateUsage]

    def held_copy(*arguments: Any) -> None:
        begun.set()
        go_on.wait(60)
        copy(*arguments)

    monkeypatch.setattr(shared_memory, "PART_BYTES", SMALL.block_bytes)
    monkeypatch.setattr(shared_memory, "_copy", held_copy)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SOURCE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    theirs, ours = make_memory(SMALL, NUM_BLOCKS, seed=1), make_memory(SMALL, NUM_BLOCKS)
    near = SharedMemoryTransport(ours.region)
    try:
        assert process.stdout is not None and ours.region.view is not None and theirs.region.view is not None
        said = bytes.fromhex((await process.stdout.readline()).decode())
        reader = await near.connect(source_of(kv_pb2.SharedMemoryEndpoint.FromString(said)))
        mapped = num_mappings()
        reading = asyncio.create_task(read(reader, theirs, ours))
        await asyncio.to_thread(begun.wait, 60)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await until(lambda: not near._peers)  # pyright: ignore[reportPrivateUsage]
        go_on.set()
        with pytest.raises(TransportError, match="is closed") as caught:
            await reading
        assert not caught.value.may_still_land
        await reader.settled()
        await until(lambda: num_mappings() == mapped - 1)
        size = SMALL.block_bytes
        assert ours.region.view[:size] == theirs.region.view[:size] and not any(ours.region.view[size:])
    finally:
        go_on.set()
        if process.returncode is None:
            process.kill()
        await process.wait()
        await near.close()


async def test_reads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is not kept waiting by a large one that came first."""
    monkeypatch.setattr(shared_memory, "PART_BYTES", SMALL.block_bytes)
    async with pair(num_blocks=2048) as it:
        reader, ended = await it.reader(), list[str]()
        whole = asyncio.create_task(read(reader, it.theirs, it.ours))
        await asyncio.sleep(0)
        one = Copies.of(it.theirs.runs([7], 0, 3), it.ours.runs([7], 0, 3))
        small = asyncio.create_task(reader.read(kv_pb2.Segment(), one, it.ours.region))
        whole.add_done_callback(lambda _: ended.append("whole"))
        small.add_done_callback(lambda _: ended.append("small"))
        await asyncio.gather(whole, small)
        assert ended == ["small", "whole"]
        assert it.ours.region.view == it.theirs.region.view


@pytest.mark.parametrize("compiled", [True, False])
async def test_runs_of_many_lengths_arrive_with_and_without_compiled_kernels(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled and library() is None:
        pytest.skip("the compiled kernels are not built")
    if not compiled:
        monkeypatch.setattr(shared_memory, "library", lambda: None)
    async with pair(num_blocks=64) as it:
        assert (it.near._team is not None) == compiled  # pyright: ignore[reportPrivateUsage]
        reader, rng = await it.reader(), np.random.default_rng(3)
        lengths = rng.integers(1, 500, 100)
        starts = np.cumsum(lengths) - lengths
        remote = rng.integers(0, it.theirs.region.num_bytes - 500, 100)
        await reader.read(kv_pb2.Segment(), Copies(remote, starts, lengths), it.ours.region)
        assert it.ours.region.view is not None and it.theirs.region.view is not None
        for at, start, length in zip(remote.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            assert it.ours.region.view[start : start + length] == it.theirs.region.view[at : at + length]
        assert not any(it.ours.region.view[int(lengths.sum()) :])


async def test_closing_ends_reads_that_wait_and_refuses_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PART_BYTES", SMALL.block_bytes)
    async with pair(num_blocks=4096) as it:
        reader = await it.reader()
        reading = asyncio.create_task(read(reader, it.theirs, it.ours))
        await asyncio.sleep(0)
        await it.near.close()
        with pytest.raises(TransportError):
            await reading
        with pytest.raises(TransportError, match="stopping"):
            await it.reader()


def test_a_region_keeps_its_file() -> None:
    region = make_memory(SMALL, 1, in_file=True).region
    assert isinstance(region, Region) and isinstance(region.file, PoolFile)
    assert os.fstat(region.file.reader_fd).st_size >= region.num_bytes


@pytest.mark.parametrize("is_listening", [True, False])
async def test_where_the_source_does_not_pass_its_memory_grpc_steps_in(
    is_listening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a container that cannot see its socket; or it has no descriptor left to listen with."""

    def refuse(fd: int) -> FileServer:
        raise OSError("too many open files")

    if not is_listening:
        monkeypatch.setattr(shared_memory, "FileServer", refuse)
    async with pair(num_blocks=8) as it:
        endpoint_of(it.far)
        if is_listening:
            assert it.far._server is not None  # pyright: ignore[reportPrivateUsage]
            await it.far._server.close()  # pyright: ignore[reportPrivateUsage]
        far: dict[str, Transport] = {"shared_memory": it.far, "grpc": GrpcTransport()}
        near: dict[str, Transport] = {"shared_memory": it.near, "grpc": GrpcTransport()}
        async with (
            serve(transports=far, memory=it.theirs) as served,
            receive(SinkEngine(), transports=near) as (sink, memory),
        ):
            served.hand_off()
            result = await sink.pull("k", served.named(), 15.0)
            assert result.transport == "grpc" and piece(memory, 0) == piece(it.theirs, 5)


async def test_what_is_copied_after_the_lease_ended_is_never_committed_and_its_blocks_are_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source may reuse its blocks then; ours are free when nothing can land in them any more."""
    begun, go_on, copy = threading.Event(), threading.Event(), shared_memory._copy  # pyright: ignore[reportPrivateUsage]

    def held_copy(*arguments: Any) -> None:
        begun.set()
        go_on.wait(60)
        copy(*arguments)

    monkeypatch.setattr(shared_memory, "_copy", held_copy)
    async with pair(num_blocks=8) as it:
        engine = SinkEngine()
        async with (
            serve(transports={"shared_memory": it.far}, memory=it.theirs) as served,
            receive(engine, transports={"shared_memory": it.near}) as (sink, _),
        ):
            served.hand_off()
            pull = start(sink, served)
            await asyncio.to_thread(begun.wait, 60)
            served.source.abort("h", LeaseLost("the lease was not renewed"))
            assert isinstance(await failure(pull), HandoffError)
            assert engine.calls == [RESERVE, ("fail", "k", True)]
            go_on.set()
            await until_quiet(sink)
            assert engine.calls[2:] == [("settle", "k")]
