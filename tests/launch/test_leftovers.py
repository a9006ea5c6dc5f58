"""A test that is killed leaves no process, and the next one removes its folder."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ..support.machines import ROOT
from ..support.owned_folders import OWNER, PREFIX, remove_stale, temporary_folder

pytestmark = [pytest.mark.e2e, pytest.mark.launch, pytest.mark.cluster]

# A test, as far as it makes a machine: prints its folder and the process that the machine is, and goes on.
TEST = """
import sys
from pathlib import Path
from tests.support.machines import lan
from tests.support import machines, owned_folders
machines.temporary_folder = lambda name: owned_folders.temporary_folder(name, Path(sys.argv[1]))
with lan("diptych") as found:
    machine = found.add("one", "192.168.1.10")
    print(found.folder, machine.process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for those of machines: not in /tmp, of which each machine has its own."""
    with tempfile.TemporaryDirectory(prefix="leftovers-", dir="/var/tmp") as found:
        yield Path(found)


def test_a_machine_ends_with_its_test_and_its_folder_when_the_next_begins(place: Path) -> None:
    command = [sys.executable, "-c", TEST, str(place)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        folder, pid = test.stdout.readline().split()
        machine = psutil.Process(int(pid))
        there = [machine, *machine.children(recursive=True)]
        assert len(there) > 1, "what makes its namespaces, and what is in them"
        assert remove_stale(place) == [], "it is not stale while its test runs"
        test.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(there, 60)[1]
    assert remove_stale(place) == [Path(folder)]
    assert not list(place.iterdir())


def test_a_stale_folder_goes_with_its_mounts_and_processes_and_no_other_goes(place: Path) -> None:
    stale, foreign = place / f"{PREFIX}stale-1", place / f"{PREFIX}of-another-program"
    for folder in (stale / "mounted" / "within", foreign):
        folder.mkdir(parents=True)
    (stale / OWNER).touch()
    for point in (stale / "mounted", stale / "mounted" / "within"):
        point.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(point)], check=True)
    command = ["sh", "-c", "echo runs; read -r _", str(stale)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n", "for a moment after exec, a process has an empty command line"
        with temporary_folder("next", place) as own:
            assert not psutil.pid_exists(process.pid)
            assert set(place.iterdir()) == {own, foreign}
            assert not remove_stale(place)
    assert set(place.iterdir()) == {foreign}
    assert str(stale) not in Path("/proc/self/mounts").read_text()
