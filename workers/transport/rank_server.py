"""Serves rank 0's hand-offs in the process of another rank, as rank_agent.py asks: a NIXL agent reads into this rank's
piece of the KV pool; what must be converted goes to a PartsReceiver, which reads by the same agent.
"""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from ...proto import kv_pb2
from ..common.errors import ConfigError, DiptychError, TransportError
from ..kv.device_kv import CudaDriver
from ..kv.layout import Copies, Region
from .nixl_agent import Endpoint, NixlAgent
from .nixl_thread import MAX_PEERS, NixlThread

log = logging.getLogger("diptych.nixl")


class PartsReceiver(Protocol):
    """Reads and converts parts of segments in another rank's process; handoff/rank_receiver.py is one."""

    @property
    def regions(self) -> Sequence[Region]:
        """Regions that it reads into, for the rank's agent to register."""
        ...

    def measure(self, agent: NixlAgent, endpoints: Sequence[Endpoint], link: kv_pb2.RankLink) -> "Future[float]":
        """Measure how fast `agent` reads a piece of a source's pool, in bytes/s. Returns at once. The future raises
        TransportError."""
        ...

    def receive(self, agent: NixlAgent, endpoints: Sequence[Endpoint], parts: kv_pb2.RankParts) -> "Future[None]":
        """Read parts by `agent` from the source that it knows by these endpoints, and write them into the pool. Returns
        at once. The future is done when nothing can be written any more; it raises TransportError."""
        ...

    def close(self) -> None:
        """End, once no part is under way."""
        ...


def serve_rank(
    link: socket.socket,
    piece: Region,
    driver: CudaDriver | None,
    make_receiver: Callable[[], PartsReceiver],
) -> None:
    """Serve the commands of rank 0's RankAgent until its end of `link` closes. piece: ours of the pool. driver: of the
    device that it is on. make_receiver: called when an agent is made; may raise ConfigError or TransportError, and then
    rank 0 receives all that must be converted."""
    with Connection(link.detach()) as connection:
        _RankServer(connection, piece, driver, make_receiver).run()


class _RankServer:
    def __init__(
        self,
        connection: "Connection[bytes, bytes]",
        piece: Region,
        driver: CudaDriver | None,
        make_receiver: Callable[[], PartsReceiver],
    ) -> None:
        self._connection, self._piece, self._driver = connection, piece, driver
        self._make_receiver = make_receiver
        self._lock = threading.Lock()  # of whoever answers: NIXL's thread, the receiver's, and the one that serves
        self._agent: NixlThread | None = None
        self._receiver: PartsReceiver | None = None
        self._endpoints: dict[str, Sequence[Endpoint]] = {}  # of the last sources, by incarnation

    def run(self) -> None:
        try:
            while True:
                self._carry_out(kv_pb2.RankCommand.FromString(self._connection.recv_bytes()))
        except (EOFError, OSError) as e:
            log.debug("rank 0 has closed the connection of this rank's agent: %r", e)
        finally:
            self._stop()

    def _stop(self) -> None:
        if self._agent is not None:
            self._agent.stop()  # what the receiver reads fails
        if self._receiver is not None:
            self._receiver.close()
        self._agent = self._receiver = None
        self._endpoints.clear()

    def _carry_out(self, command: kv_pb2.RankCommand) -> None:
        done = partial(self._done, command.number)
        kind, agent = command.WhichOneof("command"), self._agent
        if kind == "open":
            self._open(command)
            return
        if kind == "stop":
            self._stop()
            self._answer(kv_pb2.RankAnswer(number=command.number, has_stopped=True))
            return
        assert agent is not None, "no command comes before the agent is made"
        match kind:
            case "connect":
                self._connect(agent, command.connect).add_done_callback(done)
            case "read":
                read = command.read
                runs = (np.frombuffer(of, np.int64) for of in (read.remote, read.local, read.lengths))
                agent.read(read.incarnation, read.piece, Copies(*runs)).add_done_callback(done)
            case "receive" | "measure":
                self._receive(agent, command).add_done_callback(done)
            case "forget":
                self._endpoints.pop(command.forget, None)
                agent.forget(command.forget).add_done_callback(done)
            case "serve":
                agent.serve(command.serve)
                self._answer(kv_pb2.RankAnswer(number=command.number))
            case _:
                raise AssertionError(f"rank 0 asks for {kind}")

    def _connect(self, agent: NixlThread, source: kv_pb2.RankSource) -> "Future[None]":
        endpoints = [Endpoint.from_proto(each) for each in source.endpoints]
        self._endpoints.pop(source.incarnation, None)
        self._endpoints[source.incarnation] = endpoints
        if len(self._endpoints) > MAX_PEERS:
            del self._endpoints[next(iter(self._endpoints))]
        return agent.connect(source.incarnation, endpoints)

    def _receive(self, agent: NixlThread, command: kv_pb2.RankCommand) -> "Future[Any]":
        asked = command.measure if command.HasField("measure") else command.receive
        receiver, endpoints = self._receiver, self._endpoints.get(asked.incarnation)
        assert receiver is not None, "rank 0 was told that there is one"
        if endpoints is None:
            gone: Future[None] = Future()
            gone.set_exception(TransportError("the connection to the source is gone"))
            return gone
        if isinstance(asked, kv_pb2.RankLink):
            return receiver.measure(agent, endpoints, asked)
        return receiver.receive(agent, endpoints, asked)

    def _open(self, command: kv_pb2.RankCommand) -> None:
        answer = kv_pb2.RankAnswer(number=command.number)
        receiver = self._receiver = self._made_receiver()
        regions = [self._piece, *(() if receiver is None else receiver.regions)]
        try:
            self._agent = NixlThread(regions, self._driver, has_rdma=command.open.has_rdma)
        except (ImportError, TransportError) as e:
            answer.error = str(e)
            self._stop()
        else:
            answer.endpoint.CopyFrom(self._agent.endpoint.to_proto())
            answer.can_receive = receiver is not None
        self._answer(answer)

    def _made_receiver(self) -> PartsReceiver | None:
        try:
            return self._make_receiver()
        except (ConfigError, TransportError) as e:
            log.info("rank 0 receives for this rank what must be converted: %s", e)
            return None

    def _done(self, number: int, future: "Future[None] | Future[float]") -> None:
        error = future.exception()
        if error is None:
            self._answer(kv_pb2.RankAnswer(number=number, bytes_s=future.result() or 0.0))
            return
        if not isinstance(error, DiptychError):
            log.error("a rank failed to receive KV by our own fault", exc_info=error)
        self._answer(kv_pb2.RankAnswer(number=number, error=str(error) or repr(error), kind=type(error).__name__))

    def _answer(self, answer: kv_pb2.RankAnswer) -> None:
        with self._lock, suppress(OSError):  # where rank 0 is gone, `run` hears of it
            self._connection.send_bytes(answer.SerializeToString())
