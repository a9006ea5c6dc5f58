"""Ends what a `diptych serve` started, however that one ends. Knows no Ray.

Ray's own processes follow a killed parent, but its agents take a minute over it. So a small process watches the
command through a pipe, which the kernel closes when the command dies, and then ends every descendant of the command
that still has a file of the session open: their logs are in its folder. It looks up who descends from the command while
that lives, for the kernel forgets a dead parent. Whoever else reads these logs is left alone.
"""

import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ..common.address_file import start_of

POLL_S = 0.05
LOOK_S = 2.0  # a check takes about 8 ms
KILL_S = 30.0  # a process that the kernel does not end is left then


class SessionWatchdog:
    """Watches from now on. `folder` is the session's own, and goes with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = psutil.Process()
        # Not in the terminal's process group: Ctrl-C is for the command, which then ends in good order.
        self._watcher = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "diptych.cluster.placement.session_watchdog",
                str(folder),
                str(command.pid),
                str(start_of(command)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end(self, within_s: float) -> None:
        """Give the session's processes so long to go by themselves, end those that stay, and the watcher."""
        deadline = time.monotonic() + within_s
        tree = ProcessTree(psutil.Process())
        while tree.members(self.folder) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait()


class ProcessTree:
    """The descendants of `root`, those included whose parents have died since an earlier `look`."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._seen: set[psutil.Process] = set()

    def look(self) -> set[psutil.Process]:
        """Return the members that live."""
        self._seen = {process for process in self._seen if process.is_running()}
        known = {process.pid for process in self._seen}
        if self._root.is_running():
            known.add(self._root.pid)
        parents = _parents()
        while new := {process for process, parent in parents.items() if parent in known and process.pid not in known}:
            known |= {process.pid for process in new}
            self._seen |= new
        return self._seen

    def members(self, folder: Path) -> list[psutil.Process]:
        """Return the processes that have a file under `folder` open, without this one."""
        return [p for p in self.look() if p.pid != os.getpid() and has_open(p, folder)]


def _parents() -> dict[psutil.Process, int]:
    """The number of each process's parent."""
    found: dict[psutil.Process, int] = {}
    for process in psutil.process_iter():
        try:
            found[process] = process.ppid()
        except psutil.Error:
            continue  # gone meanwhile
    return found


def has_open(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(file.path.startswith(f"{folder}/") for file in process.open_files())
    except psutil.Error:
        return False  # another user's, or it has ended


def main() -> None:
    folder, pid, started = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    try:
        command = psutil.Process(pid)
        is_it = start_of(command) == started
    except psutil.NoSuchProcess:
        return
    if not is_it:  # it has ended, and another process has its number
        return
    tree = ProcessTree(command)
    # Readable when the command has ended, or has closed the pipe because it is done.
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        tree.look()
    # More than once: one that is being killed may just have started another.
    deadline = time.monotonic() + KILL_S
    while (alive := tree.members(folder)) and time.monotonic() < deadline:
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=1.0)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
