"""Ends what a `diptych serve` started, however that one ends. Knows no Ray.

Ray's own processes follow a killed parent, but its agents take a minute over it. So a small process watches the command
through a pipe, which the kernel closes when the command dies, and then ends every process that still has a file of the
session open: their logs are in its folder, and they cannot hide that as they hide their names and environments.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

POLL_S = 0.05


class Reaper:
    """Watches from now on. `folder` is the session's own, and goes with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Not in the terminal's process group: Ctrl-C is for the command, which then ends in good order.
        self._watcher = subprocess.Popen(
            [sys.executable, "-m", "diptych.cluster.reaper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end(self, within_s: float) -> None:
        """Give the session's processes so long to go by themselves, end those that stay, and the watcher."""
        deadline = time.monotonic() + within_s
        while members(self.folder) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait()


def members(folder: Path) -> list[psutil.Process]:
    """The processes that have a file under `folder` open, less this one and its parent: the command itself has, too."""
    spared = (os.getpid(), os.getppid())
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.pid not in spared and any(f.path.startswith(f"{folder}/") for f in process.open_files()):
                found.append(process)
        except psutil.Error:
            continue  # another user's, or gone meanwhile
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    sys.stdin.read()  # until the command has died, or has closed the pipe because all is done
    # More than once: one that is being killed may just have started another.
    while alive := members(folder):
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=1.0)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
