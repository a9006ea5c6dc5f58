"""Lock that allows one `diptych serve` for each name: a lock on a file, which the kernel releases however the process
ends."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ...workers.common.errors import ConfigError
from ..common.address_file import home


@contextmanager
def hold(name: str) -> Generator[None]:
    """Hold the lock while the body runs. Raises ConfigError where another process holds it."""
    path = home() / f"{name}.lock"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _lock(file, name)
        while not _is_at(path, file):  # who held it has removed it
            os.close(file)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            _lock(file, name)
        os.truncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _lock(file: int, name: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        holder = os.pread(file, 20, 0).decode(errors="replace") or "that starts now"
        raise ConfigError(
            f"a cluster named {name!r} already runs (process {holder}): "
            f"stop it with `diptych stop --name {name}`, or choose another --name"
        ) from e


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
