"""NIXL agents of a worker's other ranks, as rank 0 uses them: each reads into its own rank's piece of the KV pool, or
into a staging buffer of its own, from which it converts into the pieces of all.

    rank 0    RankAgent ──commands──> rank k    rank_server.py: a NixlThread, of the rank's piece
                        <──answers──            handoff/rank_receiver.py: for what must be converted

They speak over a socket that only these two processes have. Its end is the end of either: RankAgent then fails what is
under way, and the rank ends its agent.
"""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ...proto import kv_pb2
from ..common.errors import ERRORS, TransportError
from ..kv.layout import Copies, Region
from .nixl_agent import Endpoint

OPEN_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0

Answer = TypeVar("Answer")

log = logging.getLogger("diptych.nixl")


class RankAgent:
    """A NixlAgent of another rank's process. Raises TransportError where that can make none. Blocks for a second or
    two, in which NIXL is loaded there."""

    def __init__(self, rank: int, link: socket.socket, *, has_rdma: bool) -> None:
        """`link`: to the rank's `serve_rank` (rank_server.py)."""
        self._rank, self._link = rank, link
        self._connection = Connection(link.dup().detach())
        self._lock = threading.Lock()  # guards the three below
        self._waiting: dict[int, tuple[Future[Any], Callable[[kv_pb2.RankAnswer], object]]] = {}  # by command's number
        self._num_commands = 0
        self._has_ended = False
        self._endpoint: Endpoint | None = None
        self.can_receive = False  # whether it has a PartsReceiver
        self._sender = ThreadPoolExecutor(1, f"diptych-rank-{rank}-commands")
        self._receiver = threading.Thread(target=self._receive, name=f"diptych-rank-{rank}-answers", daemon=True)
        self._receiver.start()
        try:
            self._tell(kv_pb2.RankCommand(open=kv_pb2.AgentSettings(has_rdma=has_rdma))).result(OPEN_TIMEOUT_S)
        except TimeoutError as e:
            self.stop()
            raise TransportError(f"rank {rank} made no NIXL agent within {OPEN_TIMEOUT_S:g} s") from e
        except TransportError:
            self.stop()
            raise

    @property
    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None
        return self._endpoint

    def connect(self, incarnation: str, endpoints: Sequence[Endpoint]) -> "Future[None]":
        described = [each.to_proto() for each in endpoints]
        source = kv_pb2.RankSource(incarnation=incarnation, endpoints=described)
        return self._tell(kv_pb2.RankCommand(connect=source))

    def read(self, incarnation: str, piece: int, copies: Copies, into: Region | None = None) -> "Future[None]":
        assert into is None, "another rank knows its piece alone"
        remote, local, lengths = (of.tobytes() for of in (copies.remote, copies.local, copies.lengths))
        read = kv_pb2.RankRead(incarnation=incarnation, piece=piece, remote=remote, local=local, lengths=lengths)
        return self._tell(kv_pb2.RankCommand(read=read))

    def measure(self, incarnation: str, piece: int) -> "Future[float]":
        """See PartsReceiver (rank_server.py). Call where `can_receive`."""
        link = kv_pb2.RankLink(incarnation=incarnation, piece=piece)
        return self._ask(kv_pb2.RankCommand(measure=link), lambda answer: answer.bytes_s)

    def receive(self, parts: kv_pb2.RankParts) -> "Future[None]":
        """See PartsReceiver (rank_server.py). Call where `can_receive`."""
        return self._tell(kv_pb2.RankCommand(receive=parts))

    def forget(self, incarnation: str) -> "Future[None]":
        return self._tell(kv_pb2.RankCommand(forget=incarnation))

    def serve(self, is_serving: bool) -> None:
        self._tell(kv_pb2.RankCommand(serve=is_serving))

    def stop(self) -> None:
        self._tell(kv_pb2.RankCommand(stop=True))
        self._receiver.join(STOP_TIMEOUT_S)
        if self._receiver.is_alive():  # the rank does not answer
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            self._receiver.join()
        self._sender.shutdown()
        self._connection.close()

    def _tell(self, command: kv_pb2.RankCommand) -> "Future[None]":
        return self._ask(command, lambda _: None)

    def _ask(self, command: kv_pb2.RankCommand, result: Callable[[kv_pb2.RankAnswer], Answer]) -> "Future[Answer]":
        """Send a command, after those before it. The future has the answer's result; it raises TransportError, and
        cannot be cancelled."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            has_ended = self._has_ended
            if not has_ended:
                self._num_commands += 1
                command.number = self._num_commands
                self._waiting[command.number] = future, result
                self._sender.submit(self._send, command)
        if has_ended:
            future.set_exception(self._gone())
        return future

    def _send(self, command: kv_pb2.RankCommand) -> None:
        with suppress(OSError):  # the receiver hears of the end, too
            self._connection.send_bytes(command.SerializeToString())

    def _receive(self) -> None:
        """Answer futures until the rank's end closes, or it has stopped its agent."""
        try:
            while not (answer := kv_pb2.RankAnswer.FromString(self._connection.recv_bytes())).has_stopped:
                self._answered(answer)
        except (EOFError, OSError) as e:
            log.debug("rank %d has closed the connection of its agent: %r", self._rank, e)
        with self._lock:
            self._has_ended = True
            waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            future.set_exception(self._gone())

    def _answered(self, answer: kv_pb2.RankAnswer) -> None:
        with self._lock:
            future, result = self._waiting.pop(answer.number)
        if answer.error:
            kind = ERRORS.get(answer.kind, TransportError)
            made = kind if issubclass(kind, TransportError) else TransportError
            future.set_exception(made(f"rank {self._rank}: {answer.error}"))
            return
        if answer.HasField("endpoint"):
            self._endpoint, self.can_receive = Endpoint.from_proto(answer.endpoint), answer.can_receive
        future.set_result(result(answer))

    def _gone(self) -> TransportError:
        return TransportError(f"the NIXL agent of rank {self._rank} has ended")
