"""Audit log of what administrators ask of a cluster: one JSON object a line, in the supervisor's log.

{"at": "2026-01-31T12:00:00.000Z", "who": "ann@host", "what": "scale", "with": {"decode": 3}, "result": "done"}

`who` is what the caller says of itself: whoever can reach the supervisor holds Ray's token already.
"""

import getpass
import json
import logging
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

from ...workers.common.errors import DiptychError

MAX_WHO_CHARS = 200

log = logging.getLogger("diptych.audit")


def caller() -> str:
    """Name of this process's user, and of its machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


@contextmanager
def audited(who: str, what: str, given: Mapping[str, int] | None = None) -> Generator[None]:
    """Write a line about the call within: its result is `done`, or the error that ends it."""
    try:
        yield
    except DiptychError as e:
        _write(who, what, given, f"{e.code}: {e.message}")
        raise
    except BaseException as e:
        _write(who, what, given, f"failed: {type(e).__name__}")
        raise
    _write(who, what, given, "done")


def _write(who: str, what: str, given: Mapping[str, int] | None, result: str) -> None:
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line = {"at": at, "who": who[:MAX_WHO_CHARS], "what": what, "with": dict(given or {}), "result": result}
    log.info("%s", json.dumps(line))
