"""The source's side of hand-offs: the gRPC servicer that drives a handoff.SourceHandoff for each. One event loop.

    engine: offer, segment*, seal | abort          sink: Subscribe, (Pull | reads of its own), Renew*, Release
                   └───────────> SourceHandoff <────────────┘
                                      └─> announcements to the sink; SourcePort.end_lease, once

A Subscribe stream stays open after the seal, until the hand-off ends: while it stands, each side knows the other alive.
Knows no engine and no torch.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc
import grpc.aio

from ...proto import kv_pb2, kv_pb2_grpc
from ..common.channel import ERROR_KEY
from ..common.errors import DiptychError, HandoffError, TransportError, Unavailable, UnknownHandoff, WorkerLost
from ..common.names import FromSink, check_sink, check_subscription
from ..kv.checksums import pool_checksums
from ..kv.layout import KVLayout
from ..kv.memory import KVMemory
from ..kv.packing import to_wire
from ..kv.segment import Segment
from ..kv.wire import on_the_wire
from ..transport.base import Transport
from .machines import SourceHandoff
from .types import Aborted, Answer, CaughtUp, EndLease, EndStream, Refuse, Seal, SourceAction, Tell
from .wire_chunks import read_chunks, wire_runs

MAX_WAIT_S = 30.0  # for an offer that has not come yet
MAX_ENDED = 4096  # ids remembered after their end: single-use, and a release can be asked again
MAX_READ_TIMES = 32  # looked at, of one release
CHUNK_BYTES = 1 << 18  # larger ones make the two sides wait for each other

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class SourcePort(Protocol):
    """What the source needs of its worker."""

    def end_lease(self, handoff_id: str) -> None:
        """The blocks leased for this hand-off may be freed. Called once a hand-off, on the loop; must not block."""
        ...

    def caught_up(self, handoff_id: str) -> None:
        """The sink of a live hand-off has read nearly all that was announced. May come often; must not block."""
        ...

    def reads_took(self, reads: Sequence[tuple[int, float]]) -> None:
        """(bytes, seconds), at most MAX_READ_TIMES, that a sink reports with its release; unchecked. Must not block."""
        ...


@dataclass(slots=True, eq=False)
class _Outgoing:
    handoff_id: str
    num_tokens: int
    machine: SourceHandoff
    outbox: "asyncio.Queue[kv_pb2.Announcement | None] | None" = None  # of the present sink; None ends its stream
    wire: str = ""  # dtype that the present sink pulls
    timer: asyncio.TimerHandle | None = None


class HandoffSource(kv_pb2_grpc.KVHandoffServicer):
    """Every method runs on the worker's event loop."""

    def __init__(
        self,
        incarnation: str,
        memory: KVMemory,
        transports: Mapping[str, Transport],
        port: SourcePort,
        lease_s: float = 10.0,
    ) -> None:
        self._incarnation = incarnation
        self._layout = memory.layout
        self._memory = memory
        self._transports = transports
        self._port = port
        self._lease_s = lease_s
        self._open: dict[str, _Outgoing] = {}
        self._ended: OrderedDict[str, _Outgoing] = OrderedDict()
        self._expected: dict[str, set[asyncio.Future[None]]] = {}  # sinks that came before the offer

    @property
    def num_open(self) -> int:
        return len(self._open)

    # -- from the engine --------------------------------------------------------------------------------------------

    def offer(self, handoff_id: str, num_tokens: int, *, is_live: bool = False, prefix: bool = False) -> None:
        """Open a hand-off of that many tokens at most. `is_live`: its sequence runs on, see `SourcePort.caught_up`;
        `prefix`: over with its first sink. Raises HandoffError when the id was used before: ids are single-use."""
        if self._find(handoff_id) is not None:
            raise HandoffError(f"the hand-off id {handoff_id!r} was used before: ids are single-use")
        num_blocks = self._layout.num_blocks_for(num_tokens)
        num_layers, now = self._layout.num_layers, self._now()
        machine = SourceHandoff(num_blocks, num_layers, self._lease_s, now, is_live=is_live, prefix=prefix)
        outgoing = self._open[handoff_id] = _Outgoing(handoff_id, num_tokens, machine)
        self._arm(outgoing)
        self._serve()
        for waiter in self._expected.pop(handoff_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def segment(
        self,
        handoff_id: str,
        first_block: int,
        block_ids: Sequence[int],
        generations: Sequence[int],
        first_layer: int,
        num_layers: int,
    ) -> None:
        """Announce blocks that are readable and leased. A hand-off that has ended meanwhile ignores it."""
        outgoing = self._open.get(handoff_id)
        if outgoing is not None:
            segment = Segment(first_block, tuple(block_ids), tuple(generations), first_layer, num_layers)
            self._carry_out(outgoing, outgoing.machine.announce(segment, self._now()))

    def seal(self, handoff_id: str, num_computed: int, output_token_ids: Sequence[int]) -> None:
        """No more segments: the sequence continues after these tokens. Ignored once the hand-off has ended."""
        outgoing = self._open.get(handoff_id)
        if outgoing is not None:
            self._carry_out(outgoing, outgoing.machine.seal(num_computed, output_token_ids, self._now()))

    def abort(self, handoff_id: str, error: DiptychError) -> None:
        """Give up a hand-off; its sink is told why. Idempotent."""
        outgoing = self._open.get(handoff_id)
        if outgoing is not None:
            self._carry_out(outgoing, outgoing.machine.abort(error, self._now()))

    def has_sink(self, handoff_id: str) -> bool:
        outgoing = self._open.get(handoff_id)
        return outgoing is not None and outgoing.machine.sink is not None

    def refuse(self, handoff_id: str, error: DiptychError) -> None:
        """This will not be offered: its sink is told why, when it comes. Ignored for an id that was offered."""
        if self._find(handoff_id) is None:
            self.offer(handoff_id, 1)
            self.abort(handoff_id, error)

    async def close(self) -> None:
        """Abort what is open."""
        for handoff_id in list(self._open):
            self.abort(handoff_id, Unavailable("the source worker is stopping"))

    # -- diptych.v1.KVHandoff ---------------------------------------------------------------------------------------

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
                    # The blocks are leased meanwhile; what follows waits its turn.
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
        for part in wire_runs(self._memory, segment, outgoing.wire, CHUNK_BYTES):
            async with aclosing(read_chunks(self._memory, part.runs, part.chunk_bytes)) as copied:
                async for chunk in copied:
                    # Blocks are freed on this loop: what was copied while they were leased is what was announced.
                    if not outgoing.machine.is_held_by(request.sink_incarnation):
                        await _refuse(context, HandoffError("the hand-off ended while its blocks were being pulled"))
                    if outgoing.wire == self._layout.dtype:
                        yield kv_pb2.PullChunk(data=chunk)
                        continue
                    narrowed = await asyncio.to_thread(to_wire, chunk, part.uniform, outgoing.wire)
                    for start in range(0, len(narrowed), CHUNK_BYTES):
                        yield kv_pb2.PullChunk(data=narrowed[start : start + CHUNK_BYTES])

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
        held = self._carry_out(outgoing, outgoing.machine.release(request.sink_incarnation, self._now()))
        if held and request.reads:
            self._port.reads_took([(read.num_bytes, read.seconds) for read in request.reads[:MAX_READ_TIMES]])
        return kv_pb2.ReleaseResponse(held=held)

    async def Abandon(self, request: kv_pb2.AbandonRequest, context: Context) -> kv_pb2.AbandonResponse:
        await _refuse_names(request, context)
        outgoing = self._open.get(request.handoff_id)
        if outgoing is not None:
            self._carry_out(outgoing, outgoing.machine.leave(request.sink_incarnation, self._now()))
        return kv_pb2.AbandonResponse()

    # -- within -----------------------------------------------------------------------------------------------------

    def _carry_out(self, outgoing: _Outgoing, actions: list[SourceAction]) -> bool:
        """Do what the machine decided; returns what it answered, if it was asked."""
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
                    self._port.caught_up(outgoing.handoff_id)
                case Answer():
                    held = action.held
                case Refuse():
                    pass  # the caller's to say
        return held

    def _end(self, outgoing: _Outgoing) -> None:
        del self._open[outgoing.handoff_id]
        self._ended[outgoing.handoff_id] = outgoing
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if outgoing.timer is not None:
            outgoing.timer.cancel()
        self._serve()
        self._port.end_lease(outgoing.handoff_id)

    def _serve(self) -> None:
        for transport in self._transports.values():
            transport.serve(len(self._open))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _arm(self, outgoing: _Outgoing) -> None:
        wake_at = outgoing.machine.wake_at
        if wake_at is not None:
            outgoing.timer = asyncio.get_running_loop().call_at(wake_at, self._on_timer, outgoing)

    def _on_timer(self, outgoing: _Outgoing) -> None:
        """The deadline that the timer was set for; renewals have usually moved it on."""
        self._carry_out(outgoing, outgoing.machine.tick(self._now()))
        self._arm(outgoing)

    def _find(self, handoff_id: str) -> _Outgoing | None:
        return self._open.get(handoff_id) or self._ended.get(handoff_id)

    def _checksums(self, segment: kv_pb2.Segment, wire: str) -> bytes:
        """On a thread."""
        return pool_checksums(self._memory, segment.block_ids, segment.first_layer, segment.num_layers, wire)

    def _check(self, request: kv_pb2.SubscribeRequest, wire: str) -> list[str]:
        """The names of the transports that it may use, the best first. Raises what makes a hand-off to this sink
        impossible."""
        if request.source_incarnation != self._incarnation:
            raise WorkerLost("the source worker is gone: another process answers at its address")
        self._layout.check_bridge(KVLayout.from_proto(request.layout))
        if wire != self._layout.dtype:
            if "grpc" in self._transports and "grpc" in request.transports:
                return ["grpc"]
            raise TransportError(
                f"KV is narrowed to {wire} over gRPC alone: let both workers have grpc, or unset wire_dtype"
            )
        common = [name for name in dict.fromkeys(request.transports) if name in self._transports]
        usable = [name for name in common if self._transports[name].suits(request)]
        if usable:
            return usable
        ours, theirs = ", ".join(self._transports), ", ".join(request.transports)
        raise TransportError(
            f"no transport reaches the sink: the source has {ours or 'none'}, the sink {theirs or 'none'}; let both "
            "have grpc, for the others reach within a machine, or where a trusted_rdma_fabric is set"
        )

    async def _offered(self, handoff_id: str, wait_s: float) -> _Outgoing:
        """Waits for the offer: the sink's request may reach us before the router's does."""
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
            raise UnknownHandoff("the source worker was not asked to hand this sequence off, or ended it long ago")
        return outgoing

    def _opened(self, outgoing: _Outgoing, transports: Sequence[str]) -> kv_pb2.Opened:
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
