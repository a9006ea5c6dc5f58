"""The source's side of hand-offs: the gRPC servicer that drives a SourceHandoff for each. One event loop.

    engine: HandoffEvents                    sink: Subscribe, (Pull | reads of its own), Renew*, Release
                   └─────> SourceHandoff <──────┘
                                └─> announcements to the sink; to the engine: caught_up*, end_lease once

The engine's half, which knows what is leased, is engine/outgoing.py. A prompt's hand-off is opened here before the
engine has the request; that of a running sequence or of a cached prefix when the engine says how much there is.

A Subscribe stream stays open after the seal, until the hand-off ends: while it stands, each side knows the other alive.
Knows no engine and no torch.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from ...proto import kv_pb2, kv_pb2_grpc
from ..common.channel import ERROR_KEY
from ..common.errors import DiptychError, HandoffError, Unavailable, UnknownHandoff, WorkerLost
from ..common.names import FromSink, check_sink, check_subscription
from ..kv.checksums import pool_checksums
from ..kv.layout_check import check_received
from ..kv.memory import KVMemory
from ..kv.segment import Segment
from ..kv.wire import on_the_wire
from ..transport.base import Transport, usable_transports
from .ports import SourceEngine, SourceRequests
from .source_machine import SourceHandoff
from .types import (
    Aborted,
    Answer,
    CaughtUp,
    EndLease,
    EndStream,
    HandoffEnded,
    HandoffEvent,
    HandoffHeld,
    HandoffOpened,
    HandoffRefused,
    HandoffSealed,
    Refuse,
    Seal,
    SegmentReady,
    SourceAction,
    SourceState,
    Tell,
)
from .wire_chunks import wire_chunks

MAX_WAIT_S = 30.0  # for an offer that has not come yet
MAX_ENDED = 4096  # ids remembered after their end: single-use, and a release can be asked again
MAX_READ_TIMES = 32  # checked reads of one release
CHUNK_BYTES = 1 << 18  # larger ones make the two sides wait for each other
# Of a lease: so long a running sequence waits for its sink when it has made all that was offered. Then it runs on.
HOLD_FOR_SINK = 1 / 2
HOLD_WITHOUT_SINK = 1 / 10

log = logging.getLogger("diptych.handoff")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(slots=True, eq=False)
class _DrivenHandoff:
    handoff_id: str
    num_tokens: int
    machine: SourceHandoff
    key: str | None  # of the sequence; None: a prefix
    outbox: "asyncio.Queue[kv_pb2.Announcement | None] | None" = None  # of the present sink; None ends its stream
    wire: str = ""  # dtype that the present sink pulls
    timer: asyncio.TimerHandle | None = None
    reads: Sequence[tuple[int, float]] = ()  # of the sink that releases

    @property
    def runs_on(self) -> bool:
        """Return whether its sequence goes on here if the hand-off ends before the seal."""
        return self.machine.runs_on and not self.machine.is_sealed


class HandoffSource(kv_pb2_grpc.KVHandoffServicer):
    """The source of all hand-offs of a worker. Every method runs on the worker's event loop."""

    def __init__(
        self,
        incarnation: str,
        memory: KVMemory,
        transports: Mapping[str, Transport],
        engine: SourceEngine,
        requests: SourceRequests,
        lease_s: float = 10.0,
    ) -> None:
        self._incarnation = incarnation
        self._layout = memory.layout
        self._memory = memory
        self._transports = transports
        self._engine, self._requests = engine, requests
        self._lease_s, self._num_expired = lease_s, 0
        self._open: dict[str, _DrivenHandoff] = {}
        self._ended: OrderedDict[str, _DrivenHandoff] = OrderedDict()
        self._expected: dict[str, set[asyncio.Future[None]]] = {}  # sinks that came before the offer

    @property
    def num_open(self) -> int:
        return len(self._open)

    def leases(self) -> tuple[int, int, int]:
        """Number of open leases, of those whose renewal is late, and of those that lapsed since the start."""
        num_late = sum(each.machine.is_late(self._now()) for each in self._open.values())
        return len(self._open), num_late, self._num_expired

    def offer(
        self, handoff_id: str, num_tokens: int, key: str | None = None, *, is_live: bool = False, prefix: bool = False
    ) -> None:
        """Open a hand-off of that many tokens at most. `key`: of the sequence. `is_live`: it runs on, until its sink
        has caught up. `prefix`: over with its first sink. Raises HandoffError for an id that was used before."""
        if self._find(handoff_id) is not None:
            raise HandoffError(f"the hand-off id {handoff_id!r} was used before: ids are single-use")
        num_blocks = self._layout.num_blocks_for(num_tokens)
        num_layers, now = self._layout.num_layers, self._now()
        machine = SourceHandoff(num_blocks, num_layers, self._lease_s, now, is_live=is_live, prefix=prefix)
        outgoing = self._open[handoff_id] = _DrivenHandoff(handoff_id, num_tokens, machine, key)
        self._arm(outgoing)
        self._serve()
        for waiter in self._expected.pop(handoff_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def on_event(self, event: HandoffEvent) -> None:
        """Take the engine's events, in their order. Those of a hand-off that has ended have no effect."""
        outgoing = self._open.get(event.handoff_id)
        match event:
            case HandoffOpened():
                self._offer_from_engine(event)
            case HandoffRefused():
                self._refuse_offer(event)
            case SegmentReady() if outgoing is not None:
                self._carry_out(outgoing, outgoing.machine.announce(event.segment, self._now()))
            case HandoffHeld() if outgoing is not None:
                self._limit_hold(outgoing)
            case HandoffSealed():
                self._seal(event)
            case HandoffEnded():
                self.abort(event.handoff_id, event.error)
            case _:
                pass

    def abort(self, handoff_id: str, error: DiptychError) -> None:
        """Give up a hand-off; its sink is told why. Idempotent."""
        outgoing = self._open.get(handoff_id)
        if outgoing is not None:
            self._carry_out(outgoing, outgoing.machine.abort(error, self._now()))

    def _offer_from_engine(self, event: HandoffOpened) -> None:
        try:
            is_prefix = event.key is None
            self.offer(event.handoff_id, event.num_tokens, event.key, is_live=event.is_live, prefix=is_prefix)
        except HandoffError as e:
            log.warning("a router's offer is refused: %s", e)
            self._engine.post(lambda engine: engine.end_lease(event.handoff_id))

    def _refuse_offer(self, event: HandoffRefused) -> None:
        """Tell its sink why, when it comes."""
        if self._find(event.handoff_id) is None:
            self.offer(event.handoff_id, 1)
            self.abort(event.handoff_id, event.error)

    def _seal(self, event: HandoffSealed) -> None:
        """Seal the hand-off. The router is told after all the sequence's tokens, which were sent before."""
        if event.is_live or not event.output_token_ids:
            self._requests.handed_off(event)
        outgoing = self._open.get(event.handoff_id)
        if outgoing is not None:
            sealed, counts = (event.num_computed, event.output_token_ids), (event.num_draft_computed, event.num_inexact)
            self._carry_out(outgoing, outgoing.machine.seal(*sealed, self._now(), *counts))
        if event.is_live and event.key is not None and event.handoff_id not in self._open:
            self._requests.forget(event.key)  # the hand-off ended before it was sealed

    def _limit_hold(self, outgoing: _DrivenHandoff) -> None:
        """Limit the time for which a running sequence waits for its sink; then it runs on here."""
        had_sink = outgoing.machine.sink is not None
        wait_s = self._lease_s * (HOLD_FOR_SINK if had_sink else HOLD_WITHOUT_SINK)
        asyncio.get_running_loop().call_later(wait_s, self._end_hold, outgoing, had_sink)

    def _end_hold(self, outgoing: _DrivenHandoff, had_sink: bool) -> None:
        if not (outgoing.machine.is_live and outgoing.runs_on):
            return
        if not had_sink and outgoing.machine.sink is not None:
            self._limit_hold(outgoing)
        else:
            error = HandoffError("the sink did not catch up in time with the sequence, which runs on at its source")
            self._carry_out(outgoing, outgoing.machine.abort(error, self._now()))

    async def close(self) -> None:
        """Abort the open hand-offs."""
        for handoff_id in list(self._open):
            self.abort(handoff_id, Unavailable("the source worker is stopping"))

    async def Subscribe(self, request: kv_pb2.SubscribeRequest, context: Context) -> AsyncIterator[kv_pb2.Announcement]:
        try:
            check_subscription(request)
            wire = on_the_wire(self._layout.dtype, request.wire_dtype)
            transports = self._check(request, wire)
            outgoing = await self._offered(request.handoff_id, request.wait_s)
        except DiptychError as error:
            await _refuse(context, error)
        outbox: asyncio.Queue[kv_pb2.Announcement | None] = asyncio.Queue()
        outbox.put_nowait(kv_pb2.Announcement(opened=self._opened(outgoing, transports)))
        sink = request.sink_incarnation
        actions = outgoing.machine.subscribe(sink, self._now())
        if actions and isinstance(refusal := actions[-1], Refuse):
            self._carry_out(outgoing, actions)
            await _refuse(context, refusal.error)
        outgoing.outbox, outgoing.wire = outbox, wire
        self._carry_out(outgoing, actions)
        try:
            while (announcement := await outbox.get()) is not None:
                if request.checksums and announcement.HasField("segment"):
                    # The blocks are leased during this; later announcements wait for their turn.
                    announcement.segment.checksum = await asyncio.to_thread(self._checksums, announcement.segment, wire)
                yield announcement
        finally:
            self._carry_out(outgoing, outgoing.machine.leave(sink, self._now()))

    async def Pull(self, request: kv_pb2.PullRequest, context: Context) -> AsyncIterator[kv_pb2.PullChunk]:
        try:
            check_sink(request)
            segment = Segment.from_proto(request.segment, self._memory.num_blocks)
        except HandoffError as error:
            await _refuse(context, error)
        outgoing = self._open.get(request.handoff_id)
        if outgoing is None or not outgoing.machine.may_read(request.sink_incarnation, segment, self._now()):
            await _refuse(context, HandoffError("these blocks are not announced and leased to this sink"))
        async with aclosing(wire_chunks(self._memory, segment, outgoing.wire, CHUNK_BYTES)) as chunks:
            async for chunk in chunks:
                # Blocks are freed on this loop, so a copy made while they were leased has the announced content.
                if not outgoing.machine.is_held_by(request.sink_incarnation):
                    await _refuse(context, HandoffError("the hand-off ended while its blocks were being pulled"))
                yield kv_pb2.PullChunk(data=chunk)

    async def Renew(self, request: kv_pb2.RenewRequest, context: Context) -> kv_pb2.RenewResponse:
        await _refuse_names(request, context)
        outgoing = self._open.get(request.handoff_id)
        if outgoing is None:
            return kv_pb2.RenewResponse(held=False)
        actions = outgoing.machine.renew(request.sink_incarnation, self._now(), request.num_segments_read)
        return kv_pb2.RenewResponse(held=self._carry_out(outgoing, actions))

    async def Release(self, request: kv_pb2.ReleaseRequest, context: Context) -> kv_pb2.ReleaseResponse:
        await _refuse_names(request, context)
        outgoing = self._find(request.handoff_id)
        if outgoing is None:
            return kv_pb2.ReleaseResponse(held=False)
        outgoing.reads = [(read.num_bytes, read.seconds) for read in request.reads[:MAX_READ_TIMES]]
        held = self._carry_out(outgoing, outgoing.machine.release(request.sink_incarnation, self._now()))
        return kv_pb2.ReleaseResponse(held=held)

    async def Abandon(self, request: kv_pb2.AbandonRequest, context: Context) -> kv_pb2.AbandonResponse:
        await _refuse_names(request, context)
        outgoing = self._open.get(request.handoff_id)
        if outgoing is not None:
            self._carry_out(outgoing, outgoing.machine.leave(request.sink_incarnation, self._now()))
        return kv_pb2.AbandonResponse()

    def _carry_out(self, outgoing: _DrivenHandoff, actions: list[SourceAction]) -> bool:
        """Carry out what the machine decided; returns its answer to a renewal or a release."""
        held = False
        for action in actions:
            match action:
                case Tell(what=what):
                    assert outgoing.outbox is not None
                    outgoing.outbox.put_nowait(_announcement(what))
                case EndStream():
                    assert outgoing.outbox is not None
                    outgoing.outbox.put_nowait(None)
                case EndLease():
                    self._end(outgoing)
                case CaughtUp():
                    self._engine.post(lambda engine: engine.caught_up(outgoing.handoff_id))
                case Answer():
                    held = action.held
                case Refuse():
                    pass  # the caller reports it
        return held

    def _end(self, outgoing: _DrivenHandoff) -> None:
        handoff_id, machine = outgoing.handoff_id, outgoing.machine
        del self._open[handoff_id]
        self._num_expired += machine.state is SourceState.EXPIRED
        self._ended[handoff_id] = outgoing
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if outgoing.timer is not None:
            outgoing.timer.cancel()
        self._serve()
        if outgoing.key is not None and not outgoing.runs_on:
            self._requests.forget(outgoing.key)
        reads = outgoing.reads if machine.state is SourceState.RELEASED else ()
        self._engine.post(lambda engine: engine.end_lease(handoff_id, reads))

    def _serve(self) -> None:
        for transport in self._transports.values():
            transport.serve(len(self._open))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _arm(self, outgoing: _DrivenHandoff) -> None:
        wake_at = outgoing.machine.wake_at
        if wake_at is not None:
            outgoing.timer = asyncio.get_running_loop().call_at(wake_at, self._on_timer, outgoing)

    def _on_timer(self, outgoing: _DrivenHandoff) -> None:
        """Let the machine act on its deadline, which renewals have usually moved on."""
        self._carry_out(outgoing, outgoing.machine.tick(self._now()))
        self._arm(outgoing)

    def _find(self, handoff_id: str) -> _DrivenHandoff | None:
        return self._open.get(handoff_id) or self._ended.get(handoff_id)

    def _checksums(self, segment: kv_pb2.Segment, wire: str) -> bytes:
        """Compute checksums; called on a thread."""
        return pool_checksums(self._memory, segment.block_ids, segment.first_layer, segment.num_layers, wire)

    def _check(self, request: kv_pb2.SubscribeRequest, wire: str) -> list[str]:
        """Find the transports that the sink may use, the best first. Raises what makes a hand-off to it impossible."""
        if request.source_incarnation != self._incarnation:
            raise WorkerLost("the source worker has ended: another process answers at its address")
        check_received(self._layout, request.layout)
        return usable_transports(request, self._transports, None if wire == self._layout.dtype else wire)

    async def _offered(self, handoff_id: str, wait_s: float) -> _DrivenHandoff:
        """Wait for the offer: the sink's request may reach us before the router's does."""
        if self._find(handoff_id) is None and math.isfinite(wait_s) and wait_s > 0:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiters = self._expected.setdefault(handoff_id, set())
            waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=min(wait_s, MAX_WAIT_S))
            finally:
                waiters.discard(waiter)
                if not waiters and self._expected.get(handoff_id) is waiters:
                    del self._expected[handoff_id]
        outgoing = self._find(handoff_id)
        if outgoing is None:
            raise UnknownHandoff("the source worker has no such hand-off, or ended it long ago")
        return outgoing

    def _opened(self, outgoing: _DrivenHandoff, transports: Sequence[str]) -> kv_pb2.Opened:
        opened = kv_pb2.Opened(
            source_incarnation=self._incarnation,
            layout=self._layout.to_proto(),
            transport=transports[0],
            lease_s=self._lease_s,
            num_tokens=outgoing.num_tokens,
            num_blocks=self._layout.num_blocks_for(outgoing.num_tokens),
            is_live=outgoing.machine.runs_on,
            num_pool_blocks=self._memory.num_blocks,
        )
        for name in transports:
            self._transports[name].publish(opened)
        return opened


def _announcement(what: Segment | Seal | Aborted) -> kv_pb2.Announcement:
    match what:
        case Segment():
            return kv_pb2.Announcement(segment=what.to_proto())
        case Seal():
            return kv_pb2.Announcement(
                sealed=kv_pb2.Sealed(
                    num_segments=what.num_segments,
                    num_computed_tokens=what.num_computed,
                    output_token_ids=what.output_token_ids,
                    num_draft_tokens=what.num_draft_computed,
                    num_inexact_tokens=what.num_inexact,
                )
            )
        case Aborted():
            return kv_pb2.Announcement(aborted=kv_pb2.Aborted(error=what.error, message=what.message))


async def _refuse_names(request: FromSink, context: Context) -> None:
    try:
        check_sink(request)
    except HandoffError as error:
        await _refuse(context, error)


async def _refuse(context: Context, error: DiptychError) -> NoReturn:
    code = grpc.StatusCode.NOT_FOUND if isinstance(error, UnknownHandoff) else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, error.message, trailing_metadata=((ERROR_KEY, type(error).__name__),))
