"""Pull of a sequence's KV: carries out what handoff.SinkHandoff decides. One event loop, no torch.

    stream of announcements ┐                    ┌ reserve, commit, fail, settle: the engine, by way of SinkPort
    answers, ends of reads  ├─> SinkHandoff ─────┼ reads: the transport
    timer                   ┘                    └ renew, release, abandon: the source

`done` tells the outcome as soon as the blocks are committed, free or in quarantine; `run` returns when nothing is left
to clean up, which is later when a read may still land.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from ...proto import kv_pb2, kv_pb2_grpc, worker_pb2
from ..common.channel import Metadata
from ..common.errors import DiptychError, HandoffError, InternalError, TransportError, WorkerLost
from ..common.names import check_lengths
from ..common.timings import PullClock, TransferCounters
from ..kv.bridge import Bridge
from ..kv.layout import KVLayout
from ..kv.memory import KVMemory
from ..kv.segment import Read, Segment
from ..kv.staging import Staging
from ..transport.base import Source, Transport
from ..transport.machine import this_machine
from .errors import error_of, error_of_abort
from .ports import SinkPort
from .segment_receiver import DEFAULT_PULL_SETTINGS, PullSettings, SegmentReceiver
from .sink_machine import SinkHandoff
from .types import Abandon, Begin, Commit, Fail, Offer, Release, Renew, Reserve, Seal, Settle, SinkAction

WAIT_FOR_OFFER_S = 5.0  # the router asks both workers at once; the source may receive it later
ANSWER_S = 5.0  # beyond that, until the source has answered the subscription
CALL_TIMEOUT_S = 10.0  # of renewals and releases; the machine gives up sooner where the lease is short
ABANDON_TIMEOUT_S = 1.0
MAX_READS = 4  # at a time

log = logging.getLogger("diptych.handoff")


@dataclass(frozen=True, slots=True)
class PullResult:
    num_bytes: int
    waited_s: float  # from the call to the commit
    transport: str


@dataclass(frozen=True, slots=True)
class PullContext:
    """The parts of a worker that all its pulls share."""

    memory: KVMemory
    transports: Mapping[str, Transport]
    port: SinkPort
    staging: Staging  # a region that the transports know
    settings: PullSettings = DEFAULT_PULL_SETTINGS
    metadata: Metadata = ()  # of every call to a source


@dataclass(frozen=True, slots=True)
class PullJob:
    key: str  # the engine's name for the sequence
    sink: str  # our name to the source: of this one attempt
    source: worker_pb2.HandoffSource
    timeout_s: float
    traffic: TransferCounters  # of the source


class Pull:
    """Pull of a sequence's KV: `run` it as a task and await `done`; `give_up` ends it early. All on one event loop."""

    def __init__(self, context: PullContext, job: PullJob, stub: "kv_pb2_grpc.KVHandoffAsyncStub") -> None:
        self._context = context
        self._job = job
        self._stub = stub
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._wait_s = min(job.timeout_s, WAIT_FOR_OFFER_S)
        self._machine = SinkHandoff(
            deadline=self._started + job.timeout_s, open_by=self._started + self._wait_s + ANSWER_S
        )
        self.done: asyncio.Future[PullResult] = self._loop.create_future()
        self.done.add_done_callback(lambda f: f.exception())  # not a loss if no result is needed any more
        self._workers: set[asyncio.Task[None]] = set()  # stop when the machine has ended
        self._cleaners: set[asyncio.Task[None]] = set()  # begin then
        self._finished = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[tuple[str, SegmentReceiver]] | None = None
        self._read_slots = asyncio.Semaphore(MAX_READS)
        self._opened = kv_pb2.Opened()  # the source's offer; no blocks are offered before it
        self._bridge: Bridge | None = None  # from then on
        self._clock = PullClock(job.traffic)

    async def run(self) -> None:
        self._start(self._listen(), self._workers)
        self._arm()
        await self._finished.wait()

    def give_up(self, error: DiptychError) -> None:
        self._carry_out(self._machine.failed(error, self._now()))

    def _carry_out(self, actions: list[SinkAction]) -> None:
        for action in actions:
            match action:
                case Reserve():
                    self._start(self._reserve(action.num_tokens), self._workers)
                case Read():
                    self._start(self._read(action), self._workers)
                case Renew():
                    self._start(self._renew(action.num_read), self._workers)
                case Release():
                    self._start(self._release(), self._workers)
                case Begin():
                    self._context.port.begin(self._job.key, action.seal)
                case Commit():
                    self._start(self._commit(action), self._cleaners)
                case Fail():
                    self._start(self._fail(action), self._cleaners)
                case Abandon():
                    self._start(self._abandon(), self._cleaners)
                case Settle():
                    self._start(self._context.port.settle(self._job.key), self._cleaners)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wake_at = self._machine.wake_at
        self._timer = None if wake_at is None else self._loop.call_at(wake_at, self._on_timer)

    def _on_timer(self) -> None:
        self._carry_out(self._machine.tick(self._now()))

    def _now(self) -> float:
        return self._loop.time()

    def _start(self, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]]) -> None:
        task = self._loop.create_task(work)
        group.add(task)
        task.add_done_callback(lambda task: self._on_end(task, group))

    def _on_end(self, task: asyncio.Task[None], group: set[asyncio.Task[None]]) -> None:
        group.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("a pull of KV failed by our own fault", exc_info=bug)
            error = InternalError(f"{type(bug).__name__} while pulling KV: {bug}")
            self.give_up(error)
            if self._machine.is_over and not self._cleaners and not self.done.done():
                self.done.set_exception(error)
        if self._machine.is_over and not self._workers and not self._cleaners:
            self._finished.set()

    async def _listen(self) -> None:
        request = kv_pb2.SubscribeRequest(
            handoff_id=self._job.source.handoff_id,
            source_incarnation=self._job.source.incarnation,
            sink_incarnation=self._job.sink,
            layout=self._context.memory.layout.to_proto(),
            transports=list(self._context.transports),
            wait_s=self._wait_s,
            checksums=self._context.settings.verify,
            wire_dtype=self._context.settings.wire_dtype,
            machine=this_machine(),
            on_device=self._context.memory.device is not None,
        )
        call = self._stub.Subscribe(request, timeout=self._job.timeout_s, metadata=self._context.metadata)
        try:
            async for announcement in call:
                self._on_announcement(announcement)
        except grpc.aio.AioRpcError as e:
            self.give_up(error_of(e))
        else:
            self._carry_out(self._machine.stream_ended(self._now()))
        finally:
            call.cancel()

    def _on_announcement(self, announcement: kv_pb2.Announcement) -> None:
        now = self._now()
        match announcement.WhichOneof("event"):
            case "opened":
                self._on_opened(announcement.opened)
            case "segment":
                self._clock.announced()
                try:
                    segment = Segment.from_proto(announcement.segment, self._opened.num_blocks)
                except HandoffError as error:
                    self.give_up(error)
                else:
                    self._carry_out(self._machine.announced(segment, now))
            case "sealed":
                self._clock.sealed()
                self._on_sealed(announcement.sealed)
            case "aborted":
                self.give_up(error_of_abort(announcement.aborted))
            case _:
                self.give_up(HandoffError("the source announced something that this version does not know"))

    def _on_opened(self, opened: kv_pb2.Opened) -> None:
        try:
            if opened.source_incarnation != self._job.source.incarnation:
                raise WorkerLost("the source worker has ended: another process answers at its address")
            memory = self._context.memory
            most = memory.num_blocks * memory.layout.block_size
            if opened.num_tokens > most:  # before anything is made of it
                raise HandoffError(
                    f"the source offers {opened.num_tokens:,} tokens, but this worker's whole pool holds {most:,}"
                )
            check_lengths(HandoffError, transport=opened.transport, agent_name=opened.nixl.agent_name)
            layout, asked = KVLayout.from_proto(opened.layout), self._context.settings.wire_dtype
            bridge = Bridge(memory, layout, opened.num_pool_blocks, asked)
            if opened.transport not in self._context.transports:
                raise TransportError(
                    f"the source chose the transport {opened.transport!r}, which this worker does not have"
                )
            if bridge.wire != layout.dtype and opened.transport != "grpc":
                raise HandoffError(
                    f"the source offers {bridge.wire} over {opened.transport}, but only gRPC can convert KV"
                )
        except DiptychError as error:
            self.give_up(error)
            return
        now = self._now()
        self._bridge, self._opened = bridge, opened
        offer = Offer(
            opened.num_tokens,
            opened.num_blocks,
            layout.block_size,
            opened.lease_s,
            layout.num_layers,
            layout.num_target_layers,
            bridge.brings_draft,
            opened.is_live,
            memory.layout.token_multiple,
        )
        self._carry_out(self._machine.opened(offer, now))
        if not self._machine.is_over:
            self._connecting = self._loop.create_task(self._connect(opened, bridge))
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())  # reads raise it

    def _on_sealed(self, sealed: kv_pb2.Sealed) -> None:
        if (num := len(sealed.output_token_ids)) > self._opened.num_tokens:  # before they are copied
            self.give_up(HandoffError(f"{num:,} outputs sealed, {self._opened.num_tokens:,} tokens offered"))
            return
        counts, outputs = (sealed.num_segments, sealed.num_computed_tokens), tuple(sealed.output_token_ids)
        layout = self._bridge.source if self._bridge is not None else None
        multiple = 1 if layout is None else layout.token_multiple
        seal = Seal(*counts, outputs, sealed.num_draft_tokens, sealed.num_inexact_tokens, multiple)
        self._carry_out(self._machine.sealed(seal, self._now()))

    async def _connect(self, opened: kv_pb2.Opened, bridge: Bridge) -> tuple[str, SegmentReceiver]:
        """Connect by the transport that the source chose, or, where that cannot reach it, by the next of ours that
        can."""
        context = self._context
        source = Source(self._job.source.handoff_id, self._job.sink, opened, self._stub, context.metadata)
        described = [name for name, transport in context.transports.items() if transport.is_described(opened)]
        *names, last = dict.fromkeys([opened.transport, *described])
        for name in names:
            try:
                return name, await self._receiver(name, source, bridge)
            except TransportError as e:
                log.warning("the source cannot be read over %s: %s", name, e)
        return last, await self._receiver(last, source, bridge)

    async def _receiver(self, transport: str, source: Source, bridge: Bridge) -> SegmentReceiver:
        reader, context = await self._context.transports[transport].connect(source), self._context
        return SegmentReceiver(reader, bridge, context.memory, context.staging, verify=context.settings.verify)

    async def _reserve(self, num_tokens: int) -> None:
        try:
            reservation = await self._context.port.reserve(self._job.key, num_tokens)
        except DiptychError as error:
            self.give_up(error)
        else:
            self._carry_out(self._machine.reserved(reservation.block_ids, reservation.num_held_tokens, self._now()))

    async def _read(self, read: Read) -> None:
        assert self._connecting is not None and self._bridge is not None
        try:
            async with self._read_slots:
                name, receiver = await asyncio.shield(self._connecting)
                with self._clock.reading(name, self._bridge.num_bytes(read.segment)):
                    await receiver.receive(read)
        except (TransportError, WorkerLost) as e:
            may_still_land = isinstance(e, TransportError) and e.may_still_land
            actions = self._machine.read_failed(read.number, e, self._now(), may_still_land=may_still_land)
        else:
            actions = self._machine.read_done(read.number, self._now())
        self._carry_out(actions)

    async def _renew(self, num_read: int) -> None:
        request = kv_pb2.RenewRequest(
            handoff_id=self._job.source.handoff_id, sink_incarnation=self._job.sink, num_segments_read=num_read
        )
        try:
            answer = await self._stub.Renew(request, timeout=CALL_TIMEOUT_S, metadata=self._context.metadata)
        except grpc.aio.AioRpcError as e:
            log.debug("a renewal was not answered: %s", e.details())  # the machine asks again, and knows until when
        else:
            self._carry_out(self._machine.renewed(answer.held, self._now()))

    async def _release(self) -> None:
        request = kv_pb2.ReleaseRequest(
            handoff_id=self._job.source.handoff_id,
            sink_incarnation=self._job.sink,
            reads=[kv_pb2.ReadTime(num_bytes=num_bytes, seconds=seconds) for num_bytes, seconds in self._clock.reads],
        )
        try:
            answer = await self._stub.Release(request, timeout=CALL_TIMEOUT_S, metadata=self._context.metadata)
        except grpc.aio.AioRpcError as e:
            log.debug("a release was not answered: %s", e.details())
        else:
            self._carry_out(self._machine.released(answer.held, self._now()))

    async def _commit(self, commit: Commit) -> None:
        self._stop_workers()
        port, key = self._context.port, self._job.key
        name = connected[0] if (connected := self._connected()) else "none"  # everything was held already
        try:
            await port.commit(key, commit.seal, self._clock.times(name))
        except DiptychError as error:
            await port.fail(key, False)
            self.done.set_exception(error)
        else:
            self.done.set_result(PullResult(self._clock.num_bytes, self._now() - self._started, name))

    async def _fail(self, fail: Fail) -> None:
        stopped = self._stop_workers()
        try:
            await self._context.port.fail(self._job.key, fail.quarantine)
        finally:
            self.done.set_exception(fail.error)
        if isinstance(fail.error, WorkerLost):
            for transport in self._context.transports.values():
                transport.forget(self._job.source.incarnation)
        if stopped:
            await asyncio.wait(stopped)
        if (connected := self._connected()) is not None:
            await connected[1].settled()
        if fail.quarantine:
            self._carry_out(self._machine.settled())

    async def _abandon(self) -> None:
        request = kv_pb2.AbandonRequest(handoff_id=self._job.source.handoff_id, sink_incarnation=self._job.sink)
        try:
            await self._stub.Abandon(request, timeout=ABANDON_TIMEOUT_S, metadata=self._context.metadata)
        except grpc.aio.AioRpcError as e:
            log.debug("the source did not hear that we gave up: %s", e.details())

    def _connected(self) -> tuple[str, SegmentReceiver] | None:
        task = self._connecting
        return None if task is None or not task.done() or task.cancelled() or task.exception() else task.result()

    def _stop_workers(self) -> list[asyncio.Task[Any]]:
        stopped: list[asyncio.Task[Any]] = list(self._workers)
        if self._connecting is not None:
            stopped.append(self._connecting)
        for task in stopped:
            task.cancel()
        return stopped
