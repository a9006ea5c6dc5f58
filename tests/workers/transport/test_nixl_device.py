"""Device memory in NIXL: its kind and the device's number, in registrations, descriptors and endpoints."""

import sys
import threading
from contextlib import suppress
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diptych.proto import kv_pb2
from diptych.workers.common.errors import TransportError
from diptych.workers.kv.layout import Copies, Region
from diptych.workers.kv.staging import Staging
from diptych.workers.transport.base import Source
from diptych.workers.transport.machine import this_machine
from diptych.workers.transport.nixl import NixlTransport

from ...support.gpu.fake_cuda import FakeCuda
from ...support.gpu.scripted_rank import Answer, ScriptedRank, done, measured, opened

POOL = Region(0x7F0000000000, 1 << 20, None, device_id=3)
STAGING = Region(0x10000, 1 << 16, memoryview(bytearray(1 << 16)))
STAGING_ON_DEVICE = Region(0x7F1000000000, 1 << 16, None, device_id=3)


class NotedAgent:
    """A nixl_agent whose transfers finish immediately; records its calls."""

    registered: list[tuple[Any, str]]
    transfers: list[tuple[str, Any, Any, str]]

    def __init__(self, name: str, config: object) -> None:
        type(self).registered, type(self).transfers = [], []

    def register_memory(self, rows: Any, kind: str) -> object:
        self.registered.append((rows, kind))
        return rows

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return b"the source"

    def get_xfer_descs(self, rows: Any, kind: str) -> tuple[list[list[int]], str]:
        return rows.tolist(), kind

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str) -> SimpleNamespace:
        self.transfers.append((operation, local, remote, agent))
        return SimpleNamespace(release=lambda: None)

    def transfer(self, handle: object) -> str:
        return "DONE"

    check_xfer_state = transfer

    def remove_remote_agent(self, name: str) -> None: ...

    def get_new_notifs(self) -> None: ...

    def deregister_memory(self, registered: object) -> None: ...


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> type[NotedAgent]:
    module = ModuleType("nixl")
    module._api = SimpleNamespace(  # type: ignore[attr-defined]
        nixlBind=SimpleNamespace(), nixl_agent=NotedAgent, nixl_agent_config=lambda **_: None
    )
    monkeypatch.setitem(sys.modules, "nixl", module)
    return NotedAgent


async def test_each_region_is_registered_as_what_it_is(agent: type[NotedAgent]) -> None:
    transport = NixlTransport([POOL, STAGING, STAGING_ON_DEVICE])
    try:
        assert agent.registered == [
            ([(POOL.address, POOL.num_bytes, 3, "")], "VRAM"),
            ([(STAGING.address, STAGING.num_bytes, 0, "")], "DRAM"),
            ([(STAGING_ON_DEVICE.address, STAGING_ON_DEVICE.num_bytes, 3, "")], "VRAM"),
        ]
        endpoint = transport.endpoint()
        assert (endpoint.memory, endpoint.device_id, endpoint.base_address) == ("VRAM", 3, POOL.address)
    finally:
        await transport.close()


async def test_memory_is_registered_where_its_device_is_current(agent: type[NotedAgent]) -> None:
    """UCX takes memory without a context for the host's, or refuses it."""
    driver = FakeCuda()
    register = agent.register_memory

    def registering(self: NotedAgent, rows: Any, kind: str) -> object:
        assert driver.threads == [threading.current_thread().name] == ["diptych-nixl"]
        return register(self, rows, kind)

    agent.register_memory = registering
    try:
        await NixlTransport([POOL], driver).close()
    finally:
        agent.register_memory = register
    assert len(agent.registered) == 1


def test_an_agent_that_fails_in_a_way_of_its_own_is_an_error_by_name(
    agent: type[NotedAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: NotedAgent, rows: Any, kind: str) -> object:
        raise KeyError(kind)

    monkeypatch.setattr(agent, "register_memory", fail)
    with pytest.raises(TransportError, match="NIXL does not work on this machine: KeyError"):
        NixlTransport([POOL])


@pytest.mark.parametrize("into", [POOL, STAGING, STAGING_ON_DEVICE], ids=["pool", "host", "device"])
@pytest.mark.parametrize(("memory", "device_id"), [("VRAM", 5), ("DRAM", 0)])
async def test_descriptors_name_both_ends_memory(
    agent: type[NotedAgent], into: Region, memory: str, device_id: int
) -> None:
    """A source on device 5, or in host memory."""
    transport = NixlTransport([POOL, STAGING, STAGING_ON_DEVICE])
    try:
        endpoint = kv_pb2.NixlEndpoint(
            agent_name="the source",
            metadata=b"m",
            base_address=0x5000,
            num_bytes=4096,
            device_id=device_id,
            memory=memory,
        )
        opened = kv_pb2.Opened(source_incarnation="s", transport="nixl", nixl=endpoint)
        reader = await transport.connect(Source("h", "sink/1", opened, stub=None))  # type: ignore[arg-type]
        assert reader.lands_on_device == (memory == "VRAM")
        copies = Copies(np.array([0, 512]), np.array([128, 0]), np.array([64, 32]))
        await reader.read(kv_pb2.Segment(), copies, into)
    finally:
        await transport.close()
    kind, own_id = ("DRAM", 0) if into is STAGING else ("VRAM", 3)
    local = [[into.address + 128, 64, own_id], [into.address, 32, own_id]], kind
    remote = [[0x5000, 64, device_id], [0x5200, 32, device_id]], memory
    assert agent.transfers == [("READ", local, remote, "the source")]


async def test_a_neighbour_in_host_memory_reads_a_device_otherwise(agent: type[NotedAgent]) -> None:
    on_device, on_host = NixlTransport([POOL]), NixlTransport([STAGING])
    try:
        here, elsewhere = this_machine(), "another"
        for machine, sink_on_device, expected in [(here, False, False), (here, True, True), (elsewhere, True, False)]:
            request = kv_pb2.SubscribeRequest(machine=machine, on_device=sink_on_device)
            assert on_device.suits(request) == expected and on_host.suits(request) == (machine == here)
    finally:
        await on_device.close()
        await on_host.close()


class SlowAgent(NotedAgent):
    """Of each transfer, `seconds` pass on the clock that is measured by."""

    seconds = 0.0
    clock = 0.0

    def transfer(self, handle: object) -> str:
        SlowAgent.clock += self.seconds
        return "DONE"

    check_xfer_state = staticmethod(lambda handle: "DONE")


@pytest.fixture
def slow_agent(agent: type[NotedAgent], monkeypatch: pytest.MonkeyPatch) -> type[SlowAgent]:
    """The agent of this process, whose transfers take no time until a test sets `seconds`."""
    monkeypatch.setattr(SlowAgent, "seconds", 0.0)
    monkeypatch.setattr(sys.modules["nixl"]._api, "nixl_agent", SlowAgent)
    monkeypatch.setattr("diptych.workers.transport.nixl.time", SimpleNamespace(perf_counter=lambda: SlowAgent.clock))
    return SlowAgent


@pytest.mark.parametrize(("gigabytes_s", "is_taken"), [(0.5, False), (49.0, True)])
async def test_a_slow_link_of_device_memory_is_left_to_the_next_transport(
    gigabytes_s: float, is_taken: bool, slow_agent: type[SlowAgent]
) -> None:
    """UCX reads it over TCP and does not say so. Each link is measured once, into staging alone."""
    staging = Staging(1 << 20, memoryview(bytearray(1 << 20)), replace(STAGING_ON_DEVICE, num_bytes=1 << 20))
    slow_agent.seconds = (1 << 20) / (gigabytes_s * 1e9)
    transport = NixlTransport([POOL, *staging.regions], None, staging)
    try:
        endpoint = kv_pb2.NixlEndpoint(
            agent_name="the source", metadata=b"m", base_address=0x5000, num_bytes=1 << 21, device_id=5, memory="VRAM"
        )
        opened = kv_pb2.Opened(source_incarnation="s", transport="nixl", nixl=endpoint)
        source = Source("h", "sink/1", opened, stub=None)  # type: ignore[arg-type]
        for _ in range(2):
            if is_taken:
                assert (await transport.connect(source)).lands_on_device
            else:
                with pytest.raises(TransportError, match=r"at 0\.50 GB/s, less than 2"):
                    await transport.connect(source)
        assert len(slow_agent.transfers) == 4 and staging.num_free == 1 << 20
        into = [[STAGING_ON_DEVICE.address, 1 << 20, 3]], "VRAM"
        assert {str(local) for _, local, _, _ in slow_agent.transfers} == {str(into)}
        transport.forget("s")
        with suppress(TransportError):
            await transport.connect(source)
        assert len(slow_agent.transfers) == 8
    finally:
        await transport.close()


async def test_host_memory_is_not_measured(agent: type[NotedAgent]) -> None:
    staging = Staging(1 << 16, memoryview(bytearray(1 << 16)), STAGING_ON_DEVICE)
    transport = NixlTransport([POOL, *staging.regions], None, staging)
    try:
        endpoint = kv_pb2.NixlEndpoint(
            agent_name="the source", metadata=b"m", base_address=0x5000, num_bytes=4096, device_id=0, memory="DRAM"
        )
        opened = kv_pb2.Opened(source_incarnation="s", transport="nixl", nixl=endpoint)
        await transport.connect(Source("h", "sink/1", opened, stub=None))  # type: ignore[arg-type]
        assert agent.transfers == []
    finally:
        await transport.close()


async def test_the_link_of_each_rank_is_measured(slow_agent: type[SlowAgent]) -> None:
    """And that of the slowest counts: rank 1's, since rank 0's takes no time. Two ranks read from two pieces."""
    pieces = [
        kv_pb2.NixlEndpoint(agent_name="the source", metadata=b"m", base_address=at, num_bytes=1 << 20, memory="VRAM")
        for at in (0x5000, 0x500000)
    ]
    opened_by = kv_pb2.Opened(source_incarnation="s", nixl=kv_pb2.NixlEndpoint(num_bytes=1 << 21, pieces=pieces))
    source = Source("h", "sink/1", opened_by, stub=None)  # type: ignore[arg-type]
    asked: list[kv_pb2.RankLink] = []
    for gigabytes_s in (0.25, 30.0):
        rank = ScriptedRank(opened, done, noted(measured(gigabytes_s * 1e9), asked), done)
        staging = Staging(1 << 20, memoryview(bytearray(1 << 20)), replace(STAGING_ON_DEVICE, num_bytes=1 << 20))
        transport = NixlTransport([POOL, *staging.regions], None, staging, [rank.ours])
        try:
            if gigabytes_s < 1:
                with pytest.raises(TransportError, match=r"at 0\.25 GB/s, less than 2"):
                    await transport.connect(source)
            else:
                reader = await transport.connect(source)
                assert reader.num_receivers == 1
        finally:
            transport.forget("s")
            rank.end()
            await transport.close()
            rank.ours.close()
    assert [(link.incarnation, link.piece) for link in asked] == [("s", 1)] * 2


def noted(answer: Answer, asked: list[kv_pb2.RankLink]) -> Answer:
    def noting(command: kv_pb2.RankCommand) -> kv_pb2.RankAnswer:
        asked.append(command.measure)
        return answer(command)

    return noting
