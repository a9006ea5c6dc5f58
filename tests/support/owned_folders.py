"""Folders of tests that make machines or images, outside /tmp, and the end of what a killed test has left.

    made ── the test ends ──> removed
      └── the test is killed ──> stale: the next one that is made ends its processes and mounts, and removes it

A folder's owner holds a lock on the file `owner` in it. The kernel releases the lock with the process, however it ends.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PLACE, PREFIX, OWNER = Path("/var/tmp"), "diptych-", "owner"
END_S = 60.0
# Command that has another one killed with its caller: with `unshare --kill-child` all that runs in its namespaces, too.
WITH_ITS_CALLER = ("setpriv", "--pdeathsig", "KILL", "--")


@contextmanager
def temporary_folder(name: str, place: Path = PLACE) -> Iterator[Path]:
    """A folder that every machine of a test sees: not in /tmp, which each has for itself."""
    remove_stale(place)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{name}-", dir=place) as made:
        folder = Path(made)
        with (folder / "new").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / "new").rename(folder / OWNER)  # no one sees it without its lock
            yield folder


def remove_stale(place: Path = PLACE) -> list[Path]:
    """Remove the folders whose owners have ended; return their paths."""
    found: list[Path] = []
    for folder in sorted(place.glob(f"{PREFIX}*")):
        with suppress(FileNotFoundError, BlockingIOError), (folder / OWNER).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _end_processes(folder)
            _end_mounts(folder)
            shutil.rmtree(folder)
            found.append(folder)
    return found


def _end_processes(folder: Path) -> None:
    """Kill the processes that have the folder in their command lines."""
    found = [p for p in psutil.process_iter() if p.pid != os.getpid() and _names(p, str(folder))]
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, END_S)


def _names(process: psutil.Process, folder: str) -> bool:
    try:
        return any(folder in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _end_mounts(folder: Path) -> None:
    """Unmount what is mounted in the folder, the last first."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    points = [line.split(" ")[1] for line in lines]
    for point in reversed([point for point in points if point.startswith(f"{folder}/")]):
        subprocess.run(["umount", "--lazy", point], check=True)
