"""Equal prompts are computed once, and every sequence gets the same tokens as without sharing."""

from dataclasses import replace

import pytest

from diptych.workers.common.request import RequestLevel
from diptych.workers.common.timings import PullTimes
from diptych.workers.engine.events import StepOutput
from diptych.workers.handoff.types import Reservation
from diptych.workers.kv.segment import Segment
from diptych.workers.testing.fake_runner import fake_output

from ...support.engines import (
    Clock,
    Move,
    assert_clean,
    copy_blocks,
    make,
    reserve,
    run,
    seal_of,
    tokens,
)
from ...support.sequences import make_request

KEYS = tuple(f"0/{i}" for i in range(5))


def token_ids(outputs: list[StepOutput], key: str) -> list[int]:
    return [t.token_id for t in tokens(outputs, key)]


@pytest.mark.parametrize("max_tokens", [1, 9])
@pytest.mark.parametrize("chunk_tokens", [0, 3])
@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 7, 8, 9, 31])
def test_n_completions_compute_their_prompt_once(num_prompt: int, chunk_tokens: int, max_tokens: int) -> None:
    engine, prompt = make(chunk_tokens=chunk_tokens), list(range(1, num_prompt + 1))
    for key in KEYS:
        engine.submit(key, make_request(prompt, max_tokens, ignore_eos=True), [])
    outputs = run(engine)
    for key in KEYS:
        assert token_ids(outputs, key)[:max_tokens] == fake_output(prompt, max_tokens)[:max_tokens]
    num_tail = (num_prompt - 1) % engine.cache.block_size
    num_each = 1 if num_tail != 1 else 2  # one token is not waited for
    if num_prompt > 2:
        assert engine.check_integrity().load.num_prefill_tokens == num_prompt + num_each * (len(KEYS) - 1)
    assert_clean(engine)


def test_a_longer_prompt_waits_for_what_it_shares_and_no_longer() -> None:
    engine = make(chunk_tokens=4)
    head = list(range(1, 9))
    engine.submit("0/0", make_request([*head, *range(50, 90)], 2), [])
    engine.submit("0/1", make_request([*head, 7, 7, 7], 2), [])
    outputs = [engine.step() for _ in range(3)]
    assert [e.num_cached for e in tokens(outputs, "0/1")] == [8]
    outputs += run(engine)
    assert token_ids(outputs, "0/0") == fake_output([*head, *range(50, 90)], 2)
    assert token_ids(outputs, "0/1") == fake_output([*head, 7, 7, 7], 2)
    assert_clean(engine)


def test_another_tenant_waits_for_nobody_and_gets_nothing() -> None:
    engine, prompt = make(), list(range(1, 8))
    for key, salt in (("0/0", b"a"), ("0/1", b"b")):
        request = make_request(prompt, 3)
        object.__setattr__(request, "cache_salt", salt)
        engine.submit(key, request, [])
    assert len(engine.step().tokens) == 2
    run(engine)
    assert engine.check_integrity().load.num_prefill_tokens == 14
    assert_clean(engine)


def test_without_a_prefix_cache_each_computes_its_own() -> None:
    engine = make(prefix_cache=False)
    for key in KEYS:
        engine.submit(key, make_request([1, 2, 3, 4, 5], 3), [])
    assert len(engine.step().tokens) == len(KEYS)
    run(engine)
    assert_clean(engine)


def test_who_computes_for_others_may_be_aborted() -> None:
    engine, prompt = make(chunk_tokens=4), list(range(1, 16))
    for key in KEYS:
        engine.submit(key, make_request(prompt, 3), [])
    engine.step()
    engine.abort("0/0")
    outputs = run(engine)
    for key in KEYS[1:]:
        assert token_ids(outputs, key) == fake_output(prompt, 3)
    assert engine.check_integrity().load.num_prefill_tokens == 15 + 3
    assert_clean(engine)


def test_what_is_held_for_others_goes_with_them_or_when_memory_runs_short() -> None:
    engine, prompt = make(num_blocks=6, max_running=1), list(range(1, 8))
    for key in KEYS:
        engine.submit(key, make_request(prompt, 1), [])
    engine.step()
    engine.step()
    for key in KEYS[2:]:
        engine.abort(key)
    assert_clean(engine)
    engine = make(num_blocks=4, max_running=2)
    for key in KEYS:
        engine.submit(key, make_request(prompt, 8, ignore_eos=True), [])
    outputs = run(engine)
    for key in KEYS:
        assert token_ids(outputs, key) == token_ids(outputs, "0/0")
    assert_clean(engine)


def test_what_holds_the_end_of_its_prompt_does_not_wait_for_another() -> None:
    engine, prompt = make(chunk_tokens=4, max_running=2), list(range(1, 8))
    for key in KEYS[:2]:
        engine.submit(key, make_request(prompt, 2, ignore_eos=True), [])
    outputs = [engine.step(), engine.step()]  # the first prompt, whose end is held for the second from now on
    hurried = make_request(prompt, 2, ignore_eos=True, prompt_logprobs=0)  # which are computed anew
    engine.submit("0/2", replace(hurried, level=RequestLevel(ttft_s=0.1)), [])
    outputs += run(engine)
    for key in KEYS[:3]:
        assert token_ids(outputs, key) == fake_output(prompt, 2)
    assert_clean(engine)


def test_n_completions_are_handed_off_and_their_prompt_travels_once() -> None:
    source, sink, prompt = make(), make(), list(range(1, 16))
    keys = KEYS[:3]
    segments: dict[str, list[Segment]] = {}
    moves = {key: Move(source, sink, key, handoff_id=key) for key in keys}
    for key in keys:
        source.submit(key, make_request(prompt, 9), [], handoff_id=key)
        sink.submit(key, make_request(prompt, 9), [], importing=True)
    outputs = run(source)
    for move in moves.values():
        move.hear(outputs)
    assert source.check_integrity().load.num_prefill_tokens == 15 + 2
    granted: dict[str, Reservation] = {}
    for key in keys:
        sink.incoming.reserve(key, len(prompt), lambda r, key=key: granted.__setitem__(key, r))
    assert list(granted) == ["0/0"]  # the others wait for its result
    for key in keys:
        segments[key] = moves[key].segments
        assert granted[key].num_held_tokens == (0 if key == "0/0" else 12)
        for segment in segments[key]:
            copy_blocks(source, sink, segment, granted[key])
        sealed = moves[key].sealed
        assert sealed is not None
        source.end_lease(key)
        sink.commit(key, seal_of(sealed), PullTimes())
        sink.incoming.grant_reservations()
    outputs += run(sink)
    for key in keys:
        assert token_ids(outputs, key) == fake_output(prompt, 9)
    assert_clean(source)
    assert_clean(sink)


def test_a_prompt_whose_beginning_is_on_the_way_is_waited_for() -> None:
    engine, prompt = make(), list(range(1, 16))
    engine.submit("0/0", make_request(prompt, 2), [], prefix=True)
    engine.submit("0/1", make_request(prompt, 2), [])
    assert isinstance(reserve(engine, "0/0", 12), Reservation)
    assert not engine.step().ran
    engine.fail_import("0/0", quarantine=False)
    outputs = run(engine)
    for key in ("0/0", "0/1"):
        assert token_ids(outputs, key) == fake_output(prompt, 2)
    assert engine.check_integrity().load.num_prefill_tokens == 15 + 1
    assert_clean(engine)


def test_nobody_is_late_because_a_beginning_on_its_way_is_stuck() -> None:
    clock = Clock()
    engine, prompt = make(clock=clock), list(range(1, 16))
    engine.submit("0/0", make_request(prompt, 2), [], prefix=True)
    for key in ("0/1", "0/2"):
        engine.submit(key, make_request(prompt, 2), [])
    assert not engine.step().ran
    due = engine.next_deadline()
    assert due == engine._sequences["0/1"].due > 0
    clock.now = due
    engine.submit("0/3", make_request([*prompt, 40], 2), [])
    outputs = run(engine)
    for key in ("0/1", "0/2"):
        assert token_ids(outputs, key) == fake_output(prompt, 2)
    assert engine.check_integrity().load.num_prefill_tokens == 15 + 1 + 4  # they waited for the first that was late
    engine.abort("0/0")
    engine.fail_import("0/0", quarantine=False)
    assert_clean(engine)


def test_who_is_late_already_waits_for_no_beginning_on_its_way() -> None:
    clock = Clock()
    engine, prompt = make(clock=clock), list(range(1, 16))
    engine.submit("0/1", make_request(prompt, 2), [])
    clock.now = engine._sequences["0/1"].due + 1.0
    engine.submit("0/0", make_request(prompt, 2), [], prefix=True)
    assert engine.step().ran


@pytest.mark.parametrize("num_more", [11, 12])  # tokens in all: the last block is open, or is filled by the last one
@pytest.mark.parametrize("how", ["preempted", "resumed"])
def test_who_decodes_with_one_token_left_keeps_nobody_waiting(how: str, num_more: int) -> None:
    """It had claimed what it would compute of all its tokens; the last of them is a decode's."""
    num_cached = 8 if how == "preempted" else 0
    engine, prompt = make(chunk_tokens=num_more - 1 - num_cached), list(range(1, 8))
    known = fake_output(prompt, num_more - 7)
    request = make_request(prompt, 40, ignore_eos=True)
    engine.submit("0/0", request, known if how == "resumed" else [])
    if how == "preempted":
        while len(engine._sequences["0/0"].token_ids) < num_more:
            engine.step()
        engine.scheduler._preempt(engine._sequences["0/0"])
    engine.step()
    assert engine._sequences["0/0"].num_uncomputed == 1
    engine.submit("0/1", make_request([*prompt, *known], 2, ignore_eos=True), [])
    outputs = [engine.step() for _ in range(4)]
    assert len(token_ids(outputs, "0/1")) == 2
    assert "0/0" in engine._sequences
    run(engine)
    assert_clean(engine)
