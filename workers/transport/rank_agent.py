"""NIXL agents of a worker's other ranks: each reads into its own rank's piece of the KV pool, as rank 0 asks it to.

    rank 0    RankAgent ──commands──> rank k    serve_rank: a NixlThread, of the rank's piece
                        <──answers──

They speak over a socket that only these two processes have. Its end is the end of either: RankAgent then fails what is
under way, and `serve_rank` ends its agent.
"""

import logging
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from ...proto import kv_pb2
from ..common.errors import DiptychError, TransportError
from ..kv.device_kv import CudaDriver
from ..kv.layout import Copies, Region
from .nixl_agent import Endpoint
from .nixl_thread import NixlThread

OPEN_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0

log = logging.getLogger("diptych.nixl")


class RankAgent:
    """A NixlAgent of another rank's process. Raises TransportError where that can make none. Blocks for a second or
    two, in which NIXL is loaded there."""

    def __init__(self, rank: int, link: socket.socket, *, has_rdma: bool) -> None:
        """`link`: to the rank's `serve_rank`."""
        self._rank, self._link = rank, link
        self._connection = Connection(link.dup().detach())
        self._lock = threading.Lock()  # guards the three below
        self._waiting: dict[int, Future[None]] = {}  # by the number of the command
        self._num_commands = 0
        self._has_ended = False
        self._endpoint: Endpoint | None = None
        self._sender = ThreadPoolExecutor(1, f"diptych-rank-{rank}-commands")
        self._receiver = threading.Thread(target=self._receive, name=f"diptych-rank-{rank}-answers", daemon=True)
        self._receiver.start()
        try:
            self._ask(kv_pb2.RankCommand(open=kv_pb2.AgentSettings(has_rdma=has_rdma))).result(OPEN_TIMEOUT_S)
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
        return self._ask(kv_pb2.RankCommand(connect=source))

    def read(self, incarnation: str, piece: int, copies: Copies, into: Region | None = None) -> "Future[None]":
        assert into is None, "another rank knows its piece alone"
        remote, local, lengths = (of.tobytes() for of in (copies.remote, copies.local, copies.lengths))
        read = kv_pb2.RankRead(incarnation=incarnation, piece=piece, remote=remote, local=local, lengths=lengths)
        return self._ask(kv_pb2.RankCommand(read=read))

    def forget(self, incarnation: str) -> "Future[None]":
        return self._ask(kv_pb2.RankCommand(forget=incarnation))

    def serve(self, is_serving: bool) -> None:
        self._ask(kv_pb2.RankCommand(serve=is_serving))

    def stop(self) -> None:
        self._ask(kv_pb2.RankCommand(stop=True))
        self._receiver.join(STOP_TIMEOUT_S)
        if self._receiver.is_alive():  # the rank does not answer
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            self._receiver.join()
        self._sender.shutdown()
        self._connection.close()

    def _ask(self, command: kv_pb2.RankCommand) -> "Future[None]":
        """Send a command, after those before it. The future raises TransportError, and cannot be cancelled."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            has_ended = self._has_ended
            if not has_ended:
                self._num_commands += 1
                command.number = self._num_commands
                self._waiting[command.number] = future
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
        for future in waiting.values():
            future.set_exception(self._gone())

    def _answered(self, answer: kv_pb2.RankAnswer) -> None:
        with self._lock:
            future = self._waiting.pop(answer.number)
        if answer.error:
            future.set_exception(TransportError(f"rank {self._rank}: {answer.error}"))
            return
        if answer.HasField("endpoint"):
            self._endpoint = Endpoint.from_proto(answer.endpoint)
        future.set_result(None)

    def _gone(self) -> TransportError:
        return TransportError(f"the NIXL agent of rank {self._rank} has ended")


def serve_rank(link: socket.socket, piece: Region, driver: CudaDriver | None = None) -> None:
    """Serve the commands of rank 0's RankAgent until its end of `link` closes. piece: ours of the pool. driver: of the
    device that it is on."""
    with Connection(link.detach()) as connection:
        _RankServer(connection, piece, driver).run()


class _RankServer:
    def __init__(self, connection: "Connection[bytes, bytes]", piece: Region, driver: CudaDriver | None) -> None:
        self._connection, self._piece, self._driver = connection, piece, driver
        self._lock = threading.Lock()  # of whoever answers: NIXL's thread, and the one that serves
        self._agent: NixlThread | None = None

    def run(self) -> None:
        try:
            while True:
                self._carry_out(kv_pb2.RankCommand.FromString(self._connection.recv_bytes()))
        except (EOFError, OSError) as e:
            log.debug("rank 0 has closed the connection of this rank's agent: %r", e)
        finally:
            if self._agent is not None:
                self._agent.stop()

    def _carry_out(self, command: kv_pb2.RankCommand) -> None:
        done = partial(self._done, command.number)
        kind, agent = command.WhichOneof("command"), self._agent
        if kind == "open":
            self._open(command)
            return
        if kind == "stop":
            if agent is not None:
                agent.stop()
                self._agent = None
            self._answer(kv_pb2.RankAnswer(number=command.number, has_stopped=True))
            return
        assert agent is not None, "no command comes before the agent is made"
        match kind:
            case "connect":
                endpoints = [Endpoint.from_proto(each) for each in command.connect.endpoints]
                agent.connect(command.connect.incarnation, endpoints).add_done_callback(done)
            case "read":
                read = command.read
                runs = (np.frombuffer(of, np.int64) for of in (read.remote, read.local, read.lengths))
                agent.read(read.incarnation, read.piece, Copies(*runs)).add_done_callback(done)
            case "forget":
                agent.forget(command.forget).add_done_callback(done)
            case "serve":
                agent.serve(command.serve)
                self._answer(kv_pb2.RankAnswer(number=command.number))
            case _:
                raise AssertionError(f"rank 0 asks for {kind}")

    def _open(self, command: kv_pb2.RankCommand) -> None:
        answer = kv_pb2.RankAnswer(number=command.number)
        try:
            self._agent = NixlThread([self._piece], self._driver, has_rdma=command.open.has_rdma)
            answer.endpoint.CopyFrom(self._agent.endpoint.to_proto())
        except (ImportError, TransportError) as e:
            answer.error = str(e)
        self._answer(answer)

    def _done(self, number: int, future: "Future[None]") -> None:
        error = future.exception()
        assert error is None or isinstance(error, DiptychError)
        self._answer(kv_pb2.RankAnswer(number=number, error="" if error is None else str(error)))

    def _answer(self, answer: kv_pb2.RankAnswer) -> None:
        with self._lock, suppress(OSError):  # where rank 0 is gone, `run` hears of it
            self._connection.send_bytes(answer.SerializeToString())
