"""Answers that follow a grammar, by the engine with the FakeRunner: alone, together, resumed, handed off, dead ends."""

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diptych.workers.common.errors import InternalError, InvalidGrammar, StepFailedAlone
from diptych.workers.common.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    ThoughtBudget,
)
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.grammar.compiler import CompiledGrammar
from diptych.workers.handoff.types import Reservation
from diptych.workers.sampling import grammar_masks
from diptych.workers.sampling.grammar_masks import GrammarMasks, MaskRow, Masks
from diptych.workers.testing.fake_runner import FakeRunner

from ...support.engines import HANDOFF, Move, assert_clean, make, reserve, run, tokens
from ...support.grammars import compiled, regex, text_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "grace"]},
        "ages": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # the FakeRunner likes blanks
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
WORD = regex("[a-f]{3,8}")


def submit(
    engine: Engine,
    grammar: CompiledGrammar | None,
    of: Grammar | None,
    *,
    key: str = "0/1",
    outputs: Sequence[int] = (),
    prompt: Sequence[int] = (3, 1, 4, 1, 5),
    importing: bool = False,
    handoff_id: str | None = None,
    **sampling: Any,
) -> None:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 200, **sampling}, grammar=of)
    request = Request("request", tuple(prompt), given, timeout_s=60.0)
    engine.submit(key, request, list(outputs), grammar=grammar, importing=importing, handoff_id=handoff_id)


def answer(engine: Engine, key: str = "0/1") -> list[int]:
    return [event.token_id for event in tokens(run(engine), key)]


def reserved(source: Engine, sink: Engine, num_tokens: int) -> Move:
    """Hand-off to a sink that has blocks for it."""
    granted = reserve(sink, "0/1", num_tokens)
    assert isinstance(granted, Reservation)
    return Move(source, sink, reservation=granted)


@pytest.mark.parametrize("chunk_tokens", [0, 2])
def test_an_answer_follows_its_grammar_and_ends_where_it_does(chunk_tokens: int) -> None:
    engine = make(chunk_tokens=chunk_tokens)
    submit(engine, compiled(WORD), WORD)
    events = tokens(run(engine), "0/1")
    ids = [event.token_id for event in events]
    assert re.fullmatch("[a-f]{3,8}", text_of(ids)) and ids[-1] == 0
    assert [event.finish for event in events] == [None] * (len(ids) - 1) + [FinishReason.STOP]
    assert_clean(engine)


def test_json_is_valid_and_the_same_among_others() -> None:
    alone: list[list[int]] = []
    grammar = compiled(JSON)
    for i in range(8):
        engine = make()
        submit(engine, grammar, JSON, prompt=(i * 131, 5, 7, 1, 2, 3))
        alone.append(answer(engine))
    engine = make(num_blocks=1024)
    for i in range(8):
        submit(engine, grammar, JSON, key=f"0/{i}", prompt=(i * 131, 5, 7, 1, 2, 3))
        submit(engine, compiled(WORD), WORD, key=f"1/{i}", prompt=range(i, i + 4))
    outputs = run(engine)
    assert [[t.token_id for t in tokens(outputs, f"0/{i}")] for i in range(8)] == alone
    finished = [ids for ids in alone if ids[-1] == 0]
    assert len({tuple(ids) for ids in finished}) > 3
    assert all(set(json.loads(text_of(ids))) == {"name", "ages"} for ids in finished)
    assert_clean(engine)


def test_a_resumed_answer_goes_on_as_it_would_have() -> None:
    grammar, engine = compiled(JSON), make()
    submit(engine, grammar, JSON)
    whole = answer(engine)
    for num in range(1, len(whole)):
        submit(engine, grammar, JSON, key=f"0/{num + 1}", outputs=whole[:num])
        assert answer(engine, f"0/{num + 1}") == whole[num:]


@pytest.mark.parametrize("num_before", [0, 4])
def test_an_answer_survives_its_hand_off(num_before: int) -> None:
    grammar, lone = compiled(JSON), make()
    submit(lone, grammar, JSON)
    whole = answer(lone)
    source, sink = make(), make()
    submit(sink, compiled(JSON), JSON, importing=True, outputs=whole[:num_before])
    move = reserved(source, sink, 5 + num_before)
    submit(source, grammar, JSON, handoff_id=HANDOFF, outputs=whole[:num_before])
    first = move.hear(run(source))
    move.read()
    move.commit()
    rest = [t.token_id for t in tokens(run(sink), "0/1")]
    assert whole[:num_before] + [t.token_id for t in tokens(first, "0/1")] + rest == whole
    source.end_lease(HANDOFF)
    run(source)
    assert_clean(source)
    assert_clean(sink)


def test_an_answer_that_begins_before_its_source_answers_is_the_same() -> None:
    grammar, lone = compiled(JSON), make()
    submit(lone, grammar, JSON)
    whole = answer(lone)
    source, sink = make(), make()
    submit(sink, grammar, JSON, importing=True)
    move = reserved(source, sink, 5)
    submit(source, grammar, JSON, handoff_id=HANDOFF)
    first = move.hear(run(source))
    move.begin()
    sink.step()
    move.commit()
    assert [t.token_id for t in tokens([*first, *run(sink)], "0/1")] == whole


def test_a_preempted_answer_is_the_same() -> None:
    grammar = compiled(JSON)
    alone: list[list[int]] = []
    for i in range(4):
        engine = make()
        submit(engine, grammar, JSON, prompt=(i * 131, 5, 7, 1, 2, 3), max_tokens=50)
        alone.append(answer(engine))
    engine = make(num_blocks=20, prefix_cache=False)
    for i in range(4):
        submit(engine, grammar, JSON, key=f"0/{i}", prompt=(i * 131, 5, 7, 1, 2, 3), max_tokens=50)
    outputs = run(engine)
    assert engine.scheduler.num_preemptions
    assert [[t.token_id for t in tokens(outputs, f"0/{i}")] for i in range(4)] == alone


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 50}, {"stop_token_ids": (1,)}])
def test_the_end_of_a_grammar_ends_the_answer_whatever_else_is_asked(sampling: dict[str, Any]) -> None:
    """A grammar that allows only its end outweighs ignore_eos and min_tokens."""
    engine = make()
    submit(engine, compiled(WORD), WORD, **sampling)
    events = tokens(run(engine), "0/1")
    assert re.fullmatch("[a-f]{3,8}", text_of([event.token_id for event in events]))
    assert events[-1].finish is FinishReason.STOP


def test_min_tokens_bans_an_early_end() -> None:
    long = regex("a{2,20}")
    engine = make()
    submit(engine, compiled(long), long, min_tokens=11)
    assert len(answer(engine)) >= 11


def test_an_answer_that_cannot_follow_its_grammar_ends_with_an_error_and_others_go_on() -> None:
    """A vocabulary without the bytes that the grammar needs: nothing may follow."""
    cut = 110  # without most letters
    beyond = regex("abz")
    engine = Engine(FakeRunner(vocab_size=cut, num_blocks=64), SchedulerConfig())
    submit(engine, compiled(beyond, cut), beyond, key="0/1")
    submit(engine, compiled(WORD, cut), WORD, key="0/2")
    outputs = run(engine)
    outputs.append(engine.step())
    [failure] = [failure for output in outputs for failure in output.failures]
    assert failure.key == "0/1" and isinstance(failure.error, InvalidGrammar)
    assert "cannot follow its grammar after" in failure.error.message
    assert tokens(outputs, "0/2")[-1].finish is FinishReason.STOP
    assert_clean(engine)


def test_tokens_that_do_not_follow_the_grammar_end_a_resumed_request() -> None:
    engine = make()
    submit(engine, compiled(WORD), WORD, outputs=(5, 6))
    outputs = [*run(engine), engine.step()]
    [failure] = [failure for output in outputs for failure in output.failures]
    assert isinstance(failure.error, InvalidGrammar) and not tokens(outputs, "0/1")
    assert_clean(engine)


def test_a_runner_that_looks_ahead_gives_the_same_answer() -> None:
    grammar = compiled(JSON)
    engine = make()
    submit(engine, grammar, JSON)
    whole = answer(engine)
    ahead = Engine(FakeRunner(num_blocks=64, looks_ahead=True), SchedulerConfig())
    submit(ahead, grammar, JSON)
    assert answer(ahead) == whole


THOUGHT = ThoughtBudget(6, begin_id=1, end_id=ord("!") + 1, is_open=True)
THEN_WORD = regex("(?s:[^!]*)![a-f]{3,8}")  # a thought, and the grammar after it


@pytest.mark.parametrize("grammar", [None, THEN_WORD], ids=["free", "grammar"])
@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_a_thought_ends_when_its_budget_is_spent_wherever_it_goes_on(grammar: Grammar | None, num_tokens: int) -> None:
    thought = replace(THOUGHT, num_tokens=num_tokens)

    def begin(engine: Engine, outputs: Sequence[int] = (), **how: Any) -> None:
        made = None if grammar is None else compiled(grammar)
        submit(engine, made, grammar, outputs=outputs, thought=thought, max_tokens=20, **how)

    lone = make()
    begin(lone)
    whole = answer(lone)
    at = whole.index(thought.end_id)
    # A grammar knows no half characters: the mark follows the end of the one that the budget would cut.
    assert at == num_tokens or (grammar is not None and num_tokens < at <= num_tokens + 3)
    assert len(whole) > at + 3
    if grammar is not None:
        assert re.fullmatch("[a-f]{3,8}", text_of(whole[at + 1 :]))
    ahead = Engine(FakeRunner(num_blocks=64, looks_ahead=True), SchedulerConfig())
    begin(ahead)
    assert answer(ahead) == whole
    for num in range(1, len(whole)):
        resumed = make()
        begin(resumed, whole[:num])
        assert answer(resumed) == whole[num:]
    for num_before in (0, max(num_tokens - 1, 0)):
        source, sink = make(), make()
        begin(sink, whole[:num_before], importing=True)
        move = reserved(source, sink, 5 + num_before)
        begin(source, whole[:num_before], handoff_id=HANDOFF)
        first = move.hear(run(source))
        move.read()
        move.commit()
        rest = [t.token_id for t in tokens(run(sink), "0/1")]
        assert whole[:num_before] + [t.token_id for t in tokens(first, "0/1")] + rest == whole


def test_masks_that_are_never_made_fail_a_step_and_the_next_masks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, make_masks = threading.Event(), GrammarMasks.make
    stuck = [True]

    def slow(self: GrammarMasks, rows: list[MaskRow]) -> Masks:
        if stuck:
            stuck.clear()
            may_end.wait()
        return make_masks(self, rows)

    monkeypatch.setattr(GrammarMasks, "make", slow)
    monkeypatch.setattr(grammar_masks, "MAX_S", 0.05)
    engine = make()
    submit(engine, compiled(WORD), WORD)
    try:
        with pytest.raises(InternalError, match="not made within") as caught:
            engine.step()
        assert engine.step_failed(caught.value) == ["request"]
        monkeypatch.setattr(grammar_masks, "MAX_S", 10.0)
        submit(engine, compiled(WORD), WORD, key="0/2")
        outputs = run(engine)
        assert [type(failure.error) for output in outputs for failure in output.failures] == [StepFailedAlone]
        assert tokens(outputs, "0/2")[-1].finish is FinishReason.STOP
    finally:
        may_end.set()
    assert_clean(engine)
