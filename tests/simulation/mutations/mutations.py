"""Bugs to plant in the real code, each a few lines that somebody could have written. test_mutations.py finds them all.

A mutation is a function that returns what to replace: (class or module, attribute, new value).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

from diptych.cluster.routing.request_handoff import RequestHandoff
from diptych.cluster.routing.request_state import RequestState
from diptych.cluster.routing.worker_link import WorkerLink
from diptych.workers.core.block_manager import BlockManager
from diptych.workers.core.prefix_cache import PrefixCache
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.incoming import IncomingHandoffs
from diptych.workers.engine.outgoing import OutgoingHandoffs, _OutgoingHandoff
from diptych.workers.handoff.pull import Pull
from diptych.workers.handoff.sink_machine import SinkHandoff
from diptych.workers.handoff.source import HandoffSource
from diptych.workers.handoff.source_machine import SourceHandoff
from diptych.workers.handoff.types import Abandon, Answer, Commit, EndLease, Fail, Release, Renew, SegmentReady
from diptych.workers.kv.segment import Read
from diptych.workers.server.pulls import Pulls
from diptych.workers.server.service import WorkerService

Replacement = tuple[Any, str, Any]


@contextmanager
def planted(replacements: list[Replacement]) -> Iterator[None]:
    kept = [(cls, name, cls.__dict__[name]) for cls, name, _ in replacements]
    for cls, name, new in replacements:
        setattr(cls, name, new)
    try:
        yield
    finally:
        for cls, name, old in kept:
            setattr(cls, name, old)


def _without(cls: type[Any], name: str, kind: type) -> list[Replacement]:
    """The method's actions without those of one kind."""
    real = getattr(cls, name)
    return [(cls, name, lambda *args, **kw: [a for a in real(*args, **kw) if not isinstance(a, kind)])]


def source_never_asks_whether_a_sink_may_read() -> list[Replacement]:
    return [(SourceHandoff, "may_read", lambda *_: True)]


def may_read_skips_the_generation() -> list[Replacement]:
    def may_read(self: SourceHandoff, sink: str, segment: Any, now: float) -> bool:
        return self.is_held_by(sink) and all(
            position in self._named and self._named[position][0] == block
            for position, block in zip(segment.positions, segment.block_ids, strict=True)
        )

    return [(SourceHandoff, "may_read", may_read)]


def may_read_skips_the_sink() -> list[Replacement]:
    real = SourceHandoff.may_read

    def may_read(self: SourceHandoff, sink: str, segment: Any, now: float) -> bool:
        return self.sink is not None and real(self, self.sink, segment, now)

    return [(SourceHandoff, "may_read", may_read), (SourceHandoff, "is_held_by", lambda self, _: self.is_live)]


def release_is_always_held() -> list[Replacement]:
    real = SourceHandoff.release

    def release(self: SourceHandoff, sink: str, now: float) -> Any:
        return [*(a for a in real(self, sink, now) if not isinstance(a, Answer)), Answer(True)]

    return [(SourceHandoff, "release", release)]


def expiry_frees_nothing() -> list[Replacement]:
    return _without(SourceHandoff, "tick", EndLease)


def source_never_expires() -> list[Replacement]:
    return [(SourceHandoff, "tick", lambda *_: [])]


def another_sink_is_accepted_while_one_holds() -> list[Replacement]:
    real = SourceHandoff.subscribe

    def subscribe(self: SourceHandoff, sink: str, now: float) -> Any:
        self.sink = None
        return real(self, sink, now)

    return [
        (SourceHandoff, "subscribe", subscribe),
        (SourceHandoff, "is_held_by", lambda self, _: self.is_live),
    ]


def source_does_not_let_a_leaving_sink_go() -> list[Replacement]:
    return [(SourceHandoff, "leave", lambda *_: [])]


def source_forgets_the_engines_abort() -> list[Replacement]:
    return [(HandoffSource, "abort", lambda *_: None)]


def lease_is_never_renewed() -> list[Replacement]:
    return _without(SinkHandoff, "_ask", Renew)


def commit_without_a_positive_release() -> list[Replacement]:
    real = SinkHandoff.released
    return [(SinkHandoff, "released", lambda self, held, now: real(self, True, now))]


def commit_without_a_release() -> list[Replacement]:
    real = SinkHandoff._ask

    def ask(self: SinkHandoff, now: float) -> Any:
        actions = real(self, now)
        if actions and isinstance(actions[0], Release):
            return self.released(True, now)
        return actions

    return [(SinkHandoff, "_ask", ask)]


def no_quarantine() -> list[Replacement]:
    real = SinkHandoff.failed

    def failed(self: SinkHandoff, *args: Any) -> Any:
        return [Fail(a.error, False) if isinstance(a, Fail) else a for a in real(self, *args)]

    return [(SinkHandoff, "failed", failed)]


def quarantine_ends_before_the_reads_have() -> list[Replacement]:
    return [(Pull, "_connected", lambda self: None)]


def sink_does_not_hang_up() -> list[Replacement]:
    return [*_without(SinkHandoff, "failed", Abandon), (Pull, "_stop_workers", lambda self: [])]


def the_last_segment_is_not_read() -> list[Replacement]:
    real = SinkHandoff._read

    def read(self: SinkHandoff, number: int) -> Any:
        actions = real(self, number)
        if number and actions and isinstance(actions[0], Read):
            self._reading.discard(number)
            return []
        return actions

    return [(SinkHandoff, "_read", read)]


def released_before_the_last_read_is_done() -> list[Replacement]:
    real = SinkHandoff._say_when_read

    def say_when_read(self: SinkHandoff, now: float) -> Any:
        reading, self._reading = self._reading, set()
        actions = real(self, now)
        self._reading = reading
        return actions

    return [(SinkHandoff, "_say_when_read", say_when_read)]


def leased_blocks_are_released_at_the_seal() -> list[Replacement]:
    real = OutgoingHandoffs.seal

    def seal(self: OutgoingHandoffs, sequence: Any) -> None:
        real(self, sequence)
        outgoing = self._outgoing[sequence.handoff_id]
        self._manager.end_lease(outgoing.leased)
        outgoing.leased = []

    return [(OutgoingHandoffs, "seal", seal)]


def a_lease_is_ended_twice() -> list[Replacement]:
    def end_lease(self: OutgoingHandoffs, handoff_id: str, reads: Any) -> None:
        outgoing = self._outgoing.get(handoff_id)
        if outgoing is not None:
            self._manager.end_lease(outgoing.leased)

    return [(OutgoingHandoffs, "end_lease", end_lease)]


def announced_blocks_are_not_leased() -> list[Replacement]:
    def lease(self: BlockManager, blocks: Any) -> None:
        self._leased.update(blocks)

    def end_lease(self: BlockManager, blocks: Any) -> None:
        self._leased.subtract(blocks)
        self._leased += type(self._leased)()

    return [(BlockManager, "lease", lease), (BlockManager, "end_lease", end_lease)]


def a_failed_pull_keeps_its_blocks() -> list[Replacement]:
    return [(Engine, "fail_import", lambda self, key, quarantine: None)]


def commit_counts_a_block_too_many() -> list[Replacement]:
    real = IncomingHandoffs.reserve

    def reserve(self: IncomingHandoffs, key: str, num_tokens: int, grant: Any) -> None:
        def more(result: Any) -> object:
            if hasattr(result, "num_held_tokens"):
                result = type(result)(result.block_ids, result.num_held_tokens + self._cache.block_size)
            return grant(result)

        real(self, key, num_tokens, more)

    return [(IncomingHandoffs, "reserve", reserve)]


def blocks_are_cached_before_they_are_computed() -> list[Replacement]:
    real = PrefixCache.insert

    def insert(self: PrefixCache, sequence: Any, first_block: int) -> None:
        computed, sequence.num_computed = sequence.num_computed, sequence.num_tokens
        real(self, sequence, first_block)
        sequence.num_computed = computed

    return [(PrefixCache, "insert", insert)]


def a_token_is_told_before_the_release_is_answered() -> list[Replacement]:
    real = Engine._accept

    def accept(self: Engine, sampled: Any) -> None:
        for token in sampled:
            if token.sequence.provisional is not None:
                self._output.tokens.keys.append(token.sequence.key)
                self._output.tokens.token_ids.append(token.token_id)
                self._output.tokens.positions.append(token.sequence.num_output)
        real(self, sampled)

    return [(Engine, "_accept", accept)]


def a_silent_source_counts_as_a_release() -> list[Replacement]:
    real = SinkHandoff.tick

    def tick(self: SinkHandoff, now: float) -> Any:
        actions = real(self, now)
        is_late = self._seal is not None and actions and isinstance(actions[0], Fail) and not actions[0].quarantine
        return [Commit(self._seal)] if self._seal and is_late else actions

    return [(SinkHandoff, "tick", tick)]


def what_is_provisional_is_cached() -> list[Replacement]:
    real = IncomingHandoffs.begin

    def begin(self: IncomingHandoffs, key: str, *args: Any) -> None:
        real(self, key, *args)
        if key in self._incoming and self._incoming[key].sequence.provisional is not None:
            self._cache.insert(self._incoming[key].sequence, 0)

    return [(IncomingHandoffs, "begin", begin)]


def what_has_begun_runs_on_after_its_pull_failed() -> list[Replacement]:
    return [(IncomingHandoffs, "_stop", lambda self, sequence: None)]


def a_broken_link_aborts_nothing() -> list[Replacement]:
    real = WorkerService._abort

    def abort(self: WorkerService, link: Any, key: str) -> None:
        if link in self._links:
            real(self, link, key)

    return [(WorkerService, "_abort", abort)]


def a_pull_is_cancelled_before_it_began() -> list[Replacement]:
    def cancel(self: Pulls, key: str) -> None:
        if key in self._tasks:
            self._tasks[key].cancel()

    return [(Pulls, "cancel", cancel)]


def resume_repeats_a_token() -> list[Replacement]:
    real = RequestState.begin

    def begin(self: RequestState, *args: Any, **kwargs: Any) -> Any:
        kept = self.token_ids
        self.token_ids = kept[:-1]
        try:
            return real(self, *args, **kwargs)
        finally:
            self.token_ids = kept

    take = RequestState._accept

    def accept(self: RequestState, token: Any) -> Any:
        return take(self, token._replace(position=len(self.token_ids)))

    return [(RequestState, "begin", begin), (RequestState, "_accept", accept)]


def early_tokens_are_dropped() -> list[Replacement]:
    return [(RequestHandoff, "hold", lambda *_: None)]


def early_tokens_are_not_kept_back() -> list[Replacement]:
    real = RequestState._accept_in_handoff

    def accept(self: RequestState, handoff: Any, worker_request: Any, token: Any) -> Any:
        if worker_request is handoff.source:
            return real(self, handoff, worker_request, token)
        return self._accept(token._replace(position=len(self.token_ids)))

    return [(RequestState, "_accept_in_handoff", accept)]


def a_worker_request_is_not_aborted() -> list[Replacement]:
    return [(WorkerLink, "abort", lambda self, handle: self.forget(handle))]


def a_live_seal_forgets_the_partial_block() -> list[Replacement]:
    real = OutgoingHandoffs.seal

    def seal(self: OutgoingHandoffs, sequence: Any) -> None:
        before, self.events = self.events, []
        real(self, sequence)
        last = [e for e in self.events if not (isinstance(e, SegmentReady) and len(e.segment.block_ids) == 1)]
        self.events = before + last

    return [(OutgoingHandoffs, "seal", seal)]


def a_sequence_runs_on_after_its_seal() -> list[Replacement]:
    real = Engine._seal

    def seal(self: Engine, sequence: Any) -> None:
        real(self, sequence)
        if self.outgoing.events[-1].is_live:
            self._sequences[sequence.key] = sequence
            sequence.handoff_id, sequence.num_computed = None, 0
            self.scheduler.add(sequence)

    return [(Engine, "_seal", seal)]


def handed_off_names_a_token_too_few() -> list[Replacement]:
    real = HandoffSource._seal

    def seal(self: HandoffSource, event: Any) -> None:
        real(self, replace(event, output_token_ids=event.output_token_ids[:-1]) if event.is_live else event)

    return [(HandoffSource, "_seal", seal)]


def a_prefix_counts_a_block_too_many() -> list[Replacement]:
    real = IncomingHandoffs._take_prefix

    def take_prefix(self: IncomingHandoffs, incoming: Any, seal: Any) -> None:
        real(self, incoming, seal)
        sequence = incoming.sequence
        sequence.num_computed = min(sequence.num_computed + 1, sequence.num_tokens - 1)

    return [(IncomingHandoffs, "_take_prefix", take_prefix)]


def a_failed_migration_stops_its_source() -> list[Replacement]:
    return [(_OutgoingHandoff, "running", property(lambda self: None))]


MUTATIONS: tuple[Callable[[], list[Replacement]], ...] = tuple(
    f
    for name, f in list(globals().items())
    if isinstance(f, FunctionType) and f.__module__ == __name__ and not name.startswith("_") and name != "planted"
)
