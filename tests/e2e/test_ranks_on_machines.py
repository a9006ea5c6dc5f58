"""Workers whose ranks belong to rank hosts, as on several machines: real processes, here on one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from diptych.workers.common.exit_codes import GIVEN, UNAVAILABLE

from ..support.forked import ForkedProcess
from ..support.harness import spawn, unlike_workers, workers
from ..support.rank_hosts import rank_hosts
from .test_tensor_parallel import END_S, FLAGS, Cases, assert_ended, assert_exact, assert_kv_moves, killed_midway, make

Host = tuple[str, ForkedProcess]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cases]:
    return make(tmp_path_factory.mktemp("machines") / "llama", 4)


@pytest.fixture
def host() -> Iterator[Host]:
    with rank_hosts() as [started]:
        yield started


def spread(hosts: list[Host], ranks: int) -> dict[str, object]:
    """Flags of a worker of so many ranks, on its machine and those of these hosts."""
    addresses = ",".join(address for address, _ in hosts)
    machines = {"machines_per_worker": len(hosts) + 1, "rank_hosts": addresses, "trusted_network": True}
    return FLAGS | machines | {"tensor_parallel": ranks}


def ranks_at(host: Host) -> list[psutil.Process]:
    return psutil.Process(host[1].pid).children()


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_tokens_are_exact_and_kv_moves_to_and_from_one_machine(
    grouped: tuple[Path, Cases], host: Host, device: str
) -> None:
    """Two ranks on each of two machines, and one that is alone."""
    path, cases = grouped
    of = FLAGS if device == "cpu" else FLAGS | {"device": device, "max_running": 8}
    with unlike_workers(path, [("mixed", spread([host], 4) | of), ("mixed", of)]) as [several, one]:
        assert len(ranks_at(host)) == 2
        assert_exact(several, cases)
        assert_kv_moves(several, one, cases, "grpc")
        assert_kv_moves(one, several, cases, "grpc")


def test_a_rank_that_is_killed_elsewhere_ends_its_worker_and_its_host_serves_the_next(
    grouped: tuple[Path, Cases], host: Host
) -> None:
    path, cases = grouped
    with workers(path, ["mixed"], **FLAGS) as [other]:
        with workers(path, ["mixed"], **spread([host], 2)) as [worker]:
            ranks = ranks_at(host)
            asyncio.run(killed_midway(worker, other, ranks, cases))
            assert worker.process.wait(END_S) == UNAVAILABLE
            assert_ended(ranks)
        with workers(path, ["mixed"], **spread([host], 2)) as [worker]:
            assert_exact(worker, cases[:2])


def test_a_host_that_is_killed_ends_its_ranks_and_its_worker(
    grouped: tuple[Path, Cases], host: Host, capfd: pytest.CaptureFixture[str]
) -> None:
    with workers(grouped[0], ["mixed"], **spread([host], 2)) as [worker]:
        ranks = ranks_at(host)
        host[1].kill()
        assert worker.process.wait(END_S) == UNAVAILABLE
        assert_ended(ranks)
    assert f"the rank host at {host[0]}, of ranks 1 to 1, has ended" in capfd.readouterr().err


def test_no_rank_elsewhere_outlives_its_worker(grouped: tuple[Path, Cases], host: Host) -> None:
    with workers(grouped[0], ["mixed"], **spread([host], 2)) as [worker]:
        ranks = ranks_at(host)
        assert len(ranks) == 1
        worker.kill()
        assert_ended(ranks)


def refused(path: Path, flags: dict[str, object], status: int, capfd: pytest.CaptureFixture[str]) -> str:
    """What a worker says that does not start."""
    with spawn(path, "mixed", **flags) as process:
        assert process.wait(END_S) == status
    return capfd.readouterr().err


def test_a_worker_that_its_host_refuses_says_why(
    grouped: tuple[Path, Cases], host: Host, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, gone = grouped[0], ("127.0.0.1:1", host[1])
    assert "the rank host at 127.0.0.1:1 cannot be reached" in refused(path, spread([gone], 2), UNAVAILABLE, capfd)
    (tmp_path / "token").write_text("not the one of the host")
    stranger = spread([host], 2) | {"auth_token_file": tmp_path / "token"}
    assert "the rank host has another token" in refused(path, stranger, UNAVAILABLE, capfd)
    with workers(path, ["mixed"], **spread([host], 2)):
        assert ranks_at(host)


def test_a_place_that_is_not_this_machines_is_refused(
    grouped: tuple[Path, Cases], host: Host, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret")
    elsewhere = spread([host], 2) | {"host": "203.0.113.1", "auth_token_file": tmp_path / "token"}
    assert "set host to an address of this machine" in refused(grouped[0], elsewhere, GIVEN, capfd)
