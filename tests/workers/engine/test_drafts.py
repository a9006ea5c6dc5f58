"""Drafts change how many tokens a step yields, and never which."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diptych.workers.common.request import FinishReason, ThoughtBudget
from diptych.workers.core.drafting import MAX_DRAFT_TOKENS, Reserve, max_drafted
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Sequence as Seq
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.testing.fake_runner import FakeRunner, fake_output

from ...support.drafters import KnowingDrafter, of_fake_runner, of_outputs
from ...support.engines import HANDOFF, Clock, Move, assert_clean, run, tokens
from ...support.sequences import make_request

PROMPTS = [(3, 1, 4, 1, 5), (2, 7), tuple(range(40, 60)), (999,), (1, 2, 3)]


def make(drafter: KnowingDrafter | None, num_blocks: int = 64, block_size: int = 4, **config: Any) -> Engine:
    runner = FakeRunner(num_blocks=num_blocks, block_size=block_size, num_layers=2)
    return Engine(runner, SchedulerConfig(**config), clock=Clock(), drafter=drafter)


def begin(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int = 30) -> None:
    for i, prompt in enumerate(prompts):
        engine.submit(f"0/{i}", make_request(list(prompt), num_tokens), [])


def ids(outputs: list[StepOutput], key: str = "0/0") -> list[int]:
    events = tokens(outputs, key)
    assert [event.position for event in events] == list(range(len(events)))
    assert all(event.finish is None for event in events[:-1])
    return [event.token_id for event in events]


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("config", [{}, {"max_batch_tokens": 9}, {"chunk_tokens": 3}, {"max_running": 2}])
def test_drafts_change_no_token(chance: float, config: dict[str, int]) -> None:
    drafter = KnowingDrafter(chance)
    engine = make(drafter, **config)
    begin(engine, PROMPTS)
    outputs = run(engine)
    for i, prompt in enumerate(PROMPTS):
        assert ids(outputs, f"0/{i}") == fake_output(list(prompt), 30)
    assert drafter.counts["drafted"] > 0
    assert (drafter.counts["accepted"] > 0) is (chance > 0)
    assert len(drafter.gone) == len(PROMPTS)
    assert_clean(engine)


def test_a_step_drafts_no_more_than_buffers_have_room_for() -> None:
    """However many tokens the drafter would propose: 20 sequences with 16 each."""
    drafter = KnowingDrafter(num_tokens=16)
    engine = make(drafter, num_blocks=600, max_running=20)
    begin(engine, [(i, 1) for i in range(20)])
    outputs = run(engine)
    assert max(drafter.measured_rows) == 20 + max_drafted(20) == 20 + 256
    assert all(ids(outputs, f"0/{i}") == fake_output([i, 1], 30) for i in range(20))
    assert max_drafted(2) == 2 * MAX_DRAFT_TOKENS


def test_a_step_yields_what_was_drafted_and_one_more() -> None:
    drafter = KnowingDrafter()
    engine = make(drafter)
    begin(engine, [(1, 2)], 11)
    outputs = run(engine)
    assert [len(output.tokens) for output in outputs] == [1, 5, 5]
    assert ids(outputs) == fake_output([1, 2], 11)
    assert tokens(outputs, "0/0")[-1].finish is FinishReason.LENGTH
    assert drafter.counts == {"drafted": 8, "accepted": 8}
    assert drafter.measured_rows == [5, 5]
    load = engine.check_integrity().load
    assert (load.num_prefill_tokens, load.num_decode_tokens) == (2, 10)
    assert [(each.method, each.num_drafted, each.num_accepted) for each in load.drafts] == [("knowing", 8, 8)]
    assert sum(event.num_drafted for event in tokens(outputs, "0/0")) == 8


class Resting(KnowingDrafter):
    """Drafts in every fourth step, and rests in between."""

    num_asked = num_steps = 0

    def rests(self) -> bool:
        self.num_steps += 1
        return self.num_steps % 4 != 0

    def draft(self, sequences: Sequence[Seq], num_rows: int, room: int, reserve: Reserve) -> list[list[int]]:
        self.num_asked += 1
        return super().draft(sequences, num_rows, room, reserve)


def test_a_drafter_that_rests_is_neither_asked_nor_told_of_times() -> None:
    drafter = Resting(num_tokens=2)
    engine = make(drafter)
    begin(engine, [(1, 2)], 20)
    outputs = run(engine)
    assert ids(outputs) == fake_output([1, 2], 20)
    assert drafter.num_asked == drafter.num_steps // 4 > 1
    assert drafter.measured_rows == [3] * drafter.num_asked
    assert drafter.counts == {"drafted": 2 * drafter.num_asked, "accepted": 2 * drafter.num_asked}


def test_what_was_drafted_wrong_costs_no_token_and_counts_as_nothing() -> None:
    drafter = KnowingDrafter(0.0)
    engine = make(drafter)
    begin(engine, [(1, 2)], 11)
    outputs = run(engine)
    assert [len(output.tokens) for output in outputs] == [1] * 11
    assert engine.check_integrity().load.num_decode_tokens == 10
    assert drafter.counts["accepted"] == 0


def test_a_draft_ends_with_the_token_that_ends_its_sequence() -> None:
    """Token 0 ends an answer; a drafter that goes on after it changes nothing."""
    prompt = next([n] for n in range(1, 999) if fake_output([n], 40)[-1] == 0)
    engine = make(KnowingDrafter(num_tokens=16))
    begin(engine, [prompt], 40)
    outputs = run(engine)
    assert ids(outputs) == fake_output(prompt, 40)
    assert tokens(outputs, "0/0")[-1].finish is FinishReason.STOP
    assert_clean(engine)


def test_a_draft_takes_only_blocks_that_are_free() -> None:
    """Two sequences share six blocks of four tokens: nobody is preempted for a draft, and what is short shortens it."""
    engine = make(KnowingDrafter(num_tokens=16), num_blocks=6)
    begin(engine, [(1, 2, 3), (4, 5, 6)], 8)
    outputs = run(engine)
    assert ids(outputs, "0/0") == fake_output([1, 2, 3], 8)
    assert ids(outputs, "0/1") == fake_output([4, 5, 6], 8)
    assert engine.scheduler.num_preemptions == 0
    assert_clean(engine)


@pytest.mark.parametrize("chance", [0.6, 1.0])
def test_preempted_sequences_are_computed_again(chance: float) -> None:
    engine = make(KnowingDrafter(chance), num_blocks=9)
    begin(engine, [(1, 2, 3), (4, 5, 6), (7, 8, 9)], 20)
    outputs = run(engine)
    for i, prompt in enumerate([(1, 2, 3), (4, 5, 6), (7, 8, 9)]):
        assert ids(outputs, f"0/{i}") == fake_output(list(prompt), 20)
    assert engine.scheduler.num_preemptions > 0
    assert_clean(engine)


def test_blocks_of_accepted_tokens_are_cached_and_those_of_others_are_not() -> None:
    for chance in (0.7, 1.0):
        engine, prompt = make(KnowingDrafter(chance)), [1, 2, 3]
        begin(engine, [prompt], 30)
        run(engine)
        answer = fake_output(prompt, 30)
        engine.submit("0/1", make_request(prompt + answer[:-1], 3), [])
        outputs = run(engine)
        assert tokens(outputs, "0/1")[0].num_cached == (len(prompt + answer[:-1]) - 1) // 4 * 4
        assert ids(outputs, "0/1") == fake_output(prompt + answer[:-1], 3)


def test_a_request_may_ask_for_none() -> None:
    drafter = KnowingDrafter()
    engine = make(drafter)
    engine.submit("0/0", replace(make_request([1, 2], 9), speculates=False), [])
    assert ids(run(engine)) == fake_output([1, 2], 9)
    assert drafter.counts["drafted"] == 0


def test_a_sequence_with_drafts_is_handed_off_with_one_token_to_compute() -> None:
    """Both sides draft. While its KV moves, the source decodes without drafts."""
    source, sink = make(KnowingDrafter(0.8)), make(KnowingDrafter(0.8))
    prompt, num_tokens = [5, 6, 7], 40
    source.submit("0/0", make_request(prompt, num_tokens), [])
    before = [source.step() for _ in range(4)]
    assert len(tokens(before, "0/0")) > 4
    sink.submit("0/1", make_request(prompt, num_tokens), [], importing=True)
    move = Move(source, sink)
    source.outgoing.offer("0/0", HANDOFF)
    while move.sealed is None:
        after = move.hear([source.step()])
        assert all(len(output.tokens) <= 1 for output in after)
        before += after
        if move.opened is not None and move.segments:
            move.read()
            source.caught_up(HANDOFF)
            move.hear([source.step()])
    move.commit()
    outputs = run(sink)
    found = [event.token_id for event in tokens(before, "0/0")] + [event.token_id for event in tokens(outputs, "0/1")]
    assert found == fake_output(prompt, num_tokens)
    assert max(len(output.tokens) for output in outputs) > 1
    assert_clean(source)
    assert_clean(sink)


@pytest.mark.parametrize("budget", [0, 3, 7])
def test_the_budget_of_a_thought_holds_in_drafts(budget: int) -> None:
    """Its end is forced at the same place, whatever was drafted there."""
    thought = ThoughtBudget(budget, begin_id=500, end_id=501, is_open=True)
    sampling = replace(make_request([1, 2], 25).sampling, thought=thought)
    request = replace(make_request([1, 2]), sampling=sampling)
    found: list[list[int]] = []
    for chance in (None, 0.0, 0.6, 1.0):
        answer = of_outputs({"0/0": found[0]}) if found else of_fake_runner
        engine = make(None if chance is None else KnowingDrafter(chance, 6, answer))
        engine.submit("0/0", request, [])
        found.append(ids(run(engine)))
    assert found[0][budget] == 501
    assert found == [found[0]] * 4
