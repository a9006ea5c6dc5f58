"""Three engines of unlike settings, all kinds of requests, and events in any order: answers are those of one engine
that is asked one request at a time, and no block, claim or lease is left.

What a router, two machines and a transport do is done here, a call at a time: hand-offs of prompts, of running
sequences and of prefixes, also of what has just arrived; sinks that lapse; clients that leave; steps without memory.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from diptych.workers.common.errors import DiptychError, InvalidRequest, OutOfDeviceMemory
from diptych.workers.common.request import FinishReason, Request, SamplingParams
from diptych.workers.core.runner import LayerWatch
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Batch, SampledToken, Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.grammar import matcher
from diptych.workers.handoff.types import HandoffOpened, Reservation
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeStep

from ...support.drafters import KnowingDrafter
from ...support.engines import Clock, Move, assert_clean, make, run
from ...support.grammars import compiled
from .test_forced_tokens import FORM
from .test_grammar import WORD

NUM_STEPS, MOST_STEPS = 50, 3000
GRAMMARS = {None: None, "form": FORM, "word": WORD}
COMPILED = {name: grammar and compiled(grammar) for name, grammar in GRAMMARS.items()}


class MovingRunner(FakeRunner):
    """Has no memory for some steps, and notices a block that is given away beneath a step."""

    def __init__(self, rng: random.Random, num_blocks: int, *, looks_ahead: bool, chance: float) -> None:
        super().__init__(num_blocks=num_blocks, looks_ahead=looks_ahead)
        self.chance, self._rng = chance, rng
        self.generations: list[int] = []
        self._given: dict[FakeStep, list[int]] = {}

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> FakeStep:
        step = super().launch(batch, watch)
        self._given[step] = self._contents(step)
        return step

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        assert self._contents(step) == self._given.pop(step), "a block was given to somebody else beneath a step"
        if self._rng.random() < self.chance:
            raise OutOfDeviceMemory("the device has no memory for the step")
        return super()._compute(step)

    def _contents(self, step: FakeStep) -> list[int]:
        return [self.generations[block] for row in step.rows for block in row.table]


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list[int])
    finish: FinishReason | None = None
    prompt_logprobs: dict[int, float] = field(default_factory=dict[int, float])

    def add(self, key: str, output: StepOutput) -> None:
        for of, found in output.prompt_logprobs:
            if of == key:
                self.prompt_logprobs |= dict(enumerate(found.logprobs.tolist(), found.first))
        for event in [event for event in output.tokens if event.key == key]:
            assert event.position == len(self.token_ids), "a token twice, or one is missing"
            self.token_ids.append(event.token_id)
            self.finish = event.finish


@dataclass(eq=False)
class Routed:
    """A request, as its router knows it."""

    request: Request
    grammar: str | None
    expected: Answer
    answer: Answer = field(default_factory=Answer)
    at: dict[str, Engine] = field(default_factory=dict[str, Engine])  # by key; keys are used once
    has_left: bool = False

    @property
    def is_over(self) -> bool:
        return self.has_left or self.answer.finish is not None

    def submit(self, engine: Engine, key: str, known: int | None = None, **how: str | bool | None) -> None:
        """known: output tokens that the engine is told of; None: all."""
        self.at[key] = engine
        scored = self.answer.prompt_logprobs
        request = replace(self.request, first_prompt_logprob=max(scored, default=0) + 1)
        engine.submit(key, request, self.answer.token_ids[:known], grammar=COMPILED[self.grammar], **how)  # type: ignore[arg-type]


@dataclass(eq=False)
class Transfer(Move):
    of: Routed | None = None
    source_key: str = ""  # empty: a prefix
    asked: list[Reservation | DiptychError] | None = None  # for a reservation
    turns: int = 0


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.chance = rng.choice((0.0, 0.02))  # of each unusual event
        self.routed: dict[str, Routed] = {}  # by request id
        self.transfers: list[Transfer] = []
        self.told: list[StepOutput] = []
        self.number = 0
        self.engines = [self.make_engine() for _ in range(3)]

    def make_engine(self) -> Engine:
        rng, looks_ahead = self.rng, self.rng.random() < 0.5
        runner = MovingRunner(rng, rng.choice((17, 20, 34)), looks_ahead=looks_ahead, chance=self.chance)
        drafter = None if looks_ahead else KnowingDrafter(chance=0.8, answer=self.continuation)
        sizes = {"max_batch_tokens": rng.choice((5, 9, 30)), "max_running": rng.choice((2, 4, 256))}
        config, is_cached = SchedulerConfig(chunk_tokens=rng.choice((0, 3)), **sizes), rng.random() < 0.7
        engine = Engine(runner, config, prefix_cache=is_cached, clock=Clock(), drafter=drafter)
        runner.generations = engine.manager.generations
        return engine

    def continuation(self, sequence: Sequence, num_tokens: int) -> list[int]:
        return self.routed[sequence.request_id].expected.token_ids[sequence.num_output :][:num_tokens]

    def name(self) -> str:
        self.number += 1
        return f"0/{self.number}"

    def ask(self) -> None:
        """Ask for one to three completions of a prompt that others may have, or go on with."""
        rng = self.rng
        prompt = [rng.choice((1, 2, 3))] * rng.randint(1, 20)
        if self.routed and rng.random() < 0.5:
            earlier = rng.choice(list(self.routed.values()))
            prompt = [*earlier.request.prompt_token_ids, *earlier.answer.token_ids][:22]
        grammar = rng.choices((None, "form", "word"), (6, 1, 1))[0]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=40 if grammar else rng.choice((1, 2, 9, 24)),
            stop_token_ids=tuple(range(rng.randint(0, 9), 999, 20)) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.3,
            prompt_logprobs=0 if rng.random() < 0.2 else None,
            grammar=GRAMMARS[grammar],
        )
        salt = rng.choice((b"", b"", b"salt of sixteen!"))
        expected = Answer()
        engine = make(64, prefix_cache=False)
        request = Request("alone", tuple(prompt), sampling, timeout_s=1e6, cache_salt=salt)
        engine.submit("0/1", request, [], grammar=COMPILED[grammar])
        for output in run(engine):
            expected.add("0/1", output)
        for _ in range(rng.choice((1, 1, 3))):
            routed = Routed(replace(request, request_id=self.name()), grammar, expected)
            self.routed[routed.request.request_id] = routed
            self.route(routed)

    def route(self, of: Routed) -> None:
        source, sink, third = self.rng.sample(self.engines, 3)
        key, prompt = self.name(), of.request.prompt_token_ids
        way = self.rng.choice(("alone", "prefix", "handoff", "handoff", "chain"))
        if way == "alone":
            of.submit(sink, key)
        elif way == "prefix":
            of.submit(sink, key, prefix=True)
            transfer = self.begin(of, source, sink, key)
            source.outgoing.offer_prefix(transfer.handoff_id, prompt, of.request.cache_salt)
        else:
            source_key, num_tokens = self.name(), len(prompt) + len(of.answer.token_ids)
            transfer = self.begin(of, source, sink, key, source_key, num_tokens)
            of.submit(source, source_key, handoff_id=transfer.handoff_id)
            onward = self.begin(of, sink, third, self.name(), key, num_tokens + 1) if way == "chain" else None
            of.submit(sink, key, importing=True, handoff_id=onward and onward.handoff_id)
            if onward is not None:
                of.submit(third, onward.key, importing=True)

    def begin(
        self, of: Routed, source: Engine, sink: Engine, key: str, source_key: str = "", num_tokens: int = 0
    ) -> Transfer:
        """num_tokens: that are offered; 0: the source will say."""
        transfer = Transfer(source, sink, key, self.name(), of=of, source_key=source_key)
        if num_tokens:
            transfer.opened = HandoffOpened(transfer.handoff_id, source_key, num_tokens, is_live=False)
        self.transfers.append(transfer)
        return transfer

    def offer(self) -> None:
        """Move a running sequence to a sink that knows some of its tokens."""
        moving = {transfer.of for transfer in self.transfers}
        able = [of for of in self.routed.values() if len(of.at) == 1 and of not in moving and of.answer.token_ids]
        if able:
            of = self.rng.choice(able)
            [(source_key, source)] = of.at.items()
            sink = self.rng.choice([engine for engine in self.engines if engine is not source])
            transfer = self.begin(of, source, sink, self.name(), source_key)
            source.outgoing.offer(source_key, transfer.handoff_id)
            of.submit(sink, transfer.key, self.rng.randint(0, len(of.answer.token_ids)), importing=True)

    def end(self, of: Routed) -> None:
        """Abort it everywhere, and end its transfers; ask for it anew if its client waits."""
        for key, engine in of.at.items():
            engine.abort(key)
        of.at.clear()
        for transfer in [each for each in self.transfers if each.of is of]:
            if transfer.source_key:
                transfer.source.abort(transfer.source_key)
            self.give_up(transfer)
        if not of.is_over:
            self.route(of)

    def give_up(self, transfer: Transfer) -> None:
        self.transfers.remove(transfer)
        is_quarantined = transfer.reservation is not None and not transfer.has_begun and self.rng.random() < 0.5
        transfer.sink.fail_import(transfer.key, quarantine=is_quarantined)
        transfer.source.end_lease(transfer.handoff_id)
        transfer.sink.incoming.settle(transfer.key)

    def fail(self, transfer: Transfer) -> None:
        """End a transfer; where nobody has the sequence any more, begin anew."""
        of = transfer.of
        assert of is not None
        self.give_up(transfer)
        if transfer.source_key:
            del of.at[transfer.key]
            if transfer.sealed is not None:
                del of.at[transfer.source_key]
            if not of.at:
                self.end(of)

    def advance(self, transfer: Transfer) -> None:
        """Do one thing that may come next for a transfer."""
        rng, of = self.rng, transfer.of
        assert of is not None
        can_lapse = transfer.sealed is None or transfer.has_begun
        if transfer.over is not None or (can_lapse and rng.random() < self.chance):
            self.fail(transfer)
        elif transfer.reservation is None:
            self.reserve(transfer)
        elif transfer.sealed is None:
            transfer.read()
            if rng.random() < 0.4:
                transfer.source.caught_up(transfer.handoff_id)
        elif transfer.source_key and not transfer.has_begun and rng.random() < 0.5:
            transfer.begin()
        else:
            transfer.commit()
            self.transfers.remove(transfer)
            of.at.pop(transfer.source_key, None)

    def reserve(self, transfer: Transfer) -> None:
        """Ask once, when something can be read, and wait for the blocks, but not for ever."""
        has_begun = bool(transfer.segments) or transfer.sealed is not None
        transfer.turns += has_begun
        if transfer.opened is not None and has_begun and transfer.asked is None:
            transfer.asked = []
            transfer.sink.incoming.reserve(transfer.key, transfer.opened.num_tokens, transfer.asked.append)
        for granted in transfer.asked or ():
            if isinstance(granted, Reservation):
                transfer.reservation = granted
        if transfer.reservation is None and (transfer.asked or transfer.turns > 60):
            self.fail(transfer)

    def step(self) -> None:
        for engine in self.engines:
            if self.rng.random() < self.chance:
                engine.set_prefill_budget(self.rng.choice((0, 3, 99)))
            self.told.append(engine.step(self.told.append))  # one list: a step ahead tells it what it was launched with
            while self.told:
                self.take(engine, self.told.pop(0))
            assert engine.check_integrity().num_unaccounted_blocks == 0

    def take(self, engine: Engine, output: StepOutput) -> None:
        for transfer in self.transfers:
            if transfer.source is engine:
                transfer.hear([output])
        of_key = {key: of for of in self.routed.values() for key in of.at}
        for key in {*output.tokens.keys, *(key for key, _ in output.prompt_logprobs)} & of_key.keys():
            of_key[key].answer.add(key, output)
        # Not a set: the order in which they end is part of what the seed draws.
        for of in dict.fromkeys(of_key[key] for key in output.tokens.keys if key in of_key and of_key[key].is_over):
            self.end(of)
        for failure in output.failures:
            assert not isinstance(failure.error, InvalidRequest), failure.error
            if (of := of_key.get(failure.key)) is not None and failure.key in of.at:
                self.end(of)

    def turn(self) -> None:
        self.step()
        for transfer in list(self.transfers):
            if transfer in self.transfers:
                self.advance(transfer)

    def is_quiet(self) -> bool:
        return not self.transfers and all(of.is_over for of in self.routed.values())

    def calm(self) -> None:
        """Let no unusual event happen any more."""
        self.chance = 0.0
        for engine in self.engines:
            engine.set_prefill_budget(99)
            assert isinstance(engine._runner, MovingRunner)
            engine._runner.chance = 0.0


@pytest.mark.parametrize("seed", range(30))
def test_any_requests_in_any_order_get_the_answers_of_one_at_a_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "MAX_RUN_S", 1e6)
    world = World(seed)
    for _ in range(NUM_STEPS):
        if world.rng.random() < 0.25:
            world.ask()
        world.offer()
        for of in [of for of in world.routed.values() if not of.is_over and world.rng.random() < world.chance / 4]:
            of.has_left = world.rng.random() < 0.5
            world.end(of)
        world.turn()
    world.calm()
    for _ in range(MOST_STEPS):
        if world.is_quiet():
            break
        world.turn()
    for of in world.routed.values():
        assert of.has_left or of.answer == of.expected
    for engine in world.engines:
        run(engine)
        assert_clean(engine)
        shared = engine.scheduler._shared
        assert not (shared._computing or shared._claims or shared._tails or engine._sequences)
