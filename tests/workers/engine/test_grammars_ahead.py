"""Answers that follow grammars in steps launched ahead: the tokens of lockstep, and a device that waits for nobody."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from diptych.workers.common.errors import InternalError, InvalidGrammar
from diptych.workers.common.request import Request, SamplingParams, ThoughtBudget
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.sampling import grammar_masks
from diptych.workers.sampling.grammar_masks import GrammarMasks, MaskRow, Masks
from diptych.workers.testing.fake_runner import FakeRunner

from ...support.ahead import device_of, ids, make_ahead
from ...support.engines import HANDOFF, assert_clean, make, run, tokens
from ...support.grammars import compiled, regex, text_of
from .test_forced_tokens import FORM
from .test_grammar import JSON, THEN_WORD, THOUGHT, WORD, answer, reserved, submit

LONG = regex("[a-f]{200}")  # no token of it is forced
GRAMMARS = {"long": LONG, "form": FORM, "json": JSON, "word": WORD, "thought": THEN_WORD}
COMPILED = {name: compiled(grammar) for name, grammar in GRAMMARS.items()}
NUM_STEPS = 48


def begin(engine: Engine, name: str | None, key: str, prompt: Sequence[int] = (3, 1, 4), **how: Any) -> None:
    """name: of GRAMMARS; None: a request without."""
    if name == "thought":
        how = {"thought": THOUGHT, "max_tokens": 20} | how
    if name is None:
        how = {"ignore_eos": True} | how
    submit(engine, name and COMPILED[name], name and GRAMMARS[name], key=key, prompt=prompt, **how)


def lone(name: str | None, prompt: Sequence[int] = (3, 1, 4), **how: Any) -> list[int]:
    engine = make()
    begin(engine, name, "0/1", prompt, **how)
    return answer(engine)


@pytest.mark.parametrize("num_grammars", [1, 64])
def test_the_device_waits_for_no_grammar(num_grammars: int) -> None:
    engine = make_ahead(num_blocks=1600)
    for i in range(64):
        begin(engine, "long" if i < num_grammars else None, f"0/{i}", range(i, i + 3), max_tokens=100)
    outputs: list[StepOutput] = []
    for _ in range(NUM_STEPS):
        outputs.append(engine.step())
        assert engine.steps
    assert device_of(engine).num_waited_for == 1  # the first
    outputs += run(engine)
    assert [ids(outputs, f"0/{i}") for i in (0, 63)] == [
        lone("long", range(3), max_tokens=100),
        lone("long" if num_grammars == 64 else None, range(63, 66), max_tokens=100),
    ]
    assert_clean(engine)


def test_one_whose_next_token_brings_others_sits_out_a_step_and_the_others_do_not() -> None:
    engine = make_ahead(num_blocks=256)
    begin(engine, None, "0/1", max_tokens=100)
    for i in range(2, 6):
        begin(engine, "form", f"0/{i}", range(i, i + 4))
    outputs = [engine.step()]
    while engine.scheduler.num_running > 1:
        outputs.append(engine.step())
        assert [event.key for event in outputs[-1].tokens].count("0/1") == 1
    assert device_of(engine).num_waited_for == 1
    assert engine.check_integrity().load.num_forced_tokens > 4 * len(":identification:")
    outputs += run(engine)
    for i in range(2, 6):
        assert ids(outputs, f"0/{i}") == lone("form", range(i, i + 4))
    assert ids(outputs, "0/1") == lone(None, max_tokens=100)
    assert_clean(engine)


@pytest.mark.parametrize("config", [{"max_batch_tokens": 7}, {"chunk_tokens": 3}, {"max_running": 2}])
@pytest.mark.parametrize("num_blocks", [40, 128])
def test_forced_tokens_are_the_same_in_small_steps(config: dict[str, int], num_blocks: int) -> None:
    engine = make_ahead(num_blocks, **config)
    for i in range(4):
        begin(engine, "form" if i else None, f"0/{i}", range(i, i + 5), max_tokens=60)
    outputs = run(engine)
    for i in range(4):
        assert ids(outputs, f"0/{i}") == lone("form" if i else None, range(i, i + 5), max_tokens=60)
    assert_clean(engine)


@pytest.mark.parametrize("name", GRAMMARS)
def test_an_answer_is_the_same_resumed_and_handed_off(name: str) -> None:
    whole, how = lone(name, max_tokens=40), {"max_tokens": 40}
    engine = make_ahead()
    begin(engine, name, "0/1", **how)
    assert ids(run(engine), "0/1") == whole
    for num in range(1, len(whole), 3):
        begin(engine, name, f"1/{num}", outputs=whole[:num], **how)
    outputs = run(engine)
    assert all(ids(outputs, f"1/{num}") == whole[num:] for num in range(1, len(whole), 3))
    for num in (0, 2):
        source, sink = make_ahead(), make_ahead()
        begin(sink, None, "0/9", max_tokens=60)
        outputs = [sink.step()]
        begin(sink, name, "0/1", importing=True, outputs=whole[:num], **how)
        move = reserved(source, sink, 3 + num)
        begin(source, name, "0/1", handoff_id=HANDOFF, outputs=whole[:num], **how)
        first = move.hear(run(source))
        move.begin()
        outputs.append(sink.step())
        move.commit()
        outputs += run(sink)
        assert whole[:num] + ids(first, "0/1") + ids(outputs, "0/1") == whole
        assert ids(outputs, "0/9") == lone(None, max_tokens=60)
        assert_clean(sink)


@pytest.mark.parametrize("how", ["abort", "end", "deadline"])
def test_one_that_ends_while_its_step_is_ahead(how: str) -> None:
    """Its matcher may be at its end: it gets no mask any more, and fails nothing."""
    engine = make_ahead()
    begin(engine, "word" if how == "end" else "long", "0/1")
    begin(engine, "json", "0/2")
    outputs = [engine.step() for _ in range(4)]
    assert engine.steps
    if how == "abort":
        engine.abort("0/1")
    elif how == "deadline":
        sequence = engine._sequences["0/1"]
        engine._fail(sequence, InternalError("late"))
    outputs += run(engine)
    expected = 1 if how == "deadline" else 0
    assert len([failure for output in outputs for failure in output.failures]) == expected
    assert ids(outputs, "0/2") == lone("json")
    if how == "end":
        assert ids(outputs, "0/1") == lone("word")
    assert_clean(engine)


def test_one_that_cannot_follow_its_grammar_ends_with_an_error_and_others_go_on() -> None:
    cut = 110  # a vocabulary without most letters
    beyond = regex("[a-c]{3}z")
    engine = Engine(FakeRunner(vocab_size=cut, num_blocks=64, looks_ahead=True), SchedulerConfig())
    submit(engine, compiled(beyond, cut), beyond, key="0/1")
    submit(engine, compiled(WORD, cut), WORD, key="0/2")
    outputs = [*run(engine), engine.step()]
    [failure] = [failure for output in outputs for failure in output.failures]
    assert failure.key == "0/1" and isinstance(failure.error, InvalidGrammar)
    lone_one = Engine(FakeRunner(vocab_size=cut, num_blocks=64), SchedulerConfig())
    submit(lone_one, compiled(WORD, cut), WORD)
    assert ids(outputs, "0/2") == answer(lone_one)
    assert_clean(engine)


@pytest.mark.parametrize("why", ["masks", "device"])
def test_a_step_ahead_that_fails_ends_its_own_and_the_engine_goes_on(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_ahead()
    begin(engine, "long", "0/1")
    for _ in range(3):
        engine.step()
    assert engine.steps
    make_masks = GrammarMasks.make

    def fail(self: GrammarMasks, rows: list[MaskRow]) -> Masks:
        raise InternalError("a mask")

    if why == "masks":
        monkeypatch.setattr(GrammarMasks, "make", fail)
    else:
        device_of(engine).fails = True
    with pytest.raises((InternalError, RuntimeError)) as caught:
        engine.step()
    monkeypatch.setattr(grammar_masks.GrammarMasks, "make", make_masks)
    assert engine.step_failed(caught.value) == ["request"]
    assert not engine.steps
    begin(engine, "json", "0/2")
    outputs = run(engine)
    assert [failure.key for output in outputs for failure in output.failures] == ["0/1"]
    assert ids(outputs, "0/2") == lone("json")
    assert_clean(engine)


@pytest.mark.parametrize("seed", range(20))
def test_random_work_has_the_tokens_of_lockstep(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, budget, chunk = rng.choice([24, 64, 256]), rng.choice([7, 64]), rng.choice([0, 5])
    engine = make_ahead(num_blocks, max_batch_tokens=budget, chunk_tokens=chunk, max_running=rng.choice([2, 256]))
    wanted: dict[str, list[int]] = {}
    outputs: list[StepOutput] = []
    fails_at = rng.choice([0, 40, 80])
    for number in range(150):
        key, roll = f"0/{number}", rng.random()
        if roll < 0.2:
            name = rng.choice([None, *GRAMMARS])
            prompt, how = [rng.randint(1, 40) for _ in range(rng.randint(1, 20))], {"max_tokens": rng.randint(1, 50)}
            if rng.random() < 0.3:
                how |= {"min_tokens": rng.randint(0, how["max_tokens"])}
            wanted[key] = lone(name, prompt, **how)
            begin(engine, name, key, prompt, **how)
        elif roll < 0.25 and wanted:
            gone = rng.choice(list(wanted))
            del wanted[gone]
            engine.abort(gone)
        if fails_at and number == fails_at and engine.scheduler.has_work:
            device_of(engine).fails = True
        try:
            outputs.append(engine.step())
        except RuntimeError as error:
            before = set(engine._sequences)
            engine.step_failed(error)
            for of in before - set(engine._sequences):
                wanted.pop(of, None)
    device_of(engine).fails = False
    outputs += run(engine)
    for key, expected in wanted.items():
        assert ids(outputs, key) == expected
    assert_clean(engine)


def test_a_thought_alone_has_its_budget() -> None:
    engine = make_ahead()
    given = SamplingParams(temperature=0.0, max_tokens=20, thought=ThoughtBudget(6, 1, 34, is_open=True))
    engine.submit("0/1", Request("request", (3, 1, 4), given, timeout_s=60.0), [])
    begin(engine, "long", "0/2", max_tokens=20)
    outputs = run(engine)
    assert ids(outputs, "0/1").index(34) <= 6 and device_of(engine).num_waited_for == 1
    assert text_of(ids(outputs, "0/2")).isalpha() and len(tokens(outputs, "0/2")) == 20
    assert_clean(engine)
