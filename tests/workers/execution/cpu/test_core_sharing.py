"""Lending cores to other workers, and borrowing theirs."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from diptych.workers.execution.cpu import core_sharing
from diptych.workers.execution.cpu.core_sharing import CoreSharing, cores_to_borrow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the locks are Linux's")


@pytest.fixture
def cpus(tmp_path: Path) -> Path:
    """Folder that describes eight cores: the first six on one package."""
    for core in range(8):
        topology = tmp_path / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        for name in ("core_id", "thread_siblings_list"):
            (topology / name).write_text(str(core))
        (topology / "physical_package_id").write_text("0" if core < 6 else "1")
    return tmp_path


def test_a_worker_computes_on_the_cores_of_one_that_rests(cpus: Path) -> None:
    first, second = CoreSharing((0,), (1,), cpus), CoreSharing((1,), (0,), cpus)
    assert first.begin() == (0, 1)
    first.rest()
    assert second.begin() == (1, 0)
    second.rest()


def test_cores_that_compute_are_not_borrowed(cpus: Path) -> None:
    first, second = CoreSharing((0,), (1,), cpus), CoreSharing((1,), (0,), cpus)
    assert first.begin() == (0, 1)
    first.rest()
    assert second.begin() == (1, 0) and second.adjust() == (1, 0)
    second.rest()
    assert first.begin() == (0, 1)


def test_an_owner_gets_its_core_back_between_two_layers(cpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_sharing, "MAX_WAIT_S", 30.0)  # this thread may not run for a while
    owner, borrower = CoreSharing((0,), (1,), cpus), CoreSharing((1,), (0,), cpus)
    assert borrower.begin() == (1, 0)
    taken = threading.Event()
    found: list[tuple[int, ...]] = []

    def begin() -> None:
        found.append(owner.begin())
        taken.set()

    thread = threading.Thread(target=begin)
    thread.start()
    while borrower.adjust() != (1,):
        assert thread.is_alive(), "the owner did not wait for its core"
    assert taken.wait(30)
    assert found == [(0,)]
    assert borrower.adjust() == (1,), "the owner computes there"
    owner.rest()
    assert borrower.adjust() == (1, 0)
    thread.join()


def test_an_owner_does_not_wait_for_ever(cpus: Path) -> None:
    """A borrower that is stopped, as by SIGSTOP."""
    owner, borrower = CoreSharing((0,), (1,), cpus), CoreSharing((1,), (0,), cpus)
    assert borrower.begin() == (1, 0)
    assert owner.begin() == (0,), "it computes beside the borrower"
    assert borrower.adjust() == (1, 0), "nobody waits any more"
    borrower.rest()
    assert owner.begin() == (0, 1), "the next step has the core for itself"


def test_cores_that_nobody_lends_are_not_used(cpus: Path) -> None:
    alone = CoreSharing((0,), (1, 2), cpus)
    assert alone.begin() == (0,)
    other = CoreSharing((2,), (), cpus)
    assert alone.adjust() == (0, 2)
    alone.rest()
    other.close()
    assert alone.begin() == (0,)


def test_a_core_is_lent_by_one_process(cpus: Path) -> None:
    CoreSharing((0, 1), (), cpus).close()
    kept = CoreSharing((0, 1), (), cpus)
    with pytest.raises(OSError, match="another process lends core 1"):
        CoreSharing((1,), (0,), cpus)
    kept.close()
    CoreSharing((1,), (0,), cpus).close()


def test_cores_that_nobody_has_any_more_are_given_back(cpus: Path) -> None:
    """That of a worker whose loading fails, say; and twice is as once."""
    for _ in range(2):
        sharing = CoreSharing((0, 1), (), cpus)
        sharing.begin()
        del sharing
    sharing = CoreSharing((0, 1), (), cpus)
    sharing.close()
    sharing.close()


def test_the_locks_of_a_killed_worker_are_free(cpus: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from diptych.workers.execution.cpu.core_sharing import CoreSharing\n"
        "print(CoreSharing((1,), (0,), Path(sys.argv[1])).begin(), flush=True); sys.stdin.read()"
    )
    owner = CoreSharing((0,), (1,), cpus)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(cpus)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "(1, 0)\n"
        worker.kill()
    assert owner.begin() == (0,), "core 1 has no owner that lends it"
    CoreSharing((1,), (), cpus)


def test_the_nearest_cores_of_the_same_memory_are_borrowed(cpus: Path) -> None:
    assert cores_to_borrow((2,), range(8), cpus) == (1, 3, 0)
    assert cores_to_borrow((6,), range(8), cpus) == (7,)
    assert cores_to_borrow((0, 1), (0, 1), cpus) == ()
    with pytest.raises(OSError):
        cores_to_borrow((9,), range(8), cpus)
