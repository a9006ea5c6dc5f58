"""Rendezvous of workers that share experts, and the sockets by which each tells the others its next step. No torch.

    connect_peers: a socket to each peer ──> send, wait, send, ... ──> close
                                              └── a peer has ended ──> PeerLost

Peers connect by Unix sockets in a folder that other users cannot read, so no other user can join, and a peer's sockets
close when its process ends. All peers are on one machine. Tensors go over gloo's ports on loopback.
"""

import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import ConfigError, PeerLost, RankLost

RENDEZVOUS_S = 120.0  # from the first peer to the last: they are started together
RETRY_S = 0.05
HELLO_S = 20.0  # for a peer that has connected to send its rank
MAX_TERMS_BYTES = 2048
NUMBERS = struct.Struct("<qq")
HEAD = struct.Struct("<ii")  # rank, size


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """A worker's rank in a group that shares experts, and where the group connects."""

    rank: int
    size: int
    rendezvous: Path  # folder of one start of one group; created if missing


class PeerSockets:
    """Sockets to all peers. `received`: last number from each peer. Only `wake` may be called from other threads."""

    def __init__(self, group: PeerGroup, sockets: Mapping[int, socket.socket]) -> None:
        self.group = group
        self._sockets = dict(sorted(sockets.items()))  # peers connect in any order
        self.received = dict.fromkeys(self._sockets, -1)
        self._details: dict[int, dict[int, int]] = {rank: {} for rank in self._sockets}  # by number, of the last two
        self._woken, self._waker = socket.socketpair()
        self._poll = select.poll()
        for each in (self._woken, self._waker, *sockets.values()):
            each.setblocking(False)
        for each in (self._woken, *sockets.values()):
            self._poll.register(each, select.POLLIN)

    @property
    def descriptors(self) -> Sequence[int]:
        """Descriptors of the sockets, which are hung up when a peer ends."""
        return [each.fileno() for each in self._sockets.values()]

    def details(self, number: int) -> list[int]:
        """Return what all peers sent with `number`, by rank: the last one from each, or the one before that."""
        return [of[number] for of in self._details.values()]

    def send(self, number: int, detail: int = 0) -> None:
        """Send a number, and a detail of it, to all peers. Raises PeerLost."""
        for rank, to in self._sockets.items():
            try:
                to.send(NUMBERS.pack(number, detail))
            except OSError as e:
                raise _gone(self.group, [rank]) from e

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a peer sends, or `wake` is called. Raises PeerLost once a peer has ended."""
        ready = {fd for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3)}
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        gone = [
            rank for rank, each in self._sockets.items() if each.fileno() in ready and not self._receive(rank, each)
        ]
        if gone:
            raise _gone(self.group, sorted(gone))

    def wake(self) -> None:
        """End a `wait`. May be called on any thread, not after `close`."""
        try:
            self._waker.send(b"w")
        except BlockingIOError:  # it has been woken often enough
            return

    def close(self) -> None:
        """Close all sockets; peers then raise PeerLost. Idempotent."""
        for each in (self._woken, self._waker, *self._sockets.values()):
            each.close()

    def _receive(self, rank: int, each: socket.socket) -> bool:
        """Read what the peer sent. Returns False once it has ended."""
        try:
            while len(message := each.recv(NUMBERS.size)) == NUMBERS.size:
                number, detail = NUMBERS.unpack(message)
                before = self.received[rank]
                kept = {before: self._details[rank][before]} if before in self._details[rank] else {}
                self.received[rank], self._details[rank] = number, kept | {number: detail}
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the socket closed, or a message that is not ours


def connect_peers(group: PeerGroup, terms: str) -> PeerSockets:
    """Wait until all peers are connected. `terms`: text that must be the same for all of them.

    Raises ConfigError for a folder that is not usable and for other terms, RankLost if a peer does not connect,
    PeerLost if one ends meanwhile.
    """
    deadline, sockets = time.monotonic() + RENDEZVOUS_S, dict[int, socket.socket]()
    with _listen(group) as listener, ExitStack() as stack:
        stack.callback(_socket_path(group, group.rank).unlink, missing_ok=True)
        if group.rank == 0:  # left by an earlier group; no peer gets further without us
            gloo_file(group).unlink(missing_ok=True)
        try:
            while len(sockets) < group.size - 1:
                if time.monotonic() >= deadline:
                    raise _missing(group, sockets)
                for rank, peer in _new_peers(group, listener, sockets):
                    sockets[rank] = peer
                    _agree(group, terms, rank, peer)
        except BaseException:
            for each in sockets.values():
                each.close()
            _socket_path(group, group.rank).unlink(missing_ok=True)
            remove_if_empty(group.rendezvous)
            raise
    return PeerSockets(group, sockets)


def gloo_file(group: PeerGroup) -> Path:
    """File through which connected peers find each other's gloo ports."""
    return group.rendezvous / "gloo"


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _listen(group: PeerGroup) -> socket.socket:
    """Listen for the peers of higher rank."""
    path = _socket_path(group, group.rank)
    try:
        group.rendezvous.mkdir(mode=0o700, exist_ok=True)
        about = group.rendezvous.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise ConfigError(
                f"the rendezvous {group.rendezvous} is accessible to others: use a folder of mode 700, or a new path"
            )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _open(listener, path, group.size)
        except BaseException:
            listener.close()
            raise
    except OSError as e:
        why = e.strerror or str(e)
        raise ConfigError(f"workers cannot connect at {path} ({why}): use a folder on this machine") from e
    return listener


def _open(listener: socket.socket, path: Path, size: int) -> None:
    """Bind and listen. `path` exists only once it accepts, so one that refuses belongs to a worker that has ended."""
    own = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with _address(own) as address:
            listener.bind(address)
        listener.listen(size)
        if (other := _connect(path)) is not None:
            other.close()
            raise ConfigError(
                f"another worker with the same data_rank uses {path}: give each worker a different data_rank"
            )
        path.unlink(missing_ok=True)
        path.hardlink_to(own)
    finally:
        own.unlink(missing_ok=True)


def _new_peers(
    group: PeerGroup, listener: socket.socket, known: Mapping[int, socket.socket]
) -> Iterator[tuple[int, socket.socket]]:
    """Peers that connect now, each with its rank: we connect to lower ranks and accept higher ones."""
    for rank in range(group.rank):
        if rank not in known and (other := _connect(_socket_path(group, rank))) is not None:
            yield rank, other
    listener.settimeout(RETRY_S)
    try:
        peer, _ = listener.accept()
    except TimeoutError:
        return
    peer.settimeout(HELLO_S)
    try:
        rank, _ = HEAD.unpack_from(peer.recv(HEAD.size + MAX_TERMS_BYTES, socket.MSG_PEEK))
    except (OSError, struct.error):
        peer.close()  # it has ended, or only checked whether this path is in use
        return
    if not group.rank < rank < group.size or rank in known:
        peer.close()
        raise ConfigError(
            f"a worker with data_rank {rank} connected at {group.rendezvous}, which has no such rank: {group}"
        )
    yield rank, peer


def _agree(group: PeerGroup, terms: str, rank: int, other: socket.socket) -> None:
    try:
        other.settimeout(HELLO_S)
        other.send(HEAD.pack(group.rank, group.size) + terms.encode()[:MAX_TERMS_BYTES])
        said = other.recv(HEAD.size + MAX_TERMS_BYTES)
        _, size = HEAD.unpack_from(said)
    except (OSError, struct.error) as e:
        raise _gone(group, [rank]) from e
    theirs = f"{said[HEAD.size :].decode(errors='replace')}, {size} workers"
    if theirs != f"{terms}, {group.size} workers":
        raise ConfigError(
            f"worker {rank} shares other experts ({theirs}) than worker {group.rank} ({terms}, {group.size} "
            "workers): start all with the same settings"
        )


def _connect(path: Path) -> socket.socket | None:
    """Returns None where nothing listens."""
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
    """Address of a socket at `path`, through its open folder: it has at most 107 bytes, a path may have more."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _socket_path(group: PeerGroup, rank: int) -> Path:
    return group.rendezvous / f"worker-{rank}"


def _missing(group: PeerGroup, here: Collection[int]) -> RankLost:
    missing = ", ".join(str(rank) for rank in range(group.size) if rank != group.rank and rank not in here)
    return RankLost(
        f"of the {group.size} workers that share experts {missing} did not connect at {group.rendezvous} within "
        f"{RENDEZVOUS_S:g} s: start all of them, with the same rendezvous"
    )


def _gone(group: PeerGroup, ranks: list[int]) -> PeerLost:
    who = f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"
    return PeerLost(f"{who} of the {group.size} that share experts ended: all of them end with it, to be started again")
