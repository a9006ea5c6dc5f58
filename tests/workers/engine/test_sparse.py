"""KV that sparse decodes computed stays out of the prefix cache, at the worker that computed it and at its sinks."""

from dataclasses import replace

import pytest

from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import NEVER
from diptych.workers.engine.engine import Engine
from diptych.workers.testing.fake_runner import FakeRunner, fake_output

from ...support.drafters import KnowingDrafter
from ...support.engines import HANDOFF, Clock, Move, assert_clean, make, run, tokens
from ...support.sequences import make_request

BLOCK, BUDGET = 4, 16
PROMPT = [1, 2, 3, 5, 7, 11]


def make_sparse(
    num_blocks: int = 64, budget: int = BUDGET, by_default: bool = True, drafter: KnowingDrafter | None = None
) -> Engine:
    runner = FakeRunner(num_blocks=num_blocks)
    runner.info = replace(runner.info, sparse_budget=budget, sparse_by_default=by_default)
    return Engine(runner, SchedulerConfig(), clock=Clock(), drafter=drafter)


def num_cached(engine: Engine, prompt: list[int]) -> int:
    """Tokens of the prompt that a request finds in the prefix cache."""
    engine.submit("0/asks", make_request(prompt, 1), [])
    return tokens(run(engine), "0/asks")[0].num_cached or 0


def test_blocks_are_cached_up_to_the_first_sparse_token() -> None:
    for engine, expected in ((make_sparse(), BUDGET), (make(), 44), (make_sparse(budget=30), 28)):
        engine.submit("0/1", make_request(PROMPT, 40), [])
        made = [e.token_id for e in tokens(run(engine), "0/1")]
        assert made == fake_output(PROMPT, 40)
        assert num_cached(engine, [*PROMPT, *made]) == expected
        assert_clean(engine)


@pytest.mark.parametrize(
    ("by_default", "asked", "expected"),
    [(True, None, BUDGET), (True, True, BUDGET), (True, False, 44), (False, None, 44), (False, True, BUDGET)],
)
def test_a_request_decides_and_else_the_settings(by_default: bool, asked: bool | None, expected: int) -> None:
    engine = make_sparse(by_default=by_default)
    engine.submit("0/1", replace(make_request(PROMPT, 40), sparse_attention=asked), [])
    made = [e.token_id for e in tokens(run(engine), "0/1")]
    assert num_cached(engine, [*PROMPT, *made]) == expected


def test_a_request_that_asks_where_there_is_none_is_computed_exactly() -> None:
    engine = make()
    engine.submit("0/1", replace(make_request(PROMPT, 40), sparse_attention=True), [])
    made = [e.token_id for e in tokens(run(engine), "0/1")]
    assert num_cached(engine, [*PROMPT, *made]) == 44


@pytest.mark.parametrize("num_prompt", [3, 13, 15, 16, 17, 20])
def test_drafts_end_with_the_budget(num_prompt: int) -> None:
    """The last row of a draft has the last context that a decode attends to all of."""
    drafter = KnowingDrafter(num_tokens=16)
    engine, prompt = make_sparse(drafter=drafter), list(range(1, num_prompt + 1))
    engine.submit("0/1", make_request(prompt, 30), [])
    sequence, drafted = engine._sequences["0/1"], set[int]()
    outputs = [engine.step()]
    while engine.scheduler.has_work:
        start, num_before = sequence.num_tokens, drafter.counts["drafted"]
        outputs.append(engine.step())
        num_drafted = drafter.counts["drafted"] - num_before
        drafted |= set(range(start, start + num_drafted))
        assert sequence.num_exact == NEVER or not num_drafted
    assert [e.token_id for e in tokens(outputs, "0/1")] == fake_output(prompt, 30)
    assert drafted == set(range(num_prompt + 1, BUDGET))
    assert_clean(engine)


def test_a_request_for_full_attention_is_drafted_for_to_its_end() -> None:
    drafter = KnowingDrafter(num_tokens=5)
    engine = make_sparse(drafter=drafter)
    engine.submit("0/1", replace(make_request(PROMPT, 40), sparse_attention=False), [])
    made = [e.token_id for e in tokens(run(engine), "0/1")]
    assert made == fake_output(PROMPT, 40) and drafter.counts["drafted"] > 30
    assert num_cached(engine, [*PROMPT, *made]) == 44


def test_a_prompt_is_cached_however_long_it_is() -> None:
    engine, prompt = make_sparse(), list(range(1, 51))
    engine.submit("0/1", make_request(prompt, 3), [])
    run(engine)
    assert num_cached(engine, [*prompt, 9]) == 48


def test_the_last_token_of_a_prompt_is_exact() -> None:
    """It is computed alone, as a decode's is, where the rest of its prompt was found."""
    engine, prompt = make_sparse(), list(range(1, 49))
    for key in ("0/1", "0/2"):
        engine.submit(key, make_request(prompt, 1), [])
        run(engine)
    assert num_cached(engine, [*prompt, 9]) == 48


def test_a_preempted_sequence_is_computed_anew_and_exact() -> None:
    engine = make_sparse(num_blocks=12)
    keys = ("0/1", "0/2")
    for i, key in enumerate(keys):
        engine.submit(key, make_request([i + 1, *PROMPT], 30), [])
    sequences = [engine._sequences[key] for key in keys]
    outputs, seen = [engine.step()], set[bool]()
    while engine.scheduler.has_work:
        outputs.append(engine.step())
        for sequence in sequences:
            if sequence.num_computed == 0 and sequence.num_output > BUDGET:
                seen.add(sequence.num_exact == NEVER)
    assert engine.scheduler.num_preemptions and seen == {True}
    for i, key in enumerate(keys):
        assert [e.token_id for e in tokens(outputs, key)] == fake_output([i + 1, *PROMPT], 30)
    assert_clean(engine)


def moved(source: Engine, sink: Engine, num_steps: int, *, begins: bool) -> Move:
    """Hand a sequence off that has decoded for so many steps."""
    source.submit("0/1", make_request(PROMPT, 60), [])
    made = [e.token_id for e in tokens([source.step() for _ in range(num_steps)], "0/1")]
    source.outgoing.offer("0/1", HANDOFF)
    sink.submit("0/1", make_request(PROMPT, 60), made, importing=True)
    move = Move(source, sink)
    move.hear([source.step()])
    source.caught_up(HANDOFF)
    move.hear([source.step()])
    if begins:
        move.begin()
        sink.step()
    move.commit()
    return move


def test_a_sink_learns_what_is_inexact() -> None:
    for begins in (False, True):
        source, sink = make_sparse(), make()
        move = moved(source, sink, 30, begins=begins)
        assert move.sealed is not None
        assert move.sealed.num_inexact == move.sealed.num_computed - BUDGET > 0
        made = [e.token_id for e in tokens(run(sink), "0/1")]
        assert made == fake_output(PROMPT, 60)[-len(made) :]
        assert num_cached(sink, [*PROMPT, *fake_output(PROMPT, 60)]) == BUDGET
        assert_clean(source)
        assert_clean(sink)


def test_a_sequence_without_sparse_tokens_is_cached_whole_at_its_sink() -> None:
    source, sink = make_sparse(budget=64), make()
    move = moved(source, sink, 30, begins=False)
    assert move.sealed is not None and move.sealed.num_inexact == 0
    run(sink)
    assert num_cached(sink, [*PROMPT, *fake_output(PROMPT, 60)]) == 64
