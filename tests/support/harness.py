"""Real worker processes for end-to-end tests, and the questions to ask them afterwards."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.workers.server.worker import main

from .forked import ForkedProcess, fork_command

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@dataclass(frozen=True)
class WorkerHandle:
    role: str
    address: str
    incarnation: str
    process: ForkedProcess

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self.process.kill()
        self.process.wait()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def state(self) -> worker_pb2.WorkerState:
        with grpc.insecure_channel(self.address) as channel:
            return worker_pb2_grpc.WorkerStub(channel).GetState(worker_pb2.GetStateRequest(), timeout=30.0)

    def settled_state(self) -> worker_pb2.WorkerState:
        """The state once the worker has nothing left to do (the caller's requests have ended)."""
        while True:
            state = self.state()
            if not (state.load.num_running or state.load.num_waiting or state.num_open_handoffs):
                return state
            time.sleep(0.02)


def spawn(model: Path, role: str, **flags: object) -> ForkedProcess:
    """Start what `python -m diptych.workers.server.worker` runs."""
    command = ["--model", str(model), "--role", role]
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    return fork_command(main, command, os.environ | {"OMP_NUM_THREADS": "1"})


@contextmanager
def workers(model: Path, roles: list[str], **flags: object) -> Iterator[list[WorkerHandle]]:
    """Start a process for each role, side by side; end all on leaving."""
    with unlike_workers(model, [(role, flags) for role in roles]) as handles:
        yield handles


@contextmanager
def unlike_workers(model: Path, each: list[tuple[str, dict[str, object]]]) -> Iterator[list[WorkerHandle]]:
    """The same, each with its own flags."""
    roles = [role for role, _ in each]
    with ExitStack() as stack:
        processes = [stack.enter_context(_ended(spawn(model, role, **flags))) for role, flags in each]
        handles: list[WorkerHandle] = []
        for role, process in zip(roles, processes, strict=True):
            line = process.stdout.readline()
            assert line, f"the {role} worker ended with {process.wait()} before it was ready"
            ready = json.loads(line)
            handles.append(WorkerHandle(role, ready["address"], ready["incarnation"], process))
        yield handles


def assert_nothing_leaked(handles: list[WorkerHandle]) -> None:
    for handle in handles:
        state = handle.settled_state()
        load = state.load
        assert state.num_unaccounted_blocks == 0
        assert (load.num_leased_blocks, load.num_quarantined_blocks) == (0, 0)
        assert load.num_free_blocks == load.num_blocks


@contextmanager
def _ended(process: ForkedProcess) -> Iterator[ForkedProcess]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
