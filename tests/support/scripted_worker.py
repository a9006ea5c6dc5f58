"""A worker that computes nothing: it serves Worker.Link on a real socket, and a test decides its messages."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.workers.common.channel import bind, each_of, make_server
from diptych.workers.common.errors import DiptychError
from diptych.workers.common.request import FinishReason
from diptych.workers.common.role import Role
from diptych.workers.common.wire import FINISH_TO_PROTO, PROTOCOL_VERSION, ROLE_TO_PROTO
from diptych.workers.core.runner import ModelInfo
from diptych.workers.kv.layout import KVLayout

MODEL = ModelInfo("fake", "FakeForCausalLM", 1000, 512, (0,), "float32")
LAYOUT = KVLayout("float32", 4, num_layers=1, num_kv_heads=1, head_dim=1, model_id="fake")
NUM_BLOCKS = 256
_numbers = itertools.count()


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """`received` holds what routers sent, in order, less pings and answers to a drain. What is sent goes to the newest
    link."""

    def __init__(self, role: str = "mixed", token: str | None = None) -> None:
        self.role = role
        self.incarnation = f"{role}-{next(_numbers):04}"  # ties go by name: the order of text is that of numbers
        self.received: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self.ended: asyncio.Queue[int] = asyncio.Queue()  # numbers of links that broke
        self.num_links = 0
        self._open: set[int] = set()  # numbers of links
        self.drains_seen = asyncio.Queue[bool]()  # whether the router reports that it is done
        self.answers_pings = True
        self.records: dict[bytes, worker_pb2.RecalledAnswer] | None = None  # None: it knows no Recall
        self.recalls: list[list[bytes]] = []  # names that were asked for, by message
        self.hello: worker_pb2.Hello | None = worker_pb2.Hello(
            incarnation=self.incarnation,
            role=ROLE_TO_PROTO[Role(role)],
            model=MODEL.to_proto("0"),
            layout=LAYOUT.to_proto(),
            num_blocks=NUM_BLOCKS,
            protocol_version=PROTOCOL_VERSION,
        )
        self._token = token
        self._outbox: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()

    async def start(self, port: int = 0) -> WorkerInfo:
        self._server = make_server(self._token)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = bind(self._server, "127.0.0.1", port)
        await self._server.start()
        return self.info

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.incarnation, f"127.0.0.1:{self.port}", self.role, self.role)

    async def kill(self) -> None:
        """Close every stream at once, without a goodbye."""
        await self._server.stop(None)

    async def Link(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerMessage]:
        self.num_links += 1
        number = self.num_links
        self._open.add(number)
        self._outbox = outbox = asyncio.Queue[worker_pb2.WorkerMessage | None]()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            if self.hello is not None:
                yield worker_pb2.WorkerMessage(hello=self.hello)
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self._open.remove(number)
            self.ended.put_nowait(number)

    async def Recall(self, request: worker_pb2.RecallRequest, context: Any) -> worker_pb2.RecalledAnswers:
        if self.records is None:
            return await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an earlier version")
        self.recalls.append(list(request.names))
        return worker_pb2.RecalledAnswers(
            answers=[self.records.get(name, worker_pb2.RecalledAnswer()) for name in request.names]
        )

    async def _read(self, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        async for message in (each async for received in messages for each in each_of(received)):
            match message.WhichOneof("message"):
                case "ping":
                    if self.answers_pings:
                        self.send(pong=worker_pb2.Pong(number=message.ping.number))
                case "drain_seen":
                    self.drains_seen.put_nowait(message.drain_seen.is_done)
                case _:
                    self.received.put_nowait(message)

    def send(self, **message: Any) -> None:
        self._outbox.put_nowait(worker_pb2.WorkerMessage(**message))

    async def written(self) -> None:
        """Yield until what was sent is on its way, or its link is gone."""
        while self.num_links in self._open and not self._outbox.empty():
            await asyncio.sleep(0)

    def end_stream(self) -> None:
        self._outbox.put_nowait(None)

    def tokens(
        self, handle: int, tokens: Iterable[int], start: int = 0, finish: FinishReason | None = None, **columns: Any
    ) -> None:
        """Make a step: `tokens` of one request from position `start` on, the last one finishing."""
        ids = list(tokens)
        reasons = [FINISH_TO_PROTO[None]] * (len(ids) - 1) + [FINISH_TO_PROTO[finish]]
        step = worker_pb2.StepEvents(
            handles=[handle] * len(ids),
            token_ids=ids,
            positions=range(start, start + len(ids)),
            finish_reasons=reasons,
            **columns,
        )
        self.send(step=step)

    def fail(self, handle: int, error: DiptychError, *, handoff: bool = False) -> None:
        failed = worker_pb2.RequestFailed(
            handle=handle,
            error=type(error).__name__,
            message=error.message,
            retryable=error.retryable,
            handoff=handoff,
        )
        self.send(failed=failed)

    def load(self, num_free: int = NUM_BLOCKS, **fields: Any) -> None:
        load = worker_pb2.LoadReport(
            num_blocks=NUM_BLOCKS, num_free_blocks=num_free, role=ROLE_TO_PROTO[Role(self.role)], **fields
        )
        self.send(load=load)

    async def submitted(self) -> worker_pb2.Submit:
        message = await self.received.get()
        assert message.WhichOneof("message") == "submit", message
        return message.submit

    async def aborted(self) -> int:
        message = await self.received.get()
        assert message.WhichOneof("message") == "abort", message
        return message.abort.handle


@asynccontextmanager
async def scripted(*roles: str, token: str | None = None) -> AsyncIterator[list[ScriptedWorker]]:
    """Started workers, one a role."""
    workers = [ScriptedWorker(role, token) for role in roles]
    for worker in workers:
        await worker.start()
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.kill()
