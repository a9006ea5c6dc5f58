"""Exit codes of the commands: one for each kind of mistake. docs/cli.md documents them."""

from .errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    DiptychError,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
    WorkloadError,
)

FAULT = 1  # of ours: please report it
GIVEN = 2  # invalid input (a flag, a setting, a checkpoint, a key): the same command would fail again
UNAVAILABLE = 3  # who should answer does not, or not in time: it may later
FOUND = 4  # a check that was asked for found trouble
INTERRUPTED = 130  # ended by Ctrl-C or SIGTERM before it was done; the code that a shell reports

_CODES: tuple[tuple[type[DiptychError], int], ...] = (
    (ConfigError, GIVEN),
    (CheckpointError, GIVEN),
    (WorkloadError, GIVEN),
    (InvalidRequest, GIVEN),
    (Unauthenticated, GIVEN),
    (Unavailable, UNAVAILABLE),
    (Overloaded, UNAVAILABLE),
    (DeadlineExceeded, UNAVAILABLE),
)


def exit_code(error: DiptychError) -> int:
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAULT)
