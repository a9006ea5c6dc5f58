"""Which transports a worker gets."""

from collections.abc import Sequence

import pytest

from diptych.workers.errors import ConfigError, TransportError
from diptych.workers.kv_layout import Region
from diptych.workers.transport import select
from diptych.workers.transport.select import make_transports

from ..handoff_pair import SMALL, make_memory, run


class Absent:
    def __init__(self, regions: Sequence[Region], *, loopback_only: bool) -> None:
        raise ImportError("No module named 'nixl'")


class Broken:
    def __init__(self, regions: Sequence[Region], *, loopback_only: bool) -> None:
        raise TransportError("NIXL does not work on this machine")


def test_the_order_is_the_callers() -> None:
    async def test() -> None:
        regions = [make_memory(SMALL, 2).region]
        for names, expected in [
            ("auto", ["nixl", "grpc"]),
            (("grpc",), ["grpc"]),
            (("grpc", "nixl"), ["grpc", "nixl"]),
        ]:
            made = make_transports(names, regions)
            assert list(made) == expected and [t.name for t in made.values()] == expected
            for transport in made.values():
                await transport.close()

    run(test)


@pytest.mark.parametrize("kind", [Absent, Broken])
def test_without_nixl_auto_means_grpc_and_asking_for_it_is_an_error(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "NixlTransport", kind)
    regions = [make_memory(SMALL, 2).region]
    assert list(make_transports("auto", regions)) == ["grpc"]
    with pytest.raises(ConfigError, match=r"'nixl' is not usable.*Leave it out"):
        make_transports(("nixl",), regions)


def test_bad_names_are_told_with_the_good_ones() -> None:
    regions = [make_memory(SMALL, 2).region]
    with pytest.raises(ConfigError, match=r"'carrier pigeon'.*nixl, grpc"):
        make_transports(("carrier pigeon",), regions)
    with pytest.raises(ConfigError, match="nixl, grpc"):
        make_transports((), regions)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.3", False)]
)
def test_ucx_listens_where_the_worker_does(host: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Noted(Broken):
        def __init__(self, regions: Sequence[Region], *, loopback_only: bool) -> None:
            seen.append(loopback_only)
            super().__init__(regions, loopback_only=loopback_only)

    monkeypatch.setattr(select, "NixlTransport", Noted)
    make_transports("auto", [make_memory(SMALL, 2).region], host)
    assert seen == [expected]
