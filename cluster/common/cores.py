"""Cores -> workers: each worker of a machine gets cores that no other has, as long as there are enough.

A worker holds a lock on each of its cores, which the kernel gives back however the process ends. So nobody keeps a list
that could be wrong: a worker that is started again, an adopted one, and those of another cluster on the machine are all
counted by what they hold. A worker that finds too few is not bound, and shares.
"""

import fcntl
import os
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...workers.common.cores import CPUS


def choose_cores(cores: Sequence[int], taken: Collection[int], num: int) -> tuple[int, ...] | None:
    """The first `num` neighbours (they share caches) of which none is taken; None where there are none."""
    for first in range(len(cores) - num + 1 if num else 0):
        chosen = tuple(cores[first : first + num])
        if not any(core in taken for core in chosen):
            return chosen
    return None


class CoreClaim:
    """Cores that this process has for itself until `release`, or until it ends. `folder`: a file or folder for each."""

    def __init__(self, folder: Path = CPUS) -> None:
        self.cores: tuple[int, ...] | None = None
        self._folder = folder
        self._locks: dict[int, int] = {}  # core -> descriptor

    def take(self, cores: Sequence[int], num: int) -> tuple[int, ...] | None:
        """`num` of `cores`, or None where so many are not free. Once."""
        assert self.cores is None
        if not num:
            return None
        try:
            # One at a time, or two could each keep from the other what neither can use.
            with self._alone():
                taken = [core for core in cores if not self._lock(core)]
                self.cores = choose_cores(cores, taken, num)
                self._unlock_all_but(self.cores or ())
        except OSError:  # no such files: not Linux, or a container that hides them
            self.release()
        return self.cores

    def release(self) -> None:
        """Idempotent."""
        self.cores = None
        self._unlock_all_but(())

    @contextmanager
    def _alone(self) -> Generator[None]:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, core: int) -> bool:
        descriptor = os.open(self._folder / f"cpu{core}", os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks[core] = descriptor
        return True

    def _unlock_all_but(self, kept: Collection[int]) -> None:
        for core in [core for core in self._locks if core not in kept]:
            os.close(self._locks.pop(core))
