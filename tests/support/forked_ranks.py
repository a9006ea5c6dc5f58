"""Ranks of a worker, forked from a process that has imported what they need. A start by Python takes 2.5 s of a core.

    rank 0's process ──command, descriptors──> nursery (a descendant of it) ──fork──> x ──fork──> rank
    x ends, so the kernel gives the rank to its nearest ancestor that asks for orphans: rank 0's process

So the rank is a child of rank 0's process, like one that it started: it reads its status, and the kernel ends the rank
with it. A rank whose environment has other settings of libraries than the nursery's, which have been read, is started
by Python; so are all of tests/e2e/test_cluster_ranks.py, which Ray starts.
"""

import array
import ctypes
import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil

MODULE = "diptych.workers.execution.rank"
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
NURSERY, RANK = "test nursery", "test rank"  # names of processes, of 15 characters at most
LIBRARIES = ("OMP_", "TRITON_", "DIPTYCH_", "CUDA_", "HIP_", "PYTHON", "LD_", "NCCL_", "UCX_", "NIXL_")
MAX_BYTES = 1 << 16
MAX_DESCRIPTORS = 64
LOW = 512  # descriptors below it are those that a rank is given, or closed

_lock = threading.Lock()
_nursery: socket.socket | None = None


def ranks_of(pid: int | None = None) -> list[psutil.Process]:
    """The other ranks whose rank 0 is in that process, or in this one, in order of their ids."""
    children = psutil.Process(pid).children()
    return sorted((p for p in children if p.name() == RANK or MODULE in p.cmdline()), key=lambda p: p.pid)


class ForkedRank(subprocess.Popen[bytes]):
    """A forked rank in subprocess.Popen's words: how it is started differs, and nothing else."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        (_, _, _, pass_fds, _, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite) = rest[:15]
        given = {0: p2cread, 1: c2pwrite, 2: 2} | {fd: fd for fd in pass_fds}
        pid = fork_rank([args[2], *args[3:]], env, given)
        if pid is None:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def fork_ranks(nursery: socket.socket | None = None) -> None:
    """Have the ranks of this process's workers forked. nursery: a connection to one; without it one is made when a rank
    is first started."""
    global _nursery
    from diptych.workers.ranks import local_ranks

    _nursery = nursery
    local_ranks.subprocess = SimpleNamespace(Popen=ForkedRank, PIPE=subprocess.PIPE)  # type: ignore[assignment]


def fork_rank(argv: Sequence[str], env: Mapping[str, str], given: Mapping[int, int]) -> int | None:
    """Return the id of a process that runs a rank's module, given descriptors by their numbers there; None where its
    environment does not fit."""
    global _nursery
    with _lock, _adopting():
        if _nursery is None:
            _nursery = _make_nursery()
        asked = json.dumps({"argv": list(argv), "env": dict(env), "parent": os.getpid(), "given": list(given)})
        socket.send_fds(_nursery, [asked.encode()], list(given.values()))
        return json.loads(_nursery.recv(MAX_BYTES))


def fork_nursery() -> socket.socket:
    """Make a nursery that is forked from this process, of one thread; return a connection to it."""
    ours, theirs = _link()
    if not os.fork():
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):  # those that read what this process writes wait for the last descriptor
            os.dup2(null, number)
        serve(theirs)
    theirs.close()
    return ours


def serve(link: socket.socket) -> NoReturn:
    """Fork a rank for each message of the connection, until it is closed."""
    _prctl(PR_SET_NAME, NURSERY)
    here = _settings(os.environ)
    while True:
        message, fds, _, _ = socket.recv_fds(link, MAX_BYTES, MAX_DESCRIPTORS)
        if not message:
            os._exit(0)
        asked = json.loads(message)
        pid: int | None = None
        if _settings(asked["env"]) == here:
            pid = _fork_orphan(asked, fds)
        for fd in fds:
            os.close(fd)
        link.send(json.dumps(pid).encode())


def _fork_orphan(asked: dict[str, Any], fds: Sequence[int]) -> int:
    """Returns when the rank is a child of the process that asked."""
    read, write = os.pipe()
    if not (between := os.fork()):
        pid = os.fork()
        if pid:
            os.write(write, array.array("i", [pid]).tobytes())
            os._exit(0)
        try:
            _run_rank(asked, fds)
        finally:
            os._exit(1)
    os.waitpid(between, 0)
    [pid] = array.array("i", os.read(read, 4))
    os.close(read)
    os.close(write)
    return pid


def _run_rank(asked: dict[str, Any], fds: Sequence[int]) -> None:
    while os.getppid() != asked["parent"]:
        os.sched_yield()  # its parent ends at once
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, LOW) for fd in fds]
    os.closerange(0, LOW)
    for number, fd in zip(asked["given"], high, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked["env"])
    _prctl(PR_SET_NAME, RANK)
    module, *arguments = asked["argv"]
    sys.argv = [module, *arguments]
    importlib.import_module(module).main(sys.argv)


def _make_nursery() -> socket.socket:
    """One whose parent, which has imported everything, is a child of this process."""
    from .forked import context

    ours, theirs = _link()
    with theirs:
        context().Process(target=serve, args=(theirs,), daemon=True).start()
    return ours


def _link() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _settings(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that libraries read when they are loaded."""
    return {name: value for name, value in env.items() if name.startswith(LIBRARIES)}


@contextmanager
def _adopting() -> Any:
    """Meanwhile this process becomes the parent of its descendants' orphans."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int | str) -> None:
    argument = ctypes.c_char_p(value.encode()) if isinstance(value, str) else ctypes.c_ulong(value)
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
