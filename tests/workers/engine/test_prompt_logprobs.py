"""Prompt log-probabilities of an engine: each position once, in order, before the first token, from its own KV."""

from dataclasses import replace

import numpy as np
import pytest

from diptych.workers.common.prompt_logprobs import PromptLogprobs
from diptych.workers.common.request import Request
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.handoff.types import Reservation
from diptych.workers.testing.fake_runner import FakeRunner, fake_output, fake_prompt_logprobs

from ...support.engines import HANDOFF, Clock, Move, assert_clean, make, reserve, run, tokens
from ...support.sequences import make_request

PROMPT = [7 * i % 19 + 1 for i in range(22)]  # five full blocks of four, and two tokens


def asking(prompt: list[int], max_tokens: int, first: int = 1, num_top: int | None = 2, **sampling: object) -> Request:
    request = make_request(prompt, max_tokens, prompt_logprobs=num_top, **sampling)
    return replace(request, first_prompt_logprob=first)


def told(outputs: list[StepOutput], key: str = "0/0") -> list[PromptLogprobs]:
    """Of that key; none after its first token."""
    first = next((i for i, o in enumerate(outputs) if any(t.key == key for t in o.tokens)), len(outputs))
    assert not any(k == key for output in outputs[first + 1 :] for k, _ in output.prompt_logprobs)
    return [found for output in outputs for k, found in output.prompt_logprobs if k == key]


def assert_told(parts: list[PromptLogprobs], prompt: list[int], first: int = 1, num_top: int = 2) -> None:
    found = PromptLogprobs.joined(parts)
    assert [part.first for part in parts] == [first, *(part.end for part in parts[:-1])]
    expected = fake_prompt_logprobs(prompt, prompt, first, len(prompt), num_top)
    assert found.first == expected.first
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("chunk_tokens", [0, 1, 3, 8])
def test_prompt_logprobs_are_told_once_cold_and_with_a_warm_cache(chunk_tokens: int, looks_ahead: bool) -> None:
    runner = FakeRunner(num_blocks=64, looks_ahead=looks_ahead)
    engine = Engine(runner, SchedulerConfig(chunk_tokens=chunk_tokens), clock=Clock())
    for key in ("0/0", "0/1"):
        engine.submit(key, asking(PROMPT, 9), [])
        outputs = run(engine)
        assert_told(told(outputs, key), PROMPT)
        assert [t.token_id for t in tokens(outputs, key)] == fake_output(PROMPT, 9)
        assert tokens(outputs, key)[0].num_cached == 0
    engine.submit("0/2", make_request(PROMPT, 9), [])
    outputs = run(engine)
    assert tokens(outputs, "0/2")[0].num_cached == 20, "what it computed is cached for others"
    assert not told(outputs, "0/2")
    assert_clean(engine)


def test_siblings_wait_for_the_one_that_computes_the_prompt_logprobs() -> None:
    engine, prompt = make(chunk_tokens=5), [*PROMPT, 5]
    for i in range(4):
        engine.submit(f"0/{i}", asking(prompt, 3, num_top=2 if i == 0 else None), [])
    outputs = run(engine)
    assert_told(told(outputs), prompt)
    assert engine.check_integrity().load.num_prefill_tokens == len(prompt) + 3
    assert_clean(engine)


def test_who_asks_for_prompt_logprobs_waits_for_nobody() -> None:
    engine = make(chunk_tokens=5)
    for i in range(3):
        engine.submit(f"0/{i}", asking(PROMPT, 3), [])
    outputs = run(engine)
    for i in range(3):
        assert_told(told(outputs, f"0/{i}"), PROMPT)
    assert engine.check_integrity().load.num_prefill_tokens == 3 * len(PROMPT)
    assert_clean(engine)


@pytest.mark.parametrize(("first", "num_cached"), [(1, 0), (4, 0), (5, 4), (14, 12), (21, 20)])
def test_a_resumed_prompt_is_computed_from_what_is_missing(first: int, num_cached: int) -> None:
    engine = make()
    engine.submit("0/9", make_request(PROMPT, 1), [])
    run(engine)
    engine.submit("0/0", asking(PROMPT, 3, first), [])
    outputs = run(engine)
    assert_told(told(outputs), PROMPT, first)
    assert tokens(outputs, "0/0")[0].num_cached == num_cached
    assert_clean(engine)


def test_a_preempted_prompt_tells_nothing_twice() -> None:
    """A short prompt's output takes the blocks of a long one that is computed a token a step."""
    engine = make(num_blocks=8, chunk_tokens=1)
    engine.submit("0/0", make_request(PROMPT[:4], 20, ignore_eos=True), [])
    engine.submit("0/1", asking(PROMPT, 3), [])
    outputs = run(engine)
    assert engine.scheduler.num_preemptions == 1
    assert_told(told(outputs, "0/1"), PROMPT)
    assert tokens(outputs, "0/1")[0].num_cached == 0
    assert_clean(engine)


def test_the_source_of_a_handoff_tells_them_and_its_sink_nothing() -> None:
    source, sink = make(chunk_tokens=6), make()
    source.submit("0/0", asking(PROMPT, 9), [], handoff_id=HANDOFF)
    sink.submit("0/1", make_request(PROMPT, 9), [], importing=True)
    move = Move(source, sink)
    outputs = move.hear(run(source))
    assert_told(told(outputs), PROMPT)
    granted = reserve(sink, "0/1", len(PROMPT))
    assert isinstance(granted, Reservation)
    move.reservation = granted
    move.commit()
    outputs += run(sink)
    assert not told(outputs, "0/1")
    ids = [t.token_id for key in ("0/0", "0/1") for t in tokens(outputs, key)]
    assert ids == fake_output(PROMPT, 9)
    assert_clean(source)
    assert_clean(sink)


def test_a_pulled_prefix_saves_no_position_that_is_due() -> None:
    source, sink = make(), make(max_batch_tokens=6)
    source.submit("9/9", make_request(PROMPT, 1), [])
    run(source)
    source.outgoing.offer_prefix(HANDOFF, PROMPT, b"")
    move = Move(source, sink)
    move.hear([source.step()])
    sink.submit("0/1", asking(PROMPT, 9, 7), [], prefix=True)
    assert not sink.step().tokens
    move.commit()
    outputs = run(sink)
    assert_told(told(outputs, "0/1"), PROMPT, 7)
    assert [t.token_id for t in tokens(outputs, "0/1")] == fake_output(PROMPT, 9)
    assert tokens(outputs, "0/1")[0].num_cached == 6
    assert_clean(source)
    assert_clean(sink)


@pytest.mark.parametrize(("first", "num_top"), [(1, 21), (23, 1), (0, 1)])
def test_prompt_logprobs_out_of_bounds_are_refused_by_name(first: int, num_top: int) -> None:
    engine = make()
    engine.submit("0/0", asking(PROMPT, 3, first, num_top), [])
    [failure] = engine.step().failures
    assert failure.error.param == "prompt_logprobs"
