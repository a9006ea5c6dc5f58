"""Ranks of a worker on another machine, as rank 0's process holds them: its connections to the machine's rank host.

    control   -> SessionStart, of ranks   <- READY, or LOST and why   -> GO   closed: the host kills the ranks
    kv link   -> SessionStart             then hand-offs' commands; the host passes it on to the machine's first rank

Both are TCP, proven by link_auth.py. No torch.
"""

import json
import socket
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from ..common.errors import RankLost
from ..models.plan.rank_settings import RankSettings
from .link_auth import DEADLINE_S, keep_alive, prove_to_listener

VERSION = 1  # of these messages and of what RankSettings has
READY, GO, LOST = b"ready", b"go", b"lost "


@dataclass(frozen=True, slots=True)
class SessionStart:
    """First message of a connection to a rank host."""

    session: str  # of one start of one worker
    version: int = VERSION
    settings: str = ""  # RankSettings of the machine's first rank; empty: this is the kv link

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> Self:
        """Raises RankLost."""
        try:
            found: dict[str, Any] = json.loads(message)
            start = cls(**found)
        except (ValueError, TypeError) as e:
            raise RankLost(f"a rank host was sent what it does not know: {e}") from e
        if start.version != VERSION:
            raise RankLost(
                f"the worker and the rank host run other versions ({start.version} and {VERSION}): install one on both"
            )
        return start


class RemoteRanks:
    """Connections to one rank host. Its ranks live as long as these."""

    def __init__(self, address: str, settings: RankSettings, token: str | None) -> None:
        """Have the host start the ranks of a machine. settings: of the first of them. Raises RankLost."""
        self.address, self.ranks = address, settings.machine_ranks
        self.is_ready = False
        session = uuid.uuid4().hex
        try:
            control = _connect(address, token)
        except OSError as e:
            raise _unreachable(address, e) from e
        self._control = Connection(control.detach())
        try:
            self._control.send_bytes(SessionStart(session, settings=settings.to_json()).to_bytes())
            self.kv_link = _connect(address, token)
            with Connection(self.kv_link.dup().detach()) as first:
                first.send_bytes(SessionStart(session).to_bytes())
        except BaseException as e:
            self._control.close()
            if isinstance(e, OSError):
                raise _unreachable(address, e) from e
            raise

    def fileno(self) -> int:
        return self._control.fileno()

    def hear(self) -> str | None:
        """Receive what the host says. Returns why its ranks are lost, None while they are not."""
        try:
            said = self._control.recv_bytes()
        except (EOFError, OSError) as e:
            first, last = self.ranks.start, self.ranks.stop - 1
            return f"the rank host at {self.address}, of ranks {first} to {last}, has ended ({e or 'closed'})"
        if said == READY:
            self.is_ready = True
            return None
        return said.removeprefix(LOST).decode(errors="replace")

    def go(self) -> None:
        """Tell the ranks that all are ready."""
        with suppress(OSError):  # its end is heard of otherwise
            self._control.send_bytes(GO)

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._control.close()
        self.kv_link.close()


def _connect(address: str, token: str | None) -> socket.socket:
    host, _, port = address.rpartition(":")
    link = socket.create_connection((host.strip("[]"), int(port)), timeout=DEADLINE_S)
    try:
        prove_to_listener(link, token)
        link.settimeout(None)
        keep_alive(link)
    except BaseException:
        link.close()
        raise
    return link


def _unreachable(address: str, error: OSError) -> RankLost:
    return RankLost(
        f"the rank host at {address} cannot be reached ({error}): start one there (python -m "
        "diptych.workers.server.rank_host), and let this machine connect to it"
    )
