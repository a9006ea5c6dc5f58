"""Prompts in steps that are launched ahead: chunks, admission, copies and hand-offs, over a device of
support/ahead.py. Tokens are those of lockstep, and the device never waits for the engine while requests come.
"""

import random
from collections.abc import Callable

import pytest

from diptych.workers.core.sequence import KNOWN
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.handoff.types import HandoffEnded, HandoffSealed, SegmentReady
from diptych.workers.testing.fake_runner import fake_output

from ...support.ahead import device_of, fed, ids, ids_by_key, make_ahead
from ...support.engines import Move, assert_clean, make, run, tokens
from ...support.sequences import make_request

BLOCK = 4  # tokens


def prompt_of(number: int, num_tokens: int) -> list[int]:
    """A prompt that no other begins like."""
    return [1 + number % 900, 1 + number // 900, *([7] * (num_tokens - 2))]


@pytest.mark.parametrize("num_running", [8, 256])
def test_the_device_waits_for_nobody_while_requests_come(num_running: int) -> None:
    """One arrives as one ends, in every step: each step but the first is launched while another is under way."""
    engine = make_ahead(num_blocks=16 * num_running, max_running=num_running, max_batch_tokens=2 * num_running)
    num, wanted, outputs = 0, dict[str, list[int]](), list[StepOutput]()
    for number in range(100):
        while engine.scheduler.num_running + engine.scheduler.num_waiting < num_running + 2:
            prompt, num_tokens = prompt_of(num, 6 + num % 30), 3 + num % 13
            wanted[f"0/{num}"] = fake_output(prompt, num_tokens)
            engine.submit(f"0/{num}", make_request(prompt, num_tokens), [])
            num += 1
        outputs.append(engine.step())
        assert engine.steps, f"nothing is under way after step {number}"
    device = device_of(engine)
    assert (device.num_waited_for, len(device.fed)) == (1, 100)
    assert sum(KNOWN in entries and max(entries) >= 0 for entries in device.fed) > 50, "prompts beside decodes"
    outputs += run(engine)
    assert ids_by_key(outputs) == wanted
    assert_clean(engine)


def hear_all(moves: dict[str, Move], output: StepOutput) -> None:
    for move in moves.values():
        move.hear([output])


def read_and_compare(engine: Engine, move: Move, prompt: list[int]) -> None:
    """Compare the announced blocks with the prompt whose KV they must hold."""
    assert move.sealed is not None and move.sealed.num_computed == len(prompt)
    read = [int(engine._runner._kv[b, 0, 0, slot]) for s in move.segments for b in s.block_ids for slot in range(BLOCK)]
    assert read[: len(prompt)] == prompt


@pytest.mark.parametrize("chunk_tokens", [0, 5])
def test_a_prefill_workers_device_waits_for_nobody(chunk_tokens: int) -> None:
    engine = make_ahead(num_blocks=256, max_batch_tokens=16, chunk_tokens=chunk_tokens)
    prompts = {f"handoff-{i}": prompt_of(i, 5 + 7 * i % 40) for i in range(40)}
    moves = {of: Move(engine, engine, handoff_id=of) for of in prompts}
    waiting, outputs = list(prompts), list[StepOutput]()
    while waiting or engine.scheduler.has_work or engine.steps:
        while waiting and engine.scheduler.num_waiting < 2:
            of = waiting.pop(0)
            engine.submit(f"0/{of}", make_request(prompts[of], 9), [], handoff_id=of)
        outputs.append(engine.step())
        hear_all(moves, outputs[-1])
        for event in [e for e in outputs[-1].handoffs if isinstance(e, HandoffSealed)]:
            read_and_compare(engine, moves[event.handoff_id], prompts[event.handoff_id])
            engine.end_lease(event.handoff_id)
        assert len(outputs) < 1000
    assert all(ids(outputs, f"0/{of}") == fake_output(prompt, 1) for of, prompt in prompts.items())
    assert device_of(engine).num_waited_for == 1
    assert_clean(engine)


def begin_two(engine: Engine) -> tuple[Move, Move, list[StepOutput]]:
    """Two prompts of three steps, of which the second is all but admitted when the first is announced."""
    outputs: list[StepOutput] = []
    moves = Move(engine, engine, handoff_id="a"), Move(engine, engine, handoff_id="b")
    engine.submit("0/a", make_request(prompt_of(1, 11), 4), [], handoff_id="a")
    outputs.append(engine.step())
    engine.submit("0/b", make_request(prompt_of(2, 22), 4), [], handoff_id="b")
    for move in moves:
        move.hear(outputs)
    return *moves, outputs


def test_what_a_dropped_step_would_have_filled_is_announced_once() -> None:
    """Step n fails while n + 1, which is the first of another prompt, is launched: that one's hand-off goes on."""
    engine = make_ahead(max_batch_tokens=8)
    first, second, outputs = begin_two(engine)
    assert engine.steps.first is not None and [e.sequence.key for e in engine.steps.first.entries] == ["0/a"]
    device_of(engine).fails = True
    with pytest.raises(RuntimeError):
        engine.step()
    engine.step_failed(RuntimeError("a kernel"))
    outputs += run(engine)
    failures = [f.key for output in outputs for f in output.failures]
    assert failures == ["0/a"]
    for output in outputs[1:]:
        first.hear([output])
        second.hear([output])
    assert first.over is not None and second.over is None
    read_and_compare(engine, second, prompt_of(2, 22))
    for handoff_id in ("a", "b"):
        engine.end_lease(handoff_id)
    assert_clean(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("how", ["abort", "end_lease"])
def test_a_handoff_that_ends_while_its_next_chunk_is_launched(how: str, num_steps: int) -> None:
    engine = make_ahead(max_batch_tokens=8)
    first, second, outputs = begin_two(engine)
    for _ in range(num_steps):
        outputs.append(engine.step())
    assert any(e.sequence.key == "0/b" for step in engine.steps._steps for e in step.batch.entries) == (num_steps > 0)
    if how == "abort":
        engine.abort("0/b")
    else:
        engine.end_lease("b")
    num_heard = len(outputs)
    outputs += run(engine)
    late = [e for o in outputs[num_heard:] for e in o.handoffs if e.handoff_id == "b"]
    assert not any(isinstance(event, SegmentReady) for event in late)
    failed = [failure.key for output in outputs for failure in output.failures]
    assert (failed == ["0/b"]) if how == "end_lease" else any(isinstance(event, HandoffEnded) for event in late)
    for output in outputs[1:]:
        first.hear([output])
    read_and_compare(engine, first, prompt_of(1, 11))
    engine.end_lease("a")
    engine.end_lease("b")
    assert second.sealed is None
    assert_clean(engine)


@pytest.mark.parametrize("leave", ["abort", "deadline"])
@pytest.mark.parametrize("num_steps", range(6))
def test_a_prompt_that_goes_while_two_of_its_chunks_are_launched(leave: str, num_steps: int) -> None:
    engine = make_ahead(max_batch_tokens=8, prefix_cache=False)
    engine.submit("0/1", make_request(prompt_of(1, 3), 12), [])
    outputs = [engine.step(), engine.step()]
    engine.submit("0/2", make_request(prompt_of(2, 30), 4, prompt_logprobs=1), [])
    outputs += [engine.step() for _ in range(num_steps)]
    if leave == "abort":
        engine.abort("0/2")
    else:
        engine._deadlines._heap.insert(0, (0.0, "0/2"))
    outputs += run(engine)
    assert not tokens(outputs[2 + num_steps :], "0/2")
    assert ids(outputs, "0/1") == fake_output(prompt_of(1, 3), 12)
    assert_clean(engine)


def test_a_copy_is_made_beside_the_step_under_way() -> None:
    """Completions of one prompt, beside a sequence that decodes: who shares it joins a step that is launched ahead."""
    engine = make_ahead()
    engine.submit("0/1", make_request(prompt_of(1, 3), 30), [])
    outputs = [engine.step(), engine.step()]
    for i in range(2, 5):
        engine.submit(f"0/{i}", make_request(prompt_of(2, 11), 9), [])
    device, batches = device_of(engine), list[tuple[int, bool]]()
    real = device.copy_blocks
    device.copy_blocks = lambda pairs: (batches.append((len(pairs), bool(device.stream))), real(pairs))[1]
    outputs += run(engine)
    assert batches == [(2, True)] and device.num_waited_for == 1
    for i in range(2, 5):
        assert ids(outputs, f"0/{i}") == fake_output(prompt_of(2, 11), 9)
    assert [e.num_cached for i in range(2, 5) for e in tokens(outputs, f"0/{i}")[:1]] == [0, 10, 10]
    assert_clean(engine)


def test_log_probabilities_of_a_prompt_are_those_of_lockstep() -> None:
    def found(engine: Engine) -> list[float]:
        outputs: list[StepOutput] = []
        engine.submit("0/1", make_request(prompt_of(1, 3), 20), [])
        outputs.append(engine.step())
        engine.submit("0/2", make_request(prompt_of(2, 30), 4, prompt_logprobs=1), [])
        outputs += run(engine)
        assert ids(outputs, "0/2") == fake_output(prompt_of(2, 30), 4)
        return [
            value for o in outputs for key, of in o.prompt_logprobs if key == "0/2" for value in of.logprobs.tolist()
        ]

    ahead = make_ahead(max_batch_tokens=8)
    values = found(ahead)
    assert values == found(make(max_batch_tokens=8)) and len(values) == 29
    assert device_of(ahead).num_waited_for == 1


def scenario(engine: Engine, seed: int, fail: Callable[[], object]) -> dict[str, list[int]]:
    """Random arrivals, aborts and failures; returns the tokens of what was neither aborted nor failed."""
    rng, outputs, prompts = random.Random(seed), list[StepOutput](), dict[str, tuple[list[int], int]]()
    gone: set[str] = set()
    for number in range(120):
        if rng.random() < 0.3:
            shared = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * rng.randint(0, 2)
            prompt = shared + [rng.randint(1, 40) for _ in range(rng.randint(1, 25))]
            prompts[f"0/{number}"] = prompt, rng.randint(1, 12)
            engine.submit(f"0/{number}", make_request(prompt, prompts[f"0/{number}"][1]), [])
        if prompts and rng.random() < 0.05:
            gone.add(key := rng.choice(list(prompts)))
            engine.abort(key)
        if rng.random() < 0.05:
            fail()
        try:
            outputs.append(engine.step())
        except RuntimeError as error:
            engine.step_failed(error)
        assert engine.check_integrity().num_unaccounted_blocks == 0
    outputs += run(engine)
    gone |= {f.key for output in outputs for f in output.failures}
    for key, (prompt, num_tokens) in prompts.items():
        whole, made = fake_output(prompt, num_tokens), ids(outputs, key)
        assert made == (whole[: len(made)] if key in gone else whole)
    assert_clean(engine)
    return {key: ids(outputs, key) for key in prompts if key not in gone}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_arrivals_give_the_tokens_of_lockstep(seed: int, fails: bool) -> None:
    rng = random.Random(seed)
    num_blocks, budget, chunk = rng.choice([24, 64]), rng.choice([7, 20, 64]), rng.choice([0, 5])
    engine = make_ahead(num_blocks, max_batch_tokens=budget, chunk_tokens=chunk, max_running=rng.choice([3, 256]))
    device = device_of(engine)

    def fail() -> None:
        device.fails = fails

    assert scenario(engine, seed, fail)
    chunks = [entries for entries in fed(engine) if KNOWN in entries]
    assert len(chunks) > 10, "prompts were launched ahead"
