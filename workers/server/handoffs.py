"""A worker's hand-offs, between its routers' links, its engine, its source and its sink. One event loop.

    a router's Submit, Offer ──> engine ──HandoffEvent──> HandoffSource <── a sink elsewhere
                        └──────> HandoffSink ──> engine        └─ end_lease, caught_up ──> engine

A prompt's offer is opened here, before the engine has it; a running sequence's and a cached prefix's by the engine's
word, which alone knows how much there is.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ...proto import worker_pb2
from ..common.errors import DiptychError, HandoffError, SequenceEnded
from ..common.names import check_lengths
from ..engine.events import (
    HandoffEnded,
    HandoffEvent,
    HandoffHeld,
    HandoffOpened,
    HandoffRefused,
    HandoffSealed,
    SegmentReady,
)
from ..engine.thread import EngineThread
from ..handoff.sink import HandoffSink
from ..handoff.source import HandoffSource
from .router_links import RouterLinks, handle_of

PREFIX_TIMEOUT_S = 3.0  # a prefix that takes longer is computed
# Of a lease: so long a running sequence waits for its sink when it has made all that was offered. Then it runs on.
HOLD_FOR_SINK = 1 / 2
HOLD_WITHOUT_SINK = 1 / 10

log = logging.getLogger("diptych.worker")


@dataclass(slots=True)
class _Offered:
    key: str
    runs_on: bool  # its sequence, if the hand-off ends now


class ServiceHandoffs:
    """`attach` the two ends before anything else."""

    def __init__(self, engine: EngineThread, links: RouterLinks, lease_s: float) -> None:
        self._engine = engine
        self._links = links
        self._lease_s = lease_s
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._offered: dict[str, _Offered] = {}  # by hand-off id
        self._num_bytes = 0  # pulled
        self._num_failed = 0  # pulls of sequences that did not end, nor were aborted, meanwhile

    def attach(self, source: HandoffSource, sink: HandoffSink) -> None:
        self._source = source
        self._sink = sink

    async def close(self) -> None:
        """End every pull, then what is offered."""
        pulls = list(self._pulls.values())
        for task in pulls:
            task.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
        await self._sink.close()
        await self._source.close()

    # -- from the routers -------------------------------------------------------------------------------------------

    def offer_prompt(self, key: str, handoff_id: str, num_tokens: int) -> None:
        """Before the engine has the request. Raises HandoffError where the id was used before."""
        self._source.offer(handoff_id, num_tokens)
        self._offered[handoff_id] = _Offered(key, runs_on=False)

    def offer(self, key: str, handoff_id: str) -> None:
        """A running sequence."""
        try:
            check_lengths(HandoffError, handoff_id=handoff_id)
        except HandoffError as e:
            self._links.send_failure(key, e, handoff=True)
            return
        self._engine.post(lambda engine: engine.offer(key, handoff_id))

    def offer_prefix(self, message: worker_pb2.OfferPrefix) -> None:
        handoff_id, token_ids, salt = message.handoff_id, message.token_ids, message.cache_salt
        try:
            check_lengths(HandoffError, handoff_id=handoff_id)
        except HandoffError as e:
            log.warning("a router offered what cannot be: %s", e)
            return
        self._engine.post(lambda engine: engine.offer_prefix(handoff_id, token_ids, salt))

    def pull(self, key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> None:
        self._pulls[key] = asyncio.create_task(self._pull(key, source, timeout_s))

    def pull_prefix(self, key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> None:
        self._pulls[key] = asyncio.create_task(self._pull_prefix(key, source, min(PREFIX_TIMEOUT_S, timeout_s)))

    def cancel_pull(self, key: str) -> None:
        task = self._pulls.get(key)
        if task is not None:
            # Not before its first step: a task that never began cleans nothing up.
            asyncio.get_running_loop().call_soon(task.cancel)

    # -- pulls ------------------------------------------------------------------------------------------------------

    async def _pull(self, key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> None:
        try:
            result = await self._sink.pull(key, source, timeout_s)
            self._num_bytes += result.num_bytes
        except DiptychError as e:
            await self._engine.fail(key, quarantine=False)
            if self._links.has(key):
                self._num_failed += not isinstance(e, SequenceEnded)
                self._links.forget(key)
                self._links.send_failure(key, e, handoff=True)
        finally:
            self._pulls.pop(key, None)

    async def _pull_prefix(self, key: str, source: worker_pb2.HandoffSource, timeout_s: float) -> None:
        """What cannot be had is computed: nobody needs to know."""
        try:
            result = await self._sink.pull(key, source, timeout_s)
            self._num_bytes += result.num_bytes
        except DiptychError as e:
            log.info("a cached prefix could not be pulled from %s: %s", source.address, e)
            await self._engine.fail(key, quarantine=False)
        finally:
            self._pulls.pop(key, None)

    def complete(self, load: worker_pb2.LoadReport) -> None:
        """Add what the pulls know."""
        load.handoff_bytes = self._num_bytes
        load.num_handoffs_failed = self._num_failed
        load.num_checksum_failures = self._sink.num_checksum_failures
        del load.links[:]  # it may be a report that is sent again
        load.links.extend(self._sink.transfer_stats())

    # -- SourcePort -------------------------------------------------------------------------------------------------

    def end_lease(self, handoff_id: str) -> None:
        """The blocks leased for this hand-off are free."""
        offered = self._offered.pop(handoff_id, None)
        if offered is not None and not offered.runs_on:
            self._links.forget(offered.key)
        self._engine.end_lease(handoff_id)

    def caught_up(self, handoff_id: str) -> None:
        """A running sequence that is handed off may stop."""
        self._engine.caught_up(handoff_id)

    def reads_took(self, reads: Sequence[tuple[int, float]]) -> None:
        """A sink's reads, by which the engine chooses the size of later segments."""
        self._engine.post(lambda engine: engine.announcer.add_reads(reads))

    # -- from the engine --------------------------------------------------------------------------------------------

    def carry(self, event: HandoffEvent) -> None:
        match event:
            case HandoffOpened():
                self._open(event)
            case HandoffRefused():
                self._source.refuse(event.handoff_id, event.error)
            case SegmentReady():
                self._source.segment(
                    event.handoff_id,
                    event.first_block,
                    event.block_ids,
                    event.generations,
                    event.first_layer,
                    event.num_layers,
                )
            case HandoffHeld():
                self._hold(event.handoff_id, self._source.has_sink(event.handoff_id))
            case HandoffSealed():
                self._seal(event)
            case HandoffEnded():
                self._source.abort(event.handoff_id, event.error)

    def _open(self, event: HandoffOpened) -> None:
        try:
            is_prefix = event.key is None
            self._source.offer(event.handoff_id, event.num_tokens, is_live=event.is_live, prefix=is_prefix)
        except HandoffError as e:
            log.warning("a router offered what cannot be: %s", e)
            self._engine.end_lease(event.handoff_id)
            return
        if event.key is not None:
            self._offered[event.handoff_id] = _Offered(event.key, runs_on=True)

    def _hold(self, handoff_id: str, has_sink: bool) -> None:
        wait_s = self._lease_s * (HOLD_FOR_SINK if has_sink else HOLD_WITHOUT_SINK)
        asyncio.get_running_loop().call_later(wait_s, self._end_hold, handoff_id, has_sink)

    def _end_hold(self, handoff_id: str, had_sink: bool) -> None:
        offered = self._offered.get(handoff_id)
        if offered is None or not offered.runs_on:
            return  # it has ended, or is sealed
        if not had_sink and self._source.has_sink(handoff_id):
            self._hold(handoff_id, True)
        else:
            error = HandoffError("the sink did not catch up in time with the sequence, which runs on at its source")
            self._source.abort(handoff_id, error)

    def _seal(self, event: HandoffSealed) -> None:
        """The router is told after all the sequence's tokens, which went before."""
        if event.key is not None and event.is_live:
            num_outputs = len(event.output_token_ids)
            handed_off = worker_pb2.HandedOff(
                handle=handle_of(event.key), num_output_tokens=num_outputs, handoff_id=event.handoff_id
            )
            self._links.send(event.key, worker_pb2.WorkerMessage(handed_off=handed_off))
            offered = self._offered.get(event.handoff_id)
            if offered is None:  # it ended while the engine sealed it
                self._links.forget(event.key)
            else:
                offered.runs_on = False
        self._source.seal(event.handoff_id, event.num_computed, event.output_token_ids)
