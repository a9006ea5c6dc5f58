"""How workers that share experts meet, and how each tells the others which step it begins. No torch.

    meet: a socket to each of the others ──> ring, wait, ring, ... ──> close
                                               └── one of them is gone ──> PeerLost

They meet in a folder that no other user can read, by Unix sockets: nobody else can come in, and the end of a process is
the end of its sockets. So a group is on one machine; what it computes with then goes over gloo's ports on loopback.
"""

import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import ConfigError, PeerLost, RankLost

MEET_S = 120.0  # from the first one's coming to the last one's: they are started together
RETRY_S = 0.05
SAY_S = 20.0  # for one that has come to say who it is
MAX_TERMS_BYTES = 2048
NUMBER = struct.Struct("<q")
HEAD = struct.Struct("<ii")  # rank, size


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's place in a group that shares experts."""

    rank: int
    size: int
    meeting: Path  # a folder for this one start of this one group; made where it does not exist


class Doors:
    """`heard`: by worker, the last number that it rang. But for `wake` all is called on one thread at a time."""

    def __init__(self, seat: Seat, sockets: Mapping[int, socket.socket]) -> None:
        self.seat = seat
        self.heard = dict.fromkeys(sockets, -1)
        self._sockets = dict(sorted(sockets.items()))
        self._woken, self._waker = socket.socketpair()
        self._poll = select.poll()
        for each in (self._woken, self._waker, *sockets.values()):
            each.setblocking(False)
        for each in (self._woken, *sockets.values()):
            self._poll.register(each, select.POLLIN)

    def ring(self, number: int) -> None:
        """Tell all others. Raises PeerLost."""
        for rank, to in self._sockets.items():
            try:
                to.send(NUMBER.pack(number))
            except OSError as e:
                raise _gone(self.seat, [rank]) from e

    def wait(self, timeout_s: float | None = None) -> None:
        """Until one of the others rings, or `wake` is called. Raises PeerLost once one is gone."""
        ready = {fd for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3)}
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        gone = [rank for rank, each in self._sockets.items() if each.fileno() in ready and not self._hear(rank, each)]
        if gone:
            raise _gone(self.seat, sorted(gone))

    def wake(self) -> None:
        """On any thread, not after `close`."""
        try:
            self._waker.send(b"w")
        except BlockingIOError:  # it has been woken often enough
            return

    def close(self) -> None:
        """The others miss us. Idempotent."""
        for each in (self._woken, self._waker, *self._sockets.values()):
            each.close()

    def _hear(self, rank: int, each: socket.socket) -> bool:
        """Whether it is still there."""
        try:
            while len(message := each.recv(NUMBER.size)) == NUMBER.size:
                (self.heard[rank],) = NUMBER.unpack(message)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # its end, or nothing that it would say


def meet(seat: Seat, terms: str) -> Doors:
    """Waits until all have come. terms: what all must be agreed on, in words.

    Raises ConfigError for a meeting that cannot be and for one who comes on other terms, RankLost where one does not
    come, PeerLost where one goes again.
    """
    deadline, sockets = time.monotonic() + MEET_S, dict[int, socket.socket]()
    with _listen(seat) as listener, ExitStack() as stack:
        stack.callback(_socket_path(seat, seat.rank).unlink, missing_ok=True)
        if seat.rank == 0:  # of a group that met here before; nobody gets further without us
            gloo_file(seat).unlink(missing_ok=True)
        try:
            while len(sockets) < seat.size - 1:
                if time.monotonic() >= deadline:
                    raise _missing(seat, sockets)
                for rank, came in _arrivals(seat, listener, sockets):
                    sockets[rank] = came
                    _agree(seat, terms, rank, came)
        except BaseException:
            for each in sockets.values():
                each.close()
            _socket_path(seat, seat.rank).unlink(missing_ok=True)
            remove_if_empty(seat.meeting)
            raise
    return Doors(seat, sockets)


def gloo_file(seat: Seat) -> Path:
    """By which those who have met find each other's gloo."""
    return seat.meeting / "gloo"


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _listen(seat: Seat) -> socket.socket:
    """Where those of a higher rank come to."""
    path = _socket_path(seat, seat.rank)
    try:
        seat.meeting.mkdir(mode=0o700, exist_ok=True)
        about = seat.meeting.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise ConfigError(f"the meeting {seat.meeting} is open to other users: name a folder of mode 700, or none")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _open(listener, path, seat.size)
        except BaseException:
            listener.close()
            raise
    except OSError as e:
        why = e.strerror or str(e)
        raise ConfigError(f"workers cannot meet at {path} ({why}): name a folder of this machine") from e
    return listener


def _open(listener: socket.socket, path: Path, size: int) -> None:
    """`path` is there once it can be called on: so one at which nobody answers is of a worker that has ended."""
    own = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with _address(own) as address:
            listener.bind(address)
        listener.listen(size)
        if (other := _connect(path)) is not None:
            other.close()
            raise ConfigError(f"a worker of the same data_rank is at {path}: give each another one")
        path.unlink(missing_ok=True)
        path.hardlink_to(own)
    finally:
        own.unlink(missing_ok=True)


def _arrivals(
    seat: Seat, listener: socket.socket, known: Mapping[int, socket.socket]
) -> Iterator[tuple[int, socket.socket]]:
    """Those that can be reached now, each with its rank: the lower ones are called on, the higher ones call on us."""
    for rank in range(seat.rank):
        if rank not in known and (other := _connect(_socket_path(seat, rank))) is not None:
            yield rank, other
    listener.settimeout(RETRY_S)
    try:
        came, _ = listener.accept()
    except TimeoutError:
        return
    came.settimeout(SAY_S)
    try:
        rank, _ = HEAD.unpack_from(came.recv(HEAD.size + MAX_TERMS_BYTES, socket.MSG_PEEK))
    except (OSError, struct.error):
        came.close()  # it has ended meanwhile, or only looked whether somebody is here
        return
    if not seat.rank < rank < seat.size or rank in known:
        came.close()
        raise ConfigError(f"a worker with data_rank {rank} came to {seat.meeting}, where there is none to be: {seat}")
    yield rank, came


def _agree(seat: Seat, terms: str, rank: int, other: socket.socket) -> None:
    try:
        other.settimeout(SAY_S)
        other.send(HEAD.pack(seat.rank, seat.size) + terms.encode()[:MAX_TERMS_BYTES])
        said = other.recv(HEAD.size + MAX_TERMS_BYTES)
        _, size = HEAD.unpack_from(said)
    except (OSError, struct.error) as e:
        raise _gone(seat, [rank]) from e
    theirs = f"{said[HEAD.size :].decode(errors='replace')}, {size} workers"
    if theirs != f"{terms}, {seat.size} workers":
        raise ConfigError(
            f"worker {rank} has other experts to share ({theirs}) than worker {seat.rank} ({terms}, {seat.size} "
            "workers): start all with the same settings"
        )


def _connect(path: Path) -> socket.socket | None:
    """None where nobody is."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _address(path) as address:
            found.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):
        found.close()
        return None
    except BaseException:
        found.close()
        raise
    return found


@contextmanager
def _address(path: Path) -> Generator[str]:
    """Of a socket at `path`, by way of its open folder: an address has 107 bytes at most, and folders longer names."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _socket_path(seat: Seat, rank: int) -> Path:
    return seat.meeting / f"worker-{rank}"


def _missing(seat: Seat, here: Collection[int]) -> RankLost:
    missing = ", ".join(str(rank) for rank in range(seat.size) if rank != seat.rank and rank not in here)
    return RankLost(
        f"of the {seat.size} workers that share experts {missing} did not come to {seat.meeting} within {MEET_S:g} s: "
        "start all of them, with the same meeting"
    )


def _gone(seat: Seat, ranks: list[int]) -> PeerLost:
    who = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"
    return PeerLost(f"{who} of the {seat.size} that share experts ended: all of them end with it, to be started again")
