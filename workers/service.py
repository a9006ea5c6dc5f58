"""What a worker serves: an engine on its thread behind a gRPC server on an event loop.

    router --Link--> submit, abort, set role, drain      engine thread: schedule -> run -> postprocess
    router <--Link-- one StepEvents a step, loads, blocks     └─ StepOutput ─> event loop ─> links, hand-offs

A request lives as long as the Link that submitted it: when the stream breaks, what came over it is aborted, for its
router resumes it elsewhere. Knows no torch and no Ray: worker.py makes the Runner and the process.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from .. import __version__
from ..proto import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from .channel import bind, make_server
from .engine import Engine
from .engine_events import HandoffEnded, HandoffEvent, HandoffSealed, SegmentReady, StepOutput, TokenEvent
from .engine_thread import EngineThread
from .errors import DiptychError, InternalError, WorkerDraining
from .handoff_sink import HandoffSink
from .handoff_source import HandoffSource
from .runner import Runner
from .scheduler import Role
from .transport.select import make_transports
from .wire import FINISH_TO_PROTO, PROTOCOL_VERSION, ROLE_FROM_PROTO, ROLE_TO_PROTO, request_from_submit
from .worker_config import WorkerConfig

LOAD_REPEAT_S = 0.5

log = logging.getLogger("diptych.worker")

if TYPE_CHECKING:  # the class is generic in its stubs only
    Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    address: str  # host:port of the gRPC server
    incarnation: str
    pid: int


@dataclass(slots=True, eq=False)
class _Link:
    """One router's stream. `handles` are the requests that still yield tokens here."""

    number: int
    outbox: asyncio.Queue[worker_pb2.WorkerMessage | None] = field(
        default_factory=asyncio.Queue[worker_pb2.WorkerMessage | None]
    )  # None ends the stream
    keys: set[str] = field(default_factory=set[str])

    def key(self, handle: int) -> str:
        return f"{self.number}/{handle}"


def handle_of(key: str) -> int:
    return int(key.partition("/")[2])


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """`start` and `stop` on one running event loop. `config.auth_token` guards every service but health."""

    def __init__(self, config: WorkerConfig, runner: Runner) -> None:
        config.validate()
        self.incarnation = str(uuid.uuid4())
        self._config = config
        self._runner = runner
        engine = Engine(runner, config.scheduler(), prefix_cache=config.prefix_cache)
        engine.set_role(Role(config.role))
        self._engine = EngineThread(engine, self._on_step, self._on_broken)
        self._links: dict[int, _Link] = {}
        self._num_links = 0
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._offered: dict[str, tuple[_Link, str]] = {}  # hand-off id -> who submitted it
        self._load = worker_pb2.LoadReport(num_blocks=runner.memory.num_blocks, role=ROLE_TO_PROTO[Role(config.role)])
        self._handoff_bytes = 0
        self._is_draining = False
        self._server = make_server(config.auth_token)

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> WorkerAddress:
        """Listen and start the engine. Raises PortInUse or ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._broken.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._transports = make_transports(self._config.transports, [self._runner.memory.region], self._config.host)
        memory = self._runner.memory
        self._source = HandoffSource(
            self.incarnation, memory, self._transports, port=self, lease_s=self._config.lease_s
        )
        self._sink = HandoffSink(
            self.incarnation, memory, self._transports, port=self._engine, token=self._config.auth_token
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        kv_pb2_grpc.add_KVHandoffServicer_to_server(self._source, self._server)
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, self._server)
        names = [
            worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,
            kv_pb2.DESCRIPTOR.services_by_name["KVHandoff"].full_name,
        ]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        port = bind(self._server, self._config.host, self._config.port)
        self._engine.start()
        await self._server.start()
        for name in ("", *names):
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._ticker = asyncio.create_task(self._repeat_load())
        return WorkerAddress(f"{self._config.host}:{port}", self.incarnation, os.getpid())

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises InternalError when the engine fails by a fault of ours."""
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([stopping, self._broken], return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
        finally:
            stopping.cancel()

    async def stop(self, grace_s: float = 0.5) -> None:
        """End every stream and pull, then the engine. What was running is lost to its routers, which resume it."""
        self._ticker.cancel()
        await self._server.stop(grace_s)
        pulls = list(self._pulls.values())
        for task in pulls:
            task.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        await self._sink.close()
        await self._source.close()
        await asyncio.to_thread(self._engine.stop)
        for transport in self._transports.values():
            await transport.close()
        self._runner.close()

    # -- diptych.v1.Worker ------------------------------------------------------------------------------------------

    async def Link(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: "Context"
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        self._num_links += 1
        link = _Link(self._num_links)
        link.outbox.put_nowait(worker_pb2.WorkerMessage(hello=self._hello()))
        link.outbox.put_nowait(worker_pb2.WorkerMessage(load=self._load))
        self._links[link.number] = link
        # By way of the engine's thread, so that the snapshot takes its place among the steps' own block events.
        self._engine.post(
            lambda engine: self._loop.call_soon_threadsafe(self._send_snapshot, link, engine.all_block_names())
        )
        reader = asyncio.create_task(self._read(link, request_iterator))
        reader.add_done_callback(lambda _: link.outbox.put_nowait(None))
        try:
            while (message := await link.outbox.get()) is not None:
                yield message
            await reader  # raises what ended it, if that was an error
        finally:
            reader.cancel()
            del self._links[link.number]
            for key in list(link.keys):
                self._abort(link, key)

    async def GetState(self, request: worker_pb2.GetStateRequest, context: "Context") -> worker_pb2.WorkerState:
        try:
            state = await self._engine.call(lambda engine: engine.check_integrity())
        except AssertionError as e:
            return await context.abort(grpc.StatusCode.INTERNAL, f"an invariant is broken: {e}")
        state.incarnation = self.incarnation
        self._complete(state.load)
        return state

    # -- from the router --------------------------------------------------------------------------------------------

    async def _read(self, link: _Link, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    self._submit(link, message.submit)
                case "abort":
                    self._abort(link, link.key(message.abort.handle))
                case "set_role":
                    role = ROLE_FROM_PROTO.get(message.set_role.role)
                    if role is not None:
                        self._engine.post(lambda engine, role=role: engine.set_role(role))
                case "drain":
                    self._is_draining = True
                case "ping":
                    pong = worker_pb2.Pong(number=message.ping.number)
                    link.outbox.put_nowait(worker_pb2.WorkerMessage(pong=pong))
                case _:
                    log.warning("a router sent a message of a kind that this version does not know")

    def _submit(self, link: _Link, submit: worker_pb2.Submit) -> None:
        key = link.key(submit.handle)
        if self._is_draining:
            self._send_failure(link, submit.handle, WorkerDraining("the worker takes nothing new: it is draining"))
            return
        request = request_from_submit(submit)
        outputs = list(submit.output_token_ids)
        handoff_id = submit.offer.handoff_id if submit.HasField("offer") else None
        is_sink = submit.HasField("source")
        num_tokens = len(request.prompt_token_ids) + len(outputs)
        if handoff_id is not None and num_tokens:  # the engine refuses an empty prompt, and says so
            try:
                self._source.offer(handoff_id, num_tokens)
            except DiptychError as e:
                self._send_failure(link, submit.handle, e)
                return
            self._offered[handoff_id] = (link, key)
        link.keys.add(key)
        self._engine.post(lambda engine: engine.submit(key, request, outputs, handoff_id=handoff_id, importing=is_sink))
        if is_sink:
            self._pulls[key] = asyncio.create_task(self._pull(link, key, submit.source, request.timeout_s))

    def _abort(self, link: _Link, key: str) -> None:
        link.keys.discard(key)
        self._engine.post(lambda engine: engine.abort(key))
        self._cancel_pull(key)

    # -- the hand-off -----------------------------------------------------------------------------------------------

    async def _pull(self, link: _Link, key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> None:
        try:
            result = await self._sink.pull(key, source, timeout_s)
            self._handoff_bytes += result.num_bytes
        except DiptychError as e:
            await self._engine.fail(key, quarantine=False)
            if key in link.keys:
                link.keys.discard(key)
                self._send_failure(link, handle_of(key), e, handoff=True)
        finally:
            self._pulls.pop(key, None)

    def _cancel_pull(self, key: str) -> None:
        task = self._pulls.get(key)
        if task is not None:
            task.cancel()

    def end_lease(self, handoff_id: str) -> None:
        """SourcePort: the blocks leased for this hand-off are free."""
        link_and_key = self._offered.pop(handoff_id, None)
        if link_and_key is not None:
            link, key = link_and_key
            link.keys.discard(key)
        self._engine.end_lease(handoff_id)

    def caught_up(self, handoff_id: str) -> None:
        """SourcePort: a running sequence that is handed off may stop."""
        self._engine.post(lambda engine: engine.caught_up(handoff_id))

    def _carry(self, event: HandoffEvent) -> None:
        match event:
            case SegmentReady():
                self._source.segment(
                    event.handoff_id,
                    event.first_block,
                    event.block_ids,
                    event.generations,
                    first_layer=0,
                    num_layers=self._runner.layout.num_layers,
                )
            case HandoffSealed():
                self._source.seal(event.handoff_id, event.num_computed, event.output_token_ids)
            case HandoffEnded():
                self._source.abort(event.handoff_id, event.error)

    # -- from the engine --------------------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._publish, output)

    def _on_broken(self, error: InternalError) -> None:
        """On the engine's thread."""
        self._loop.call_soon_threadsafe(self._broken.set_exception, error)

    def _publish(self, output: StepOutput) -> None:
        self._send_tokens(output)
        for event in output.handoffs:
            self._carry(event)
        for failure in output.failures:
            link = self._link_of(failure.key)
            self._cancel_pull(failure.key)
            if link is not None:
                link.keys.discard(failure.key)
                self._send_failure(link, handle_of(failure.key), failure.error)
        if output.stored or output.removed:
            blocks = worker_pb2.BlockEvents(stored=output.stored, removed=output.removed)
            self._broadcast(worker_pb2.WorkerMessage(blocks=blocks))
        if output.load is not None:
            self._load = self._complete(output.load)
            self._broadcast(worker_pb2.WorkerMessage(load=self._load))

    def _send_tokens(self, output: StepOutput) -> None:
        by_link: dict[int, worker_pb2.StepEvents] = {}
        for token in output.tokens:
            link = self._link_of(token.key)
            if link is None:
                continue
            events = by_link.get(link.number)
            if events is None:
                events = by_link[link.number] = worker_pb2.StepEvents(step=output.step)
            _append(events, token)
            if token.finish is not None:
                link.keys.discard(token.key)
        for number, events in by_link.items():
            self._links[number].outbox.put_nowait(worker_pb2.WorkerMessage(step=events))

    def _link_of(self, key: str) -> _Link | None:
        return self._links.get(int(key.partition("/")[0]))

    def _send_failure(self, link: _Link, handle: int, error: DiptychError, *, handoff: bool = False) -> None:
        failed = worker_pb2.RequestFailed(
            handle=handle,
            error=type(error).__name__,
            message=error.message,
            retryable=error.retryable,
            handoff=handoff,
        )
        link.outbox.put_nowait(worker_pb2.WorkerMessage(failed=failed))

    def _send_snapshot(self, link: _Link, names: list[bytes]) -> None:
        link.outbox.put_nowait(worker_pb2.WorkerMessage(blocks=worker_pb2.BlockEvents(stored=names, cleared=True)))

    def _broadcast(self, message: worker_pb2.WorkerMessage) -> None:
        for link in self._links.values():
            link.outbox.put_nowait(message)

    async def _repeat_load(self) -> None:
        """A sign of life while a long step runs: routers count a silent worker as lost."""
        while True:
            await asyncio.sleep(LOAD_REPEAT_S)
            self._broadcast(worker_pb2.WorkerMessage(load=self._complete(self._load)))

    def _complete(self, load: worker_pb2.LoadReport) -> worker_pb2.LoadReport:
        """Add what the engine does not know."""
        load.draining = self._is_draining
        load.handoff_bytes = self._handoff_bytes
        del load.links[:]  # it may be a report that is sent again
        load.links.extend(self._sink.links())
        return load

    def _hello(self) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            incarnation=self.incarnation,
            role=self._load.role,  # the one that it was given last
            model=self._runner.info.to_proto(__version__),
            layout=self._runner.layout.to_proto(),
            num_blocks=self._runner.memory.num_blocks,
            transports=list(self._transports),
            protocol_version=PROTOCOL_VERSION,
        )


def _append(events: worker_pb2.StepEvents, token: TokenEvent) -> None:
    entry = len(events.handles)
    events.handles.append(handle_of(token.key))
    events.token_ids.append(token.token_id)
    events.positions.append(token.position)
    events.finish_reasons.append(FINISH_TO_PROTO[token.finish])
    if token.logprob is not None:
        events.logprobs.append(
            worker_pb2.TokenLogprobs(
                entry=entry,
                logprob=token.logprob,
                top_token_ids=[i for i, _ in token.top],
                top_logprobs=[p for _, p in token.top],
            )
        )
    if token.num_cached is not None:
        events.cached.append(worker_pb2.CachedTokens(entry=entry, num_tokens=token.num_cached))
    if token.timings is not None:
        events.timings.append(token.timings.to_proto(entry))
