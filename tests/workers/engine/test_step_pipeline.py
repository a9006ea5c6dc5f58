"""One step ahead, over a device that computes each step as late as it may and keeps what it was given: a block that
came free beneath it, a token fed from the wrong row or a step too many fails the test.
"""

import random

import pytest

from diptych.workers.common.errors import DeadlineExceeded
from diptych.workers.common.request import FinishReason
from diptych.workers.common.timings import SequenceTimings
from diptych.workers.core.sequence import KNOWN
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.handoff.types import HandoffEnded, Reservation
from diptych.workers.testing.fake_runner import fake_output

from ...support.ahead import Device, fed, ids
from ...support.ahead import make_ahead as make
from ...support.engines import HANDOFF, Clock, Move, assert_clean, hand_over, reserve, run, tokens
from ...support.sequences import make_request

BLOCK = 4  # tokens
PROMPT = [1, 2, 3, 5, 7, 11]  # no sum on its way is a multiple of 1000: only max_tokens ends it


def test_a_step_is_under_way_when_the_one_before_it_is_told() -> None:
    engine = make()
    engine.submit("0/1", make_request(PROMPT, 4), [])
    outputs: list[StepOutput] = []
    under_way: list[bool] = []
    for _ in range(4):
        outputs.append(engine.step())
        under_way.append(bool(engine.steps))
    assert ids(outputs, "0/1") == fake_output(PROMPT, 4)
    assert [len(output.tokens) for output in outputs] == [1, 1, 1, 1]
    assert under_way == [True, True, True, False]  # the last token's step is known to be the last
    assert fed(engine) == [[0], [0], [0]]
    assert outputs[-1].ran and not engine.step().ran
    assert_clean(engine)


def test_those_that_reach_their_ends_are_not_in_the_next_step() -> None:
    engine = make()
    for i, max_tokens in enumerate((5, 2, 5, 3)):
        engine.submit(f"0/{i}", make_request([i + 1] * 3, max_tokens), [])
    outputs = run(engine)
    for i, max_tokens in enumerate((5, 2, 5, 3)):
        assert ids(outputs, f"0/{i}") == fake_output([i + 1] * 3, max_tokens)
    assert fed(engine) == [[0, 1, 2, 3], [0, 2, 3], [0, 1], [0, 1]]
    assert_clean(engine)


def test_a_stop_token_while_the_next_step_is_launched() -> None:
    engine = make(prefix_cache=False)
    engine.submit("0/1", make_request([1, 2], 9, stop_token_ids=(6,)), [])  # 3, 6
    engine.submit("0/2", make_request([5], 4), [])
    outputs = [engine.step(), engine.step()]
    assert [(e.token_id, e.finish) for e in tokens(outputs, "0/1")] == [(3, None), (6, FinishReason.STOP)]
    assert engine.steps and engine.manager.num_free == 64 - 2  # its block rests: the step may write it still
    assert engine.check_integrity().num_unaccounted_blocks == 0
    outputs.append(engine.step())
    assert engine.manager.num_free == 64 - 2 + 1
    outputs += run(engine)
    assert len(tokens(outputs, "0/1")) == 2 and ids(outputs, "0/2") == fake_output([5], 4)
    assert_clean(engine)


def test_a_step_whose_sequences_have_all_stopped_is_finished_for_nothing() -> None:
    engine = make()
    engine.submit("0/1", make_request([400, 600], 5), [])  # 0, the end of sequence
    assert [e.finish for e in engine.step().tokens] == [FinishReason.STOP]
    assert engine.steps and not engine.scheduler.has_work
    output = engine.step()
    assert output.ran and not output.tokens
    assert_clean(engine)


@pytest.mark.parametrize("why", ["abort", "deadline"])
def test_a_sequence_that_goes_while_its_step_is_launched(why: str) -> None:
    engine = make()
    engine.submit("0/1", make_request(PROMPT, 40), [])
    engine.submit("0/2", make_request([9, 9, 9], 6), [])
    outputs = [engine.step(), engine.step()]
    num_free = engine.manager.num_free
    if why == "abort":
        engine.abort("0/1")
        engine.submit("0/1", make_request(PROMPT, 3), [])  # another one, by the same name
    else:
        engine._deadlines._heap.append((0.0, "0/1"))
        engine._deadlines._heap.sort()
    assert engine.manager.num_free == num_free
    outputs.append(engine.step())
    if why == "abort":
        assert not tokens(outputs[-1:], "0/1")
        outputs += run(engine)
        assert ids(outputs[3:], "0/1") == fake_output(PROMPT, 3)
    else:
        assert [type(f.error) for f in outputs[-1].failures] == [DeadlineExceeded]
        outputs += run(engine)
        assert len(tokens(outputs, "0/1")) == 2
    assert ids(outputs, "0/2") == fake_output([9, 9, 9], 6)
    assert_clean(engine)


def test_blocks_of_one_that_left_are_not_reserved_beneath_the_step() -> None:
    engine = make(num_blocks=4, prefix_cache=False)
    engine.submit("0/1", make_request([1] * 9, 5), [])
    engine.step()
    engine.submit("0/2", make_request([2] * 9, 5), [], importing=True)
    engine.abort("0/1")
    granted: list[object] = []
    engine.incoming.reserve("0/2", 9, granted.append)
    assert granted == []
    engine.step()
    assert [type(answer) for answer in granted] == [Reservation]
    engine.fail_import("0/2", quarantine=False)
    assert_clean(engine)


def test_nobody_is_preempted_for_a_step_ahead() -> None:
    engine = make(num_blocks=12)
    prompts = {f"0/{i}": [i + 1] * (5 + i) for i in range(5)}
    for key, prompt in prompts.items():
        engine.submit(key, make_request(prompt, 20, ignore_eos=True), [])
    outputs: list[StepOutput] = []
    while engine.scheduler.has_work or engine.steps:
        before, was_ahead = engine.scheduler.num_preemptions, bool(engine.steps)
        outputs.append(engine.step())
        assert not was_ahead or engine.scheduler.num_preemptions == before
        assert engine.check_integrity().num_unaccounted_blocks == 0
    for key, prompt in prompts.items():
        expected = list(prompt)
        for _ in range(20):
            expected.append(sum(expected) % 1000)
        assert ids(outputs, key) == expected[len(prompt) :]
    assert engine.scheduler.num_preemptions > 0 and fed(engine)
    assert_clean(engine)


@pytest.mark.parametrize("num_steps_on", [0, 1, 5])
@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_a_sequence_that_is_launched_moves(num_before: int, num_steps_on: int) -> None:
    source, sink = make(), make()
    source.submit("0/1", make_request(PROMPT, 40), [])
    source.submit("0/2", make_request([9, 9, 9], 40), [])
    outputs = [source.step() for _ in range(num_before)]
    source.outgoing.offer("0/1", HANDOFF)
    sink.submit("0/1", make_request(PROMPT, 40), ids(outputs, "0/1"), importing=True)
    move = Move(source, sink)
    for _ in range(num_steps_on):
        outputs += move.hear([source.step()])
        move.read()
    source.caught_up(HANDOFF)
    source.caught_up(HANDOFF)
    outputs += move.hear([source.step()])
    assert move.sealed is not None
    made = ids(outputs, "0/1")
    assert list(move.sealed.output_token_ids) == made == fake_output(PROMPT, 40)[: len(made)]
    move.commit()
    assert made + ids(run(sink), "0/1") == fake_output(PROMPT, 40)
    outputs += run(source)
    assert ids(outputs, "0/2") == fake_output([9, 9, 9], 40)
    assert_clean(source)
    assert_clean(sink)


def test_it_is_sealed_when_nothing_can_write_its_last_block_any_more() -> None:
    source = make()
    source.submit("0/1", make_request(PROMPT, 40), [])
    source.step()
    source.outgoing.offer("0/1", HANDOFF)
    source.caught_up(HANDOFF)
    move = Move(source, make())
    move.hear([StepOutput(0, handoffs=source.outgoing.events)])
    assert source.steps and move.sealed is None
    source.outgoing.events = []
    move.hear([source.step()])
    assert not source.steps and move.sealed is not None
    source.end_lease(HANDOFF)
    assert_clean(source)


def test_a_sealed_or_dead_handoff_is_not_sealed_again() -> None:
    source = make()
    source.submit("0/1", make_request(PROMPT, 40), [])
    source.step()
    source.outgoing.offer("0/1", HANDOFF)
    source.caught_up(HANDOFF)
    source.abort("0/1")
    output = source.step()
    assert isinstance(output.handoffs[-1], HandoffEnded)
    source.end_lease(HANDOFF)
    assert_clean(source)


def test_the_prefix_cache_gets_a_block_when_it_is_computed() -> None:
    engine = make()
    engine.submit("0/1", make_request([1, 2, 3, 4, 5, 6], 8), [])
    engine.step()  # 7 tokens, 6 computed; the running step computes the seventh, not yet the eighth
    assert engine.manager.num_cached == 1
    engine.step()
    assert engine.manager.num_cached == 1  # the eighth is being computed
    engine.step()
    assert engine.manager.num_cached == 2
    engine.submit("0/2", make_request([1, 2, 3, 4, 5, 6], 3), [])
    events = tokens(run(engine), "0/2")
    assert events[0].num_cached == 4 and [e.token_id for e in events] == fake_output([1, 2, 3, 4, 5, 6], 3)
    assert_clean(engine)


def test_equal_blocks_that_the_cache_replaces_under_way() -> None:
    """Two sequences decode the same tokens: the second's blocks become the first's while its next step is launched."""
    engine = make()
    engine.scheduler._shared.park = lambda sequence, num_cached, beside=None: False  # type: ignore[method-assign]
    for key in ("0/1", "0/2"):
        engine.submit(key, make_request(PROMPT, 20), [])
    outputs = run(engine)
    assert ids(outputs, "0/1") == ids(outputs, "0/2") == fake_output(PROMPT, 20)
    assert_clean(engine)


def test_completions_of_one_prompt() -> None:
    """n > 1: the others wait for the first and get a copy of its prompt's last block while no step runs."""
    engine = make()
    for i in range(4):
        engine.submit(f"0/{i}", make_request([*PROMPT, 13], 9), [])
    outputs = run(engine)
    for i in range(4):
        assert ids(outputs, f"0/{i}") == fake_output([*PROMPT, 13], 9)
    assert [e.num_cached for i in range(4) for e in tokens(outputs, f"0/{i}")[:1]] == [0, 6, 6, 6]
    assert [0, 1, 2, 3] in fed(engine)
    assert_clean(engine)


def test_what_needs_its_last_token_on_the_host_is_in_lockstep() -> None:
    engine = make()
    engine.submit("0/1", make_request(PROMPT, 5, logprobs=0), [])
    engine.submit("0/2", make_request([9, 9], 8), [])
    outputs = [engine.step() for _ in range(4)]
    assert fed(engine) == []
    outputs += run(engine)
    assert len(fed(engine)) == 2
    assert ids(outputs, "0/1") == fake_output(PROMPT, 5) and ids(outputs, "0/2") == fake_output([9, 9], 8)
    assert_clean(engine)


def test_a_prompt_that_came_is_admitted_to_the_step_after_the_one_under_way() -> None:
    engine = make(chunk_tokens=4)
    engine.submit("0/1", make_request(PROMPT, 20), [])
    outputs = [engine.step() for _ in range(4)]
    engine.submit("0/2", make_request([9] * 10, 4), [])  # three chunks
    for expected in ([0, KNOWN], [0, KNOWN], [0, KNOWN], [0, 1], [0, 1]):
        outputs.append(engine.step())
        assert engine.steps and fed(engine)[-1] == expected
    outputs += run(engine)
    assert ids(outputs, "0/1") == fake_output(PROMPT, 20) and ids(outputs, "0/2") == fake_output([9] * 10, 4)
    assert_clean(engine)


def beside_another(max_running: int = 256) -> tuple[Engine, list[StepOutput], Move]:
    """A sink with a sequence whose next step is launched, what it has said, and a hand-off that is all but over."""
    sink = make(max_running=max_running)
    sink.submit("0/2", make_request([9, 9, 9], 12), [])
    outputs = [sink.step(), sink.step()]
    return sink, outputs, hand_over(sink, PROMPT)


def assert_both(sink: Engine, outputs: list[StepOutput]) -> None:
    """All tokens of the sequence that came, but for the first, and of the other one."""
    outputs += run(sink)
    assert ids(outputs, "0/1") == fake_output(PROMPT, 6)[1:] and ids(outputs, "0/2") == fake_output([9, 9, 9], 12)
    assert_clean(sink)


def test_a_sequence_that_arrives_joins_the_next_step() -> None:
    sink, outputs, move = beside_another()
    move.commit()
    for expected in ([0, KNOWN], [0, 1], [0, 1]):
        outputs.append(sink.step())
        assert sink.steps and fed(sink)[-1] == expected
    assert sink.scheduler.num_decoding == 2
    assert_both(sink, outputs)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_one_that_begins_before_the_answer_joins_for_one_token(num_steps: int) -> None:
    """The answer comes before its step is launched, while it is under way, when it is over, or later."""
    sink, outputs, move = beside_another()
    move.begin()
    for expected in ([0, KNOWN], [0], [0])[:num_steps]:
        outputs.append(sink.step())
        assert sink.steps and fed(sink)[-1] == expected
    assert not tokens(outputs, "0/1")
    move.commit()
    outputs.append(sink.step())
    assert sink.steps and fed(sink)[-1] == ([0, 1] if num_steps == 1 else [0, KNOWN])
    assert_both(sink, outputs)


@pytest.mark.parametrize("quarantine", [False, True])
def test_one_whose_release_is_denied_leaves_the_step_under_way(quarantine: bool) -> None:
    sink, outputs, move = beside_another()
    move.begin()
    outputs.append(sink.step())
    assert fed(sink)[-1] == [0, KNOWN]
    sink.fail_import("0/1", quarantine=quarantine)
    if quarantine:
        sink.incoming.settle("0/1")
    num_free = sink.manager.num_free
    outputs.append(sink.step())
    assert sink.manager.num_free > num_free, "its blocks rested until nothing could write them"
    outputs += run(sink)
    assert not tokens(outputs, "0/1") and ids(outputs, "0/2") == fake_output([9, 9, 9], 12)
    assert_clean(sink)


def test_a_sequence_that_arrives_when_a_step_is_full_waits_for_its_turn() -> None:
    sink, outputs, move = beside_another(max_running=1)
    move.commit()
    outputs.append(sink.step())
    assert not sink.steps and KNOWN not in fed(sink)[-1]
    assert_both(sink, outputs)


def test_a_sequence_that_arrives_and_needs_the_host_is_in_lockstep() -> None:
    sink, outputs, move = beside_another()
    sink._sequences["0/1"].input_from_previous = False
    move.commit()
    outputs.append(sink.step())
    assert not sink.steps
    assert_both(sink, outputs)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_step_that_fails_takes_the_one_after_it_along(num_steps: int) -> None:
    engine = make()
    engine.submit("0/1", make_request(PROMPT, 40), [])
    for _ in range(num_steps):
        engine.step()
    assert isinstance(engine._runner, Device)
    engine._runner.fails = True
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.steps
    engine.step_failed(RuntimeError("a kernel"))
    assert not engine.steps
    assert [f.key for f in engine.step().failures] == ["0/1"]
    assert_clean(engine)
    engine.submit("0/2", make_request([4], 2), [])
    assert ids(run(engine), "0/2") == [4, 8]
    assert_clean(engine)


def test_a_steps_time_is_its_own() -> None:
    """Each takes 2 s, one after the other, though the second is launched before the first has begun."""
    clock = Clock()
    engine = make(clock=clock, target_step_s=1)
    assert isinstance(engine._runner, Device)
    engine._runner.takes_s = 2
    took: list[float] = []
    engine.scheduler.cost.add = lambda work, seconds, **_: took.append(seconds)  # type: ignore[method-assign]
    engine.submit("0/1", make_request(PROMPT, 4), [])
    clock.now += 5
    events = tokens(run(engine), "0/1")
    assert took == [2, 2, 2, 2]
    assert [e.timings for e in events] == [SequenceTimings(queue_s=5, compute_s=2), None, None, None]
    assert clock.now == 13


@pytest.mark.parametrize("seed", range(30))
def test_random_work_is_the_same_as_in_lockstep(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, budget, chunk = rng.choice([10, 24, 64]), rng.choice([7, 64]), rng.choice([0, 5])
    engine = make(num_blocks=num_blocks, max_batch_tokens=budget, chunk_tokens=chunk, max_running=rng.choice([2, 256]))
    wanted: dict[str, list[int]] = {}
    offered: set[str] = set()
    outputs: list[StepOutput] = []
    for number in range(150):
        key, roll = f"0/{number}", rng.random()
        if roll < 0.15:
            prompt = [rng.randint(1, 40) for _ in range(rng.randint(1, 20))]
            output = fake_output(prompt, 12)
            stops = tuple(output[3::4]) if rng.random() < 0.5 else ()
            ends = [i for i, token in enumerate(output) if token in stops]
            wanted[key] = output[: ends[0] + 1] if ends else output
            engine.submit(key, make_request(prompt, 12, stop_token_ids=stops), [])
        elif roll < 0.2 and wanted:
            gone = rng.choice(list(wanted))
            del wanted[gone]
            engine.abort(gone)
        elif roll < 0.25 and wanted:
            engine.outgoing.offer(rng.choice(list(wanted)), key)
            offered.add(key)
        elif roll < 0.3 and offered:
            engine.end_lease(offered.pop())
        elif roll < 0.33:
            engine.submit(key, make_request([3] * 5, 4), [], importing=True)
            reserve(engine, key, 5)
            outputs.append(engine.step())
            engine.abort(key)
            engine.fail_import(key, quarantine=False)
        outputs.append(engine.step())
        assert engine.check_integrity().num_unaccounted_blocks == 0
    for handoff_id in offered:
        engine.end_lease(handoff_id)
    outputs += run(engine)
    assert {key: ids(outputs, key) for key in wanted} == wanted
    assert fed(engine)
    assert_clean(engine)
