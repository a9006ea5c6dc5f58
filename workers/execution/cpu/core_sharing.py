"""Lends a worker's cores while it has nothing to compute, and borrows those of other workers of the machine. No torch.

    begin ──> adjust ──> adjust ──> ... ──> begin ──> ... ──> rest
    takes the own cores    between layers:              gives all back
    borrows what rests     gives back what its owner wants, borrows what rests

The kernel keeps who computes on a core, as locks on files that describe the core: however a process ends, its locks do.

    physical_package_id     held by the owner: it lends the core
    core_id                 held by the worker that computes on the core now
    thread_siblings_list    held by the owner while it waits for a borrower

An owner waits for its core at most MAX_WAIT_S, and then computes beside the borrower: a process that was stopped in the
middle of a step must not stop its neighbours.
"""

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import finalize

from ...common.cores import CPUS

MAX_BORROWED = 3  # cores for each that the worker has: more threads wait for each other longer than they compute
MAX_WAIT_S = 0.2
LOOK_S = 0.01  # longer than any worker checks whether a lock is free
POLL_S = 50e-6


class _FileLock:
    """Lock on a file or folder, of this object alone."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = finalize(self, os.close, self._descriptor)  # at the latest when nobody has it any more

    def take(self) -> bool:
        """Take it, if nobody has it. Returns whether it is held; False also while somebody else reads `is_free`."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_back(self) -> None:
        """Idempotent."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @property
    def is_free(self) -> bool:
        if not self.take():
            return False
        self.give_back()
        return True

    def close(self) -> None:
        self._close()


class _Core:
    """The locks of one core."""

    def __init__(self, number: int, folder: Path) -> None:
        path = folder / f"cpu{number}"
        self.number = number
        self.lends = _FileLock(path / "topology/physical_package_id")
        self.computes = _FileLock(path / "topology/core_id")
        self.wanted = _FileLock(path / "topology/thread_siblings_list")

    def close(self) -> None:
        for lock in (self.lends, self.computes, self.wanted):
            lock.close()


class CoreSharing:
    """Cores on which one worker computes. Every method is called on one thread.

    own: the worker's, which compute in every step. others: those that it may borrow. Raises OSError where the system
    has no such files, or another process lends one of the worker's own."""

    def __init__(self, own: Sequence[int], others: Sequence[int], folder: Path = CPUS) -> None:
        self._own = [_Core(number, folder) for number in own]
        self._others = [_Core(number, folder) for number in others]
        self._held: set[_Core] = set()  # of its own
        self._borrowed: dict[_Core, None] = {}
        for core in self._own:
            if not _poll(core.lends.take, LOOK_S):
                self.close()
                raise OSError(f"another process lends core {core.number}")

    @property
    def max_cores(self) -> int:
        return len(self._own) + len(self._others)

    @property
    def has_borrowed(self) -> bool:
        """Return whether it has cores of others now."""
        return bool(self._borrowed)

    def begin(self) -> tuple[int, ...]:
        """Take the own cores, which may take until another worker is between two layers. Returns the cores to compute
        on."""
        for core in self._own:
            if core not in self._held:
                self._take(core)
        return self.adjust()

    def adjust(self) -> tuple[int, ...]:
        """Give back what its owner wants, borrow what rests. Returns the cores to compute on from now on: own ones
        first, in their order."""
        for core in self._others:
            if core in self._borrowed:
                if not core.wanted.is_free:
                    self._return(core)
            elif core.computes.take():
                if core.wanted.is_free and not core.lends.is_free:
                    self._borrowed[core] = None
                else:
                    core.computes.give_back()
        return tuple(core.number for core in (*self._own, *self._borrowed))

    def rest(self) -> None:
        """Give all back: there is nothing to compute. Idempotent."""
        for core in self._held:
            core.computes.give_back()
        self._held.clear()
        for core in list(self._borrowed):
            self._return(core)

    def close(self) -> None:
        """Give all back. Idempotent; no other method may be called after it."""
        self.rest()
        for core in (*self._own, *self._others):
            core.close()

    def _take(self, core: _Core) -> None:
        if not core.computes.take():
            _poll(core.wanted.take, LOOK_S)
            is_taken = _poll(core.computes.take, MAX_WAIT_S)
            core.wanted.give_back()
            if not is_taken:
                return
        self._held.add(core)

    def _return(self, core: _Core) -> None:
        del self._borrowed[core]
        core.computes.give_back()


def _poll(take: Callable[[], bool], max_wait_s: float) -> bool:
    until = time.monotonic() + max_wait_s
    while not (is_taken := take()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return is_taken


def cores_to_borrow(own: Sequence[int], usable: Sequence[int], folder: Path = CPUS) -> tuple[int, ...]:
    """Cores that share memory with a worker's own, the nearest first; at most MAX_BORROWED for each of those."""
    packages = {_package(core, folder) for core in own}
    others = [core for core in usable if core not in own and _package(core, folder) in packages]
    others.sort(key=lambda core: (min(abs(core - mine) for mine in own), core))
    return tuple(others[: MAX_BORROWED * len(own)])


def _package(core: int, folder: Path) -> str:
    return (folder / f"cpu{core}/topology/physical_package_id").read_text()
