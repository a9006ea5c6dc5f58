"""Processes forked from one that has imported torch and the servers. Python and its imports take 4 s of a core where a
worker needs 0.7 of its own."""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Self
from unittest import mock

PRELOADED = (
    "pytest",  # each process runs the main module again
    "torch",
    "diptych.cluster.placement.router_process",
    "diptych.workers.execution.model_runner",
    "diptych.workers.server.service",
    "diptych.workers.server.worker",
)


class ForkedProcess:
    """A forked process in subprocess.Popen's words. Several threads may ask it."""

    def __init__(self, process: BaseProcess, stdout: int) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self.stdout = os.fdopen(stdout, encoding="utf-8")
        self._process = process
        self._lock = threading.Lock()  # its status can be read once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it ended meanwhile, and is not this process's child, which would wait
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_command(main: Callable[[], int], flags: Sequence[str], env: Mapping[str, str]) -> ForkedProcess:
    """Run a command's `main` on flags, in an environment; its stderr is this process's, its stdout a pipe."""
    ours, theirs = os.pipe()
    with Connection(theirs, readable=False) as stdout, Connection(os.dup(2), readable=False) as stderr:
        process = context().Process(target=_run, args=(main, [main.__module__, *flags], dict(env), stdout, stderr))
        process.start()
    return ForkedProcess(process, ours)


def context() -> "mp.context.ForkServerContext":
    """Context of multiprocessing whose processes are forked from one with everything imported."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(list(PRELOADED))
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE"):  # read when torch is imported
        forkserver.ensure_running()
    return found


def _run(
    main: Callable[[], int], argv: list[str], env: Mapping[str, str], stdout: Connection, stderr: Connection
) -> None:
    os.environ.clear()
    os.environ.update(env)
    for number, pipe in ((1, stdout), (2, stderr)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.argv = argv
    sys.exit(main())
