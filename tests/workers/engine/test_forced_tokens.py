"""Tokens that a grammar forces are told and computed several at once: the same tokens as one by one, in fewer steps."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from diptych.workers.common.errors import OutOfDeviceMemory
from diptych.workers.common.request import FinishReason, Grammar, GrammarKind, ThoughtBudget
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import SampledToken
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.grammar import matcher
from diptych.workers.handoff.types import Reservation
from diptych.workers.testing.fake_runner import FakeRunner
from diptych.workers.testing.fake_stream import FakeStep

from ...support.engines import HANDOFF, Move, assert_clean, make, reserve, run, tokens
from ...support.grammars import compiled, regex, text_of
from .test_grammar import answer, submit

FORM = regex("[a-z]{2}:identification:[a-z]{2};occupation:(reader|writer|owner);")
PROMPTS = [(3, 1, 4, 1, 5), (2, 7), tuple(range(40, 60)), (999,), (1, 2, 3)]


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a run is found whole."""
    monkeypatch.setattr(matcher, "MAX_RUN_S", math.inf)


def begin(engine: Engine, **how: Any) -> None:
    submit(engine, compiled(FORM), FORM, **how)


def one_by_one(prompt: Sequence[int] = PROMPTS[0], **how: Any) -> list[int]:
    """The answer where every token has a step: one that asks for log-probabilities."""
    engine = make()
    begin(engine, prompt=prompt, logprobs=0, **how)
    outputs = run(engine)
    assert all(len(output.tokens) <= 1 for output in outputs)
    return [token.token_id for token in tokens(outputs, "0/1")]


def most(outputs: list[StepOutput]) -> int:
    """The most tokens of a step."""
    return max(len(output.tokens) for output in outputs)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_forced_tokens_come_at_once_and_are_those_that_would_come_one_by_one(prompt: tuple[int, ...]) -> None:
    engine = make()
    begin(engine, prompt=prompt)
    outputs = run(engine)
    events = tokens(outputs, "0/1")
    assert [event.token_id for event in events] == one_by_one(prompt)
    assert [event.position for event in events] == list(range(len(events)))
    assert most(outputs) >= len(":identification:") and len(outputs) < len(events) / 3
    assert [event.finish for event in events] == [None] * (len(events) - 1) + [FinishReason.STOP]
    load = engine.check_integrity().load
    assert load.num_forced_tokens == len(events) - len([output for output in outputs if output.tokens])
    assert (load.num_prefill_tokens, load.num_decode_tokens) == (len(prompt), len(events) - 1)
    assert_clean(engine)


@pytest.mark.parametrize("config", [{"max_batch_tokens": 7}, {"chunk_tokens": 3}, {"max_running": 2}])
def test_they_are_the_same_among_others_in_small_steps(config: dict[str, int]) -> None:
    engine = make(num_blocks=128, **config)
    for i, prompt in enumerate(PROMPTS):
        begin(engine, key=f"0/{i}", prompt=prompt)
    outputs = run(engine)
    for i, prompt in enumerate(PROMPTS):
        assert [token.token_id for token in tokens(outputs, f"0/{i}")] == one_by_one(prompt)
    assert_clean(engine)


def test_they_are_the_same_where_blocks_are_short() -> None:
    engine = make(num_blocks=20, prefix_cache=False)
    for i in range(3):
        begin(engine, key=f"0/{i}", prompt=PROMPTS[i], max_tokens=50)
    outputs = run(engine)
    assert engine.scheduler.num_preemptions
    for i in range(3):
        assert [token.token_id for token in tokens(outputs, f"0/{i}")] == one_by_one(PROMPTS[i])
    assert_clean(engine)


def test_the_first_tokens_details_come_with_the_first_token_of_a_run() -> None:
    word, engine = regex("identification(a|b)"), make()
    submit(engine, compiled(word), word)
    events = tokens(run(engine), "0/1")
    assert [event.num_cached for event in events] == [0] + [None] * (len(events) - 1)
    assert [event.timings is None for event in events] == [False] + [True] * (len(events) - 1)


def test_a_run_ends_with_the_last_token_that_was_asked_for() -> None:
    whole = one_by_one()
    for max_tokens in range(1, len(whole)):
        engine = make()
        begin(engine, max_tokens=max_tokens)
        events = tokens(run(engine), "0/1")
        assert [event.token_id for event in events] == whole[:max_tokens]
        assert [event.finish for event in events] == [None] * (max_tokens - 1) + [FinishReason.LENGTH]
        assert_clean(engine)


def test_a_run_ends_with_the_first_token_that_stops_it() -> None:
    whole = one_by_one()
    for stop in set(whole):
        engine = make()
        begin(engine, stop_token_ids=(stop,))
        events = tokens(run(engine), "0/1")
        at = whole.index(stop)
        assert [event.token_id for event in events] == whole[: at + 1] and events[-1].finish is FinishReason.STOP


def test_a_grammar_after_a_thought_forces_tokens_and_a_thought_does_not() -> None:
    thought = ThoughtBudget(4, begin_id=1, end_id=ord("!") + 1, is_open=True)
    grammar = regex("aaaaaa!identification(x|y)")
    engine = make()
    submit(engine, compiled(grammar), grammar, thought=thought, max_tokens=40)
    outputs = run(engine)
    ids = [token.token_id for token in tokens(outputs, "0/1")]
    assert text_of(ids)[:-1] == "aaaaaa!identification"
    lengths = [len(output.tokens) for output in outputs if output.tokens]
    assert lengths[:7] == [1] * 7 and lengths[7] > 5


def test_a_resumed_answer_goes_on_from_the_middle_of_a_run() -> None:
    whole = one_by_one()
    for num in range(1, len(whole)):
        engine = make()
        begin(engine, outputs=whole[:num])
        assert answer(engine) == whole[num:]


@pytest.mark.parametrize("is_provisional", [False, True])
@pytest.mark.parametrize("num_before", [0, 1, 3, 16, 20])
def test_a_source_leaves_a_run_to_its_sink(num_before: int, is_provisional: bool) -> None:
    whole = one_by_one()
    source, sink = make(), make()
    begin(sink, importing=True, outputs=whole[:num_before])
    granted = reserve(sink, "0/1", 5 + num_before)
    assert isinstance(granted, Reservation)
    move = Move(source, sink, reservation=granted)
    begin(source, handoff_id=HANDOFF, outputs=whole[:num_before])
    first = tokens(move.hear(run(source)), "0/1")
    assert [token.token_id for token in first] == whole[num_before : num_before + 1]
    if is_provisional:
        move.begin()
        assert not sink.step().tokens
    move.commit()
    rest = [token.token_id for token in tokens(run(sink), "0/1")]
    assert rest == whole[num_before + 1 :]
    run(source)
    assert_clean(source)
    assert_clean(sink)


def test_a_sequence_is_offered_and_sealed_wherever_its_runs_are() -> None:
    """It is offered before a step, perhaps with a run that is not computed; its sink has caught up at once."""
    whole, num_runs = one_by_one(), 0
    for num_steps in range(1, 6):
        source, sink = make(), make()
        begin(source)
        before = tokens([source.step() for _ in range(num_steps)], "0/1")
        num_runs += next(source.scheduler.sequences()).num_uncomputed > 1
        source.outgoing.offer("0/1", HANDOFF)
        source.caught_up(HANDOFF)
        move = Move(source, sink)
        later = tokens(move.hear(run(source)), "0/1")
        assert move.over is None
        known = [token.token_id for token in (*before, *later)]
        begin(sink, importing=True, outputs=known[: len(before)])
        move.read()
        move.commit()
        assert known + [token.token_id for token in tokens(run(sink), "0/1")] == whole
        run(source)
        assert_clean(source)
        assert_clean(sink)
    assert num_runs > 1


class FullOnce(FakeRunner):
    """Has no memory for one step that computes a run beside a prompt."""

    is_full = True

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        has_run = any(row.start and len(row.token_ids) - row.start > 1 for row in step.rows)
        if self.is_full and has_run and not all(row.start for row in step.rows):
            self.is_full = False
            raise OutOfDeviceMemory("the device has no memory")
        return super()._compute(step)


def test_where_a_step_has_no_memory_its_prompts_end_and_its_runs_are_computed_again() -> None:
    runner = FullOnce(num_blocks=64)
    engine = Engine(runner, SchedulerConfig())
    begin(engine)
    outputs = [engine.step() for _ in range(3)]
    begin(engine, key="0/2", prompt=PROMPTS[1])
    outputs += run(engine)
    assert not runner.is_full
    assert [failure.key for output in outputs for failure in output.failures] == ["0/2"]
    assert [token.token_id for token in tokens(outputs, "0/1")] == one_by_one()
    assert_clean(engine)


def test_a_long_run_is_cut_and_goes_on() -> None:
    schema = {"const": "x" * 150, "x-guidance": {"whitespace_flexible": False}}
    of = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    engine = make(num_blocks=128)
    submit(engine, compiled(of), of)
    outputs = run(engine)
    ids = [token.token_id for token in tokens(outputs, "0/1")]
    assert json.loads(text_of(ids)) == schema["const"]
    assert [len(output.tokens) for output in outputs if output.tokens][:2] == [64, 64]
