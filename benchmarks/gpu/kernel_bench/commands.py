"""Commands run side by side, each in a process group of its own that a deadline ends. Knows no torch."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Command:
    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # beside this process's own


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str  # "passed", "failed (exit status 1)", "cut off after 30 s", "not run: ..."
    seconds: float = 0.0
    output: str = ""  # stdout and stderr together
    command: str = ""

    @property
    def has_passed(self) -> bool:
        return self.status == "passed"


def run(command: Command, deadline: float, folder: Path, now: Callable[[], float] = time.monotonic) -> Outcome:
    """deadline: by `now`. Ends everything that the command has started, when it ends and when it is cut off."""
    start = now()
    written = " ".join([*(f"{key}={value}" for key, value in command.environment.items()), *command.argv])
    if start >= deadline:
        return Outcome(command.name, "not run: no time was left", command=written)
    with tempfile.TemporaryFile() as output:  # no pipe: what outlives the command could hold that open
        process = subprocess.Popen(
            command.argv,
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **command.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = "passed" if process.wait(deadline - start) == 0 else f"failed (exit status {process.returncode})"
        except subprocess.TimeoutExpired:
            status = f"cut off after {now() - start:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Outcome(command.name, status, now() - start, output.read().decode(errors="replace"), written)


def run_all(commands: Sequence[Command], deadline: float, folder: Path, at_once: int) -> list[Outcome]:
    """Run the commands in their order, `at_once` at a time; return their outcomes in the same order."""
    with ThreadPoolExecutor(max(at_once, 1)) as pool:
        return list(pool.map(lambda command: run(command, deadline, folder), commands))
