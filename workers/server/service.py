"""The gRPC service of a worker: an engine on its thread behind a server on an event loop.

    router --Link--> submit, abort, offer, budget, drain    engine thread: schedule -> run -> postprocess
    router <--Link-- one StepEvents a step, loads, blocks         └─ StepOutput ─> event loop ─> links, hand-offs

A request lives as long as the Link that submitted it: when the stream breaks, what came over it is aborted, for its
router resumes it elsewhere. Knows no torch and no Ray: worker.py makes the Runner and the process.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ... import __version__
from ...proto import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from ..common.channel import PeerAccess, bind, each_of, make_server, server_credentials
from ..common.cores import part_of
from ..common.errors import DiptychError, HandoffError, InvalidGrammar, InvalidRequest, Unavailable, WorkerDraining
from ..common.names import check_lengths
from ..common.request import Request
from ..common.role import Role
from ..common.wire import PROTOCOL_VERSION, request_from_submit
from ..config.worker_config import WorkerConfig
from ..core.runner import Runner
from ..engine.engine import Engine
from ..engine.events import StepOutput
from ..engine.step_log import open_step_log
from ..engine.thread import EngineThread
from ..grammar.compiler import CompiledGrammar, GrammarCompiler
from ..handoff.segment_receiver import PullSettings
from ..handoff.sink import HandoffSink
from ..handoff.source import HandoffSource
from ..kv.staging import Staging
from ..speculation.methods import make_speculator
from ..transport.select import make_transports
from .answer_records import AnswerRecords
from .drain import DrainState
from .grammars import Grammars
from .pulls import Pulls
from .router_links import RouterLink, RouterLinks
from .spans import open_spans
from .step_events import send_tokens

LOAD_REPEAT_S = 0.5

log = logging.getLogger("diptych.worker")

if TYPE_CHECKING:  # the class is generic in its stubs only
    Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    address: str  # host:port of the gRPC server
    incarnation: str
    pid: int


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """`start` and `stop` on one running event loop. `config.auth_token` guards every service but health,
    `config.tls` all of them."""

    def __init__(self, config: WorkerConfig, runner: Runner) -> None:
        self.incarnation = str(uuid.uuid4())
        self._config = config
        self._runner = runner
        of = config.speculation
        method, limits = of.speculation, (of.max_draft_tokens, of.min_draft_acceptance)
        drafter = None if method == "none" else make_speculator(method, *limits, runner.proposer)
        engine = Engine(
            runner,
            config.device_scheduler,
            prefix_cache=config.cache.prefix_cache,
            layer_groups=config.handoff.layer_groups,
            drafter=drafter,
        )
        engine.set_prefill_budget(config.device_scheduler.budget_of(Role(config.role)))
        self._step_log = engine.steps.log = open_step_log(config, runner, self.incarnation)
        cores = None if config.model.look_ahead else part_of(config.cores, 0, config.parallel.ranks_per_machine)
        self._engine = EngineThread(engine, self._on_step, self.end_with, cores)
        info, folder = runner.info, Path(config.model.model)
        self._grammars = Grammars(GrammarCompiler.of_folder(folder, info.vocab_size, info.eos_token_ids))
        self._is_computing = False  # as transports were told
        self._links, self._records = RouterLinks(), AnswerRecords()
        self._load = engine.check_integrity().load  # a stream may be opened before the engine reports
        self._drain = DrainState(self._links)
        self._server = make_server(config.auth_token)
        self._spans = open_spans(config, self.incarnation)

    async def start(self) -> WorkerAddress:
        """Listen and start the engine. Raises PortInUse or ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._broken.add_done_callback(lambda f: f.cancelled() or f.exception())
        memory = self._runner.memory
        staging = Staging() if memory.device is None else memory.device.staging
        handoff, regions = self._config.handoff, [memory.region, *staging.regions]
        self._transports = make_transports(
            handoff.transports, regions, memory.device, memory.rank_links, has_rdma=handoff.trusted_rdma_fabric
        )
        self._source = HandoffSource(
            self.incarnation, memory, self._transports, self._engine, self._links, lease_s=handoff.lease_s
        )
        sink = HandoffSink(
            self.incarnation,
            memory,
            self._transports,
            port=self._engine,
            access=PeerAccess(self._config.auth_token, self._config.tls),
            settings=PullSettings(handoff.wire_dtype or "", handoff.verify_kv),
            staging=staging,
        )
        self._pulls = Pulls(self._engine, self._links, sink)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        kv_pb2_grpc.add_KVHandoffServicer_to_server(self._source, self._server)
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, self._server)
        names = [
            worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,
            kv_pb2.DESCRIPTOR.services_by_name["KVHandoff"].full_name,
        ]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        tls = self._config.tls
        credentials = server_credentials(tls) if tls else None
        port = bind(self._server, self._config.host, self._config.port, credentials)
        self._engine.start()
        await self._server.start()
        for name in ("", *names):
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._ticker = asyncio.create_task(self._repeat_load())
        return WorkerAddress(f"{self._config.host}:{port}", self.incarnation, os.getpid())

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises InternalError when the engine fails by a fault of ours, and what
        `end_with` was given."""
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
        await self._grammars.close()
        await self._pulls.close()
        await self._source.close()
        await asyncio.to_thread(self._engine.stop)
        if self._step_log is not None:
            self._step_log.close()
        for transport in self._transports.values():
            await transport.close()
        self._runner.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    async def Link(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: "Context"
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        link = self._links.open()
        link.send(worker_pb2.WorkerMessage(load=self._load))
        # By way of the engine's thread, so that the snapshot takes its place among the steps' own block events.
        self._engine.post(lambda engine: self._on_loop(link.send_snapshot, engine.all_block_names()))
        reader = asyncio.create_task(self._read(link, request_iterator))
        reader.add_done_callback(lambda _: link.outbox.end())
        try:
            yield worker_pb2.WorkerMessage(hello=self._hello())
            while (message := await link.outbox.take()) is not None:
                yield message
            await reader  # raises what ended it, if that was an error
        finally:
            reader.cancel()
            self._links.close(link)
            for key in list(link.keys):
                self._abort(link, key)

    async def GetState(self, request: worker_pb2.GetStateRequest, context: "Context") -> worker_pb2.WorkerState:
        # Counted before the engine's books: what a stream sent before it was done is in them.
        num_unfinished = self._drain.num_unfinished_links
        try:
            state = await self._engine.call(lambda engine: engine.check_integrity())
        except AssertionError as e:
            return await context.abort(grpc.StatusCode.INTERNAL, f"an invariant is broken: {e}")
        except Unavailable as e:
            return await context.abort(grpc.StatusCode.UNAVAILABLE, e.message)
        state.incarnation = self.incarnation
        self._load = self._complete(state.load)
        self._drain.settle(state, num_unfinished)
        return state

    async def Recall(self, request: worker_pb2.RecallRequest, context: "Context") -> worker_pb2.RecalledAnswers:
        return self._records.recall_all(request.names)

    async def _read(self, link: RouterLink, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        async for received in messages:
            for message in each_of(received):
                self._on_message(link, message)

    def _on_message(self, link: RouterLink, message: worker_pb2.RouterMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submit(link, message.submit)
            case "abort":
                self._abort(link, link.key(message.abort.handle))
            case "set_prefill_budget":
                self._engine.post(lambda engine: engine.set_prefill_budget(message.set_prefill_budget.num_tokens))
            case "drain":
                self._drain.begin(link)
                self._links.broadcast(worker_pb2.WorkerMessage(load=self._complete(self._load)))
            case "drain_seen":
                self._drain.seen(link, is_done=message.drain_seen.is_done)
            case "offer":
                self._offer(link.key(message.offer.handle), message.offer.handoff_id)
            case "offer_prefix":
                self._offer_prefix(message.offer_prefix)
            case "ping":
                link.send(worker_pb2.WorkerMessage(pong=worker_pb2.Pong(number=message.ping.number)))
            case _:
                log.warning("a router sent a message of a kind that this version does not know")

    def _submit(self, link: RouterLink, submit: worker_pb2.Submit) -> None:
        key = link.key(submit.handle)
        is_sink, has_prefix = submit.HasField("source"), submit.HasField("prefix")
        if key in link.keys:
            log.warning("a router used a handle twice: the second request is ignored")
            return
        if self._drain.refuses(link):
            self._links.send_failure(key, WorkerDraining("the worker takes nothing new: it is draining"))
            return
        try:
            if key in link.compiling:
                raise InvalidRequest("the handle is in use by an aborted request: use a new one")
            if is_sink and has_prefix:
                raise InvalidRequest("a sequence that is handed over has no prefix to be pulled")
            request = request_from_submit(submit, self._runner.info.max_context_tokens, time.monotonic())
        except InvalidRequest as e:
            self._links.send_failure(key, e)
            return
        handoff_id = submit.offer.handoff_id if submit.HasField("offer") else None
        num_tokens = len(request.prompt_token_ids) + len(submit.output_token_ids)
        if handoff_id is not None and num_tokens:  # the engine refuses an empty prompt with an error
            try:
                self._source.offer(handoff_id, num_tokens, key)
            except DiptychError as e:
                self._links.send_failure(key, e)
                return
        link.keys[key] = None
        if request.record is not None and not request.samples_nothing:
            self._records.begin(key, request.record, submit.output_token_ids)
        if self._spans is not None:
            self._spans.begin(key, submit)
        if request.sampling.grammar is None or request.is_prefix:
            self._begin(key, request, submit, None)
            return

        def begin(grammar: CompiledGrammar | InvalidGrammar) -> None:
            link.compiling.discard(key)
            if isinstance(grammar, InvalidGrammar):
                self._refuse(link, key, handoff_id, grammar)
            else:
                self._begin(key, request, submit, grammar)
                if key not in link.keys:  # it was aborted meanwhile
                    self._abort(link, key)

        link.compiling.add(key)
        self._grammars.compiled(request.sampling.grammar, begin)

    def _begin(self, key: str, request: Request, submit: worker_pb2.Submit, grammar: CompiledGrammar | None) -> None:
        """Pass a request to the engine, and pull what it comes with."""
        outputs = list(submit.output_token_ids)
        handoff_id = submit.offer.handoff_id if submit.HasField("offer") else None
        is_sink, has_prefix = submit.HasField("source"), submit.HasField("prefix")
        self._engine.post(
            lambda engine: engine.submit(
                key, request, outputs, handoff_id=handoff_id, importing=is_sink, prefix=has_prefix, grammar=grammar
            )
        )
        if is_sink:
            self._pulls.pull(key, submit.source, request.timeout_s)
        elif has_prefix:
            self._pulls.pull_prefix(key, submit.prefix, request.timeout_s)

    def _refuse(self, link: RouterLink, key: str, handoff_id: str | None, error: InvalidGrammar) -> None:
        """Refuse a request before the engine knows it."""
        link.keys.pop(key, None)
        self._links.send_failure(key, error)
        if handoff_id is not None:
            self._engine.post(lambda engine: engine.outgoing.refuse(handoff_id, error))

    def _offer(self, key: str, handoff_id: str) -> None:
        """Hand a running sequence off."""
        try:
            check_lengths(HandoffError, handoff_id=handoff_id)
        except HandoffError as e:
            self._links.send_failure(key, e, handoff=True)
        else:
            self._engine.post(lambda engine: engine.outgoing.offer(key, handoff_id))

    def _offer_prefix(self, message: worker_pb2.OfferPrefix) -> None:
        handoff_id, token_ids, salt = message.handoff_id, message.token_ids, message.cache_salt
        try:
            check_lengths(HandoffError, handoff_id=handoff_id)
        except HandoffError as e:
            log.warning("a router's offer is refused: %s", e)
            return
        if not self._drain.is_over:
            self._engine.post(lambda engine: engine.outgoing.offer_prefix(handoff_id, token_ids, salt))

    def _abort(self, link: RouterLink, key: str) -> None:
        link.keys.pop(key, None)
        self._records.end(key)
        if self._spans is not None:
            self._spans.end(key, "aborted")
        self._engine.post(lambda engine: engine.abort(key))
        self._pulls.cancel(key)

    def _on_step(self, output: StepOutput) -> None:
        """Send a step's output; called on the engine's thread."""
        self._on_loop(self._publish, output)

    def end_with(self, error: DiptychError) -> None:
        """Have `run` raise `error`, because the worker cannot go on. On any thread; the first error counts."""
        self._on_loop(lambda: self._broken.done() or self._broken.set_exception(error))

    def _on_loop(self, callback: Callable[..., object], *args: object) -> None:
        """Call back on the event loop, from another thread. A loop that is closed already is not called."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _publish(self, output: StepOutput) -> None:
        if self._spans is not None:
            self._spans.on_step(output)
        self._links.send_prompt_logprobs(output.prompt_logprobs)
        if output.stored or output.removed:
            blocks = worker_pb2.BlockEvents(stored=output.stored, removed=output.removed)
            self._links.broadcast(worker_pb2.WorkerMessage(blocks=blocks))
        if self._records.live:
            self._records.note(output.tokens)
        send_tokens(self._links, output.step, output.tokens)
        for key, embedding in output.embeddings:
            self._links.send_embedding(key, embedding)
        for event in output.handoffs:
            self._source.on_event(event)
        for failure in output.failures:
            self._pulls.cancel(failure.key)
            self._links.forget(failure.key)
            self._links.send_failure(failure.key, failure.error)
        if output.ran != self._is_computing and (output.ran or output.load is not None):  # none while a step runs
            self._is_computing = output.ran
            for transport in self._transports.values():
                transport.share_memory(output.ran)
        if output.load is not None:
            self._load = self._complete(output.load)
            self._links.broadcast(worker_pb2.WorkerMessage(load=self._load))

    async def _repeat_load(self) -> None:
        """Send the load again while a long step runs: routers count a silent worker as lost."""
        while True:
            await asyncio.sleep(LOAD_REPEAT_S)
            self._links.broadcast(worker_pb2.WorkerMessage(load=self._complete(self._load)))

    def _complete(self, load: worker_pb2.LoadReport) -> worker_pb2.LoadReport:
        """Add to a load report what the engine does not know."""
        load.draining = self._drain.has_begun
        load.num_open_leases, load.num_late_leases, load.num_expired_leases = self._source.leases()
        load.num_dropped_traces = 0 if self._spans is None else self._spans.num_dropped
        self._pulls.complete(load)
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
