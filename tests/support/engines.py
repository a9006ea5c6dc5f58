"""Engines over the FakeRunner, and what moves KV between two of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.workers.common.errors import DiptychError
from diptych.workers.common.timings import PullTimes
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput, TokenEvent
from diptych.workers.handoff.types import (
    HandoffEnded,
    HandoffOpened,
    HandoffRefused,
    HandoffSealed,
    Reservation,
    Seal,
    SegmentReady,
)
from diptych.workers.kv.segment import Segment
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeStep

from .sequences import make_request

HANDOFF = "handoff-1"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(num_blocks: int = 64, *, prefix_cache: bool = True, clock: Clock | None = None, **config: int) -> Engine:
    runner = FakeRunner(num_blocks=num_blocks)
    return Engine(runner, SchedulerConfig(**config), prefix_cache=prefix_cache, clock=clock or Clock())


class SlowRunner(FakeRunner):
    """A step takes two seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        self._clock.now += 2
        return super()._compute(step)


def make_slow(clock: Clock, chunk_tokens: int = 0) -> Engine:
    return Engine(SlowRunner(clock), SchedulerConfig(chunk_tokens=chunk_tokens), clock=clock)


def run(engine: Engine, limit: int = 1000) -> list[StepOutput]:
    """Step until nothing is left to compute."""
    outputs = [engine.step()]
    while engine.scheduler.has_work or engine.steps:
        outputs.append(engine.step())
        assert len(outputs) < limit
    return outputs


def tokens(outputs: list[StepOutput], key: str) -> list[TokenEvent]:
    return [t for o in outputs for t in o.tokens if t.key == key]


def assert_clean(engine: Engine) -> None:
    state = engine.check_integrity()
    assert state.num_unaccounted_blocks == 0
    assert state.num_open_handoffs == 0
    assert state.load.num_free_blocks == state.load.num_blocks
    assert state.load.num_leased_blocks == state.load.num_quarantined_blocks == 0


def copy_blocks(source: Engine, sink: Engine, segment: Segment, reservation: Reservation) -> None:
    """Copy the layers of blocks as a transport does."""
    layers = slice(segment.first_layer, segment.first_layer + segment.num_layers)
    for i, block in enumerate(segment.block_ids, segment.first_block):
        if i * source.cache.block_size >= reservation.num_held_tokens:
            sink._runner._kv[reservation.block_ids[i], layers] = source._runner._kv[block, layers]


def make_seal(num_computed: int, output_token_ids: Sequence[int] = (), num_draft_computed: int = 0) -> Seal:
    """Make a Seal without a count of segments, which engines do not read."""
    return Seal(0, num_computed, tuple(output_token_ids), num_draft_computed)


def seal_of(event: HandoffSealed) -> Seal:
    outputs = tuple(event.output_token_ids)
    return Seal(0, event.num_computed, outputs, event.num_draft_computed, event.num_inexact)


def reserve(sink: Engine, key: str, num_tokens: int) -> Reservation | DiptychError | None:
    answers: list[Reservation | DiptychError] = []
    sink.incoming.reserve(key, num_tokens, answers.append)
    return answers[0] if answers else None


@dataclass
class Move:
    """Hand-off between two engines: what machines and a transport do, a call at a time."""

    source: Engine
    sink: Engine
    key: str = "0/1"  # at the sink
    handoff_id: str = HANDOFF
    opened: HandoffOpened | None = None
    segments: list[Segment] = field(default_factory=list[Segment])
    sealed: HandoffSealed | None = None
    over: DiptychError | None = None
    reservation: Reservation | None = None
    num_read: int = 0
    has_begun: bool = False

    def hear(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Process the events of the source's engine for this hand-off."""
        for event in [e for o in outputs for e in o.handoffs if e.handoff_id == self.handoff_id]:
            assert self.sealed is None or isinstance(event, HandoffEnded)
            match event:
                case HandoffOpened():
                    self.opened = event
                case SegmentReady():
                    layer = event.segment.first_layer
                    before = (len(s.block_ids) for s in self.segments if s.first_layer == layer)
                    assert event.segment.first_block == sum(before)
                    self.segments.append(event.segment)
                case HandoffSealed():
                    self.sealed = event
                case HandoffEnded() | HandoffRefused():
                    self.over = event.error
        return outputs

    def read(self) -> None:
        """Everything that was announced; a block that changes later has been read too early."""
        if self.reservation is None:
            assert self.opened is not None
            granted = reserve(self.sink, self.key, self.opened.num_tokens)
            assert isinstance(granted, Reservation)
            self.reservation = granted
        for segment in self.segments[self.num_read :]:
            copy_blocks(self.source, self.sink, segment, self.reservation)
        self.num_read = len(self.segments)

    def begin(self) -> None:
        """All is read, and the source is being asked whether the lease held."""
        self.read()
        assert self.sealed is not None
        self.sink.begin(self.key, seal_of(self.sealed))
        self.has_begun = True

    def commit(self) -> None:
        """All is read, and the source confirms that the lease held."""
        self.read()
        assert self.sealed is not None
        self.source.end_lease(self.handoff_id)
        self.sink.commit(self.key, seal_of(self.sealed), PullTimes())


def hand_over(sink: Engine, prompt: list[int], max_tokens: int = 6) -> Move:
    """A prompt that another engine has computed, all but released."""
    source = make()
    move = Move(source, sink)
    request = make_request(prompt, max_tokens)
    sink.submit(move.key, request, [], importing=True)
    granted = reserve(sink, move.key, len(prompt))
    assert isinstance(granted, Reservation)
    move.reservation = granted
    source.submit("0/0", request, [], handoff_id=move.handoff_id)
    move.hear(run(source))
    for segment in move.segments:
        copy_blocks(source, sink, segment, granted)
    move.num_read = len(move.segments)
    return move
