"""Lock that allows one `diptych serve` for each name: a lock on a file, which the kernel releases however the process
ends."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ...workers.common.errors import ConfigError
from ..common.address_file import home

_REMEDY = "set DIPTYCH_HOME to a folder in which you may write"


@contextmanager
def hold(name: str) -> Generator[None]:
    """Hold the lock while the body runs. Raises ConfigError where another process holds it, or it cannot be written."""
    path = _folder() / f"{name}.lock"
    file = _opened(path)
    try:
        _lock(file, name)
        while not _is_at(path, file):  # who held it has removed it
            os.close(file)
            file = _opened(path)
            _lock(file, name)
        os.truncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _folder() -> Path:
    """Folder of what a cluster writes down. Raises ConfigError."""
    try:
        return home()
    except RuntimeError as e:  # a user without an entry, as in some containers
        raise ConfigError(f"this user has no home folder: {_REMEDY}") from e


def _opened(path: Path) -> int:
    """Raises ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}. {_REMEDY[0].upper()}{_REMEDY[1:]}") from e


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
