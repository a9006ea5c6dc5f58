"""Which transports a worker gets."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.proto import kv_pb2
from diptych.workers.common.errors import ConfigError, TransportError
from diptych.workers.kv.layout import Region
from diptych.workers.transport import select
from diptych.workers.transport.machine import this_machine
from diptych.workers.transport.select import make_transports

from ...support.handoff_pair import SMALL, make_memory


class Absent:
    def __init__(self, regions: Sequence[Region], *on_device: None, has_rdma: bool) -> None:
        raise ImportError("No module named 'nixl'")


class Broken:
    def __init__(self, regions: Sequence[Region], *on_device: None, has_rdma: bool) -> None:
        raise TransportError("NIXL does not work on this machine")


async def test_the_order_is_the_callers() -> None:
    regions = [make_memory(SMALL, 2).region]
    for names, expected in [
        ("auto", ["shared_memory", "nixl", "grpc"]),
        (("grpc",), ["grpc"]),
        (("grpc", "nixl"), ["grpc", "nixl"]),
    ]:
        made = make_transports(names, regions)
        assert list(made) == expected and [t.name for t in made.values()] == expected
        for transport in made.values():
            await transport.close()


@pytest.mark.parametrize("kind", [Absent, Broken])
def test_without_nixl_auto_means_grpc_and_asking_for_it_is_an_error(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "NixlTransport", kind)
    regions = [make_memory(SMALL, 2).region]
    assert list(make_transports("auto", regions)) == ["shared_memory", "grpc"]
    with pytest.raises(ConfigError, match=r"'nixl' is not usable.*Leave it out"):
        make_transports(("nixl",), regions)


async def test_a_pool_that_is_no_memory_file_is_not_offered_so_but_reads_others() -> None:
    own = make_memory(SMALL, 2)
    [transport] = make_transports(("shared_memory",), [own.region]).values()
    try:
        assert not transport.suits(kv_pb2.SubscribeRequest(machine=this_machine()))
    finally:
        await transport.close()
    on_device = replace(own.region, view=None)
    with pytest.raises(ConfigError, match=r"'shared_memory' is not usable.*device memory.*Leave it out"):
        make_transports(("shared_memory",), [on_device])


def test_bad_names_are_told_with_the_good_ones() -> None:
    regions = [make_memory(SMALL, 2).region]
    with pytest.raises(ConfigError, match=r"'carrier pigeon'.*nixl, grpc"):
        make_transports(("carrier pigeon",), regions)
    with pytest.raises(ConfigError, match="nixl, grpc"):
        make_transports((), regions)


@pytest.mark.parametrize("has_rdma", [False, True])
def test_rdma_is_used_where_it_is_asked_for_alone(has_rdma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Noted(Broken):
        def __init__(self, regions: Sequence[Region], *on_device: None, has_rdma: bool) -> None:
            seen.append(has_rdma)
            super().__init__(regions, *on_device, has_rdma=has_rdma)

    monkeypatch.setattr(select, "NixlTransport", Noted)
    regions = [make_memory(SMALL, 2).region]
    make_transports("auto", regions, has_rdma=has_rdma)
    make_transports("auto", regions)
    assert seen == [has_rdma, False]


@pytest.mark.parametrize(("has_rdma", "expected"), [(False, ["grpc"]), (True, ["nixl", "grpc"])])
async def test_between_machines_kv_goes_over_grpc_unless_an_rdma_fabric_is_trusted(
    has_rdma: bool, expected: list[str]
) -> None:
    made = make_transports("auto", [make_memory(SMALL, 2, in_file=True).region], has_rdma=has_rdma)
    try:
        here = ["shared_memory", "nixl", "grpc"]
        for machine, names in [(this_machine(), here), ("another", expected), ("", expected)]:
            request = kv_pb2.SubscribeRequest(machine=machine)
            assert [name for name, transport in made.items() if transport.suits(request)] == names
    finally:
        for transport in made.values():
            await transport.close()


async def test_ucx_is_told_to_do_without_tcp_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,posix,self")
    [transport] = make_transports(("nixl",), [make_memory(SMALL, 2).region]).values()
    assert "tcp" not in os.environ["UCX_TLS"].split(",") and "sysv" not in os.environ["UCX_TLS"].split(",")
    await transport.close()


def test_who_shares_no_memory_is_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = this_machine.__wrapped__()
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert this_machine.__wrapped__() != ours
    monkeypatch.undo()
    assert this_machine.__wrapped__() == ours == this_machine()
    monkeypatch.setattr(Path, "readlink", lambda path: f"{path.name}:[1]")
    assert this_machine.__wrapped__() != ours, "another container"


class OnSeveralMachines:
    """A DeviceKV."""

    is_on_one_machine = False


def test_a_pool_on_several_machines_moves_over_grpc_alone(caplog: pytest.LogCaptureFixture) -> None:
    device: Any = OnSeveralMachines()
    regions = [make_memory(SMALL, 2).region]
    with caplog.at_level("INFO", "diptych.transport"):
        assert list(make_transports("auto", regions, device)) == ["grpc"]
    assert "over gRPC alone: this worker's KV is on several machines" in caplog.text
    assert list(make_transports(("grpc",), regions, device)) == ["grpc"]
    for name in ("cuda_ipc", "shared_memory", "nixl"):
        with pytest.raises(ConfigError, match=f"'{name}' is not usable: this worker's KV is on several machines"):
            make_transports((name, "grpc"), regions, device)
    with pytest.raises(ConfigError, match="unknown transport 'carrier pigeon'"):
        make_transports(("carrier pigeon",), regions, device)
