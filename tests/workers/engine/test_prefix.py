"""Cached prefixes move between engines; a prefix that cannot be pulled is computed."""

import pytest

from diptych.workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    HandoffError,
    InvalidRequest,
    LeaseLost,
    RequestAborted,
)
from diptych.workers.common.request import MAX_CACHE_SALT_BYTES
from diptych.workers.common.timings import PullTimes
from diptych.workers.engine.engine import Engine
from diptych.workers.handoff.types import HandoffRefused, Reservation
from diptych.workers.testing.fake_runner import fake_output

from ...support.engines import (
    HANDOFF,
    Clock,
    Move,
    assert_clean,
    make,
    make_seal,
    reserve,
    run,
    tokens,
)
from ...support.sequences import make_request

PROMPT = list(range(1, 23))  # five full blocks of four, and two tokens


def warm(prompt: list[int] = PROMPT) -> Engine:
    """An engine whose cache holds the full blocks of `prompt`."""
    engine = make()
    engine.submit("9/9", make_request(prompt, 1), [])
    run(engine)
    return engine


def offered(source: Engine, sink: Engine, token_ids: list[int] = PROMPT, key: str = "0/1") -> Move:
    source.outgoing.offer_prefix(HANDOFF, token_ids, b"")
    move = Move(source, sink, key)
    move.hear([source.step()])
    return move


@pytest.mark.parametrize(
    ("num_prompt", "num_offered", "num_cached"), [(22, 20, 20), (21, 20, 20), (20, 20, 19), (40, 20, 20), (19, 16, 16)]
)
def test_a_prefix_is_pulled_and_the_rest_computed(num_prompt: int, num_offered: int, num_cached: int) -> None:
    """Of a prompt whose every block came, the last token is computed: its logits are needed."""
    prompt = list(range(1, num_prompt + 1))
    source, sink = warm(), make(max_batch_tokens=6)
    move = offered(source, sink, prompt)
    assert move.opened is not None and not move.opened.is_live
    assert move.sealed is not None and move.sealed.num_computed == move.opened.num_tokens == num_offered
    for key in ("0/1", "0/2"):  # the second finds it all in its own cache
        sink.submit(key, make_request(prompt, 9), [], prefix=key == "0/1")
        if key == "0/1":
            assert not sink.step().tokens
            move.commit()
        events = tokens(run(sink), key)
        assert [e.token_id for e in events] == fake_output(prompt, 9)
        assert events[0].num_cached == (num_cached if key == "0/1" else (num_prompt - 1) // 4 * 4)
    assert sink.check_integrity().load.num_prefixes_pulled == 1
    assert_clean(source)
    assert_clean(sink)


def test_what_is_not_cached_is_refused_by_name() -> None:
    source = warm()
    for token_ids, salt in (([5, *PROMPT], b""), (PROMPT, b"another tenant"), (PROMPT[:3], b""), ([], b"")):
        source.outgoing.offer_prefix(HANDOFF, token_ids, salt)
        move = Move(source, make())
        move.hear([source.step()])
        assert move.opened is None and isinstance(move.over, HandoffError) and "no longer, in" in move.over.message
    offered(source, make())
    source.outgoing.offer_prefix(HANDOFF, PROMPT, b"")
    assert "single-use" in source.step().handoffs[0].error.message  # type: ignore[union-attr]
    assert source.check_integrity().load.num_leased_blocks == 5
    source.end_lease(HANDOFF)
    assert_clean(source)


def test_a_salt_that_is_too_long_is_refused_before_it_is_hashed() -> None:
    source = warm()
    source.outgoing.offer_prefix(HANDOFF, PROMPT, b"s" * (MAX_CACHE_SALT_BYTES + 1))
    (refused,) = source.step().handoffs
    assert isinstance(refused, HandoffRefused) and isinstance(refused.error, InvalidRequest)
    assert "257 bytes; at most 256" in refused.error.message
    source.outgoing.offer_prefix(HANDOFF, PROMPT, b"s" * MAX_CACHE_SALT_BYTES)
    (refused,) = source.step().handoffs
    assert isinstance(refused, HandoffRefused) and "no longer, in" in refused.error.message
    assert_clean(source)


def test_leased_blocks_are_not_evicted() -> None:
    source, sink = make(num_blocks=8), make()
    source.submit("9/9", make_request(PROMPT, 1), [])
    run(source)
    move = offered(source, sink)
    source.submit("9/8", make_request([50] * 20, 2), [])  # needs more blocks than are left
    source.step()
    assert source.scheduler.num_waiting == 1
    sink.submit("0/1", make_request(PROMPT, 5), [], prefix=True)
    move.commit()
    assert [e.token_id for e in tokens(run(sink), "0/1")] == fake_output(PROMPT, 5)
    assert [e.token_id for e in tokens(run(source), "9/8")] == fake_output([50] * 20, 2)
    assert_clean(source)
    assert_clean(sink)


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("quarantine", [False, True])
def test_without_its_prefix_a_sequence_is_computed_here(reserved: bool, quarantine: bool) -> None:
    sink = make()
    sink.submit("0/1", make_request(PROMPT, 5), [], prefix=True)
    if reserved:
        assert isinstance(reserve(sink, "0/1", 20), Reservation)
    sink.fail_import("0/1", quarantine=quarantine)
    sink.fail_import("0/1", quarantine=False)
    outputs = run(sink)
    assert [e.token_id for e in tokens(outputs, "0/1")] == fake_output(PROMPT, 5)
    assert not any(o.failures for o in outputs)
    assert sink.check_integrity().load.num_quarantined_blocks == (6 if reserved and quarantine else 0)
    sink.incoming.settle("0/1")
    assert_clean(sink)


def test_a_source_that_offers_or_seals_nonsense_costs_only_time() -> None:
    sink = make()
    sink.submit("0/1", make_request(PROMPT, 5), [], prefix=True)
    for num_tokens in (0, len(PROMPT) + 1):
        assert isinstance(reserve(sink, "0/1", num_tokens), HandoffError)
    for num_computed, outputs in ((20, []), (0, []), (20, [7])):
        with pytest.raises(HandoffError):
            sink.commit("0/1", make_seal(num_computed, outputs), PullTimes())  # nothing is reserved yet
    assert isinstance(reserve(sink, "0/1", 16), Reservation)
    for num_computed, outputs in ((20, []), (0, []), (16, [7]), (16, [1 << 31])):
        with pytest.raises(HandoffError):
            sink.commit("0/1", make_seal(num_computed, outputs), PullTimes())
    sink.fail_import("0/1", quarantine=False)
    assert [e.token_id for e in tokens(run(sink), "0/1")] == fake_output(PROMPT, 5)
    assert_clean(sink)


def test_what_is_cached_here_is_not_waited_for() -> None:
    sink = warm()
    sink.submit("0/1", make_request(PROMPT, 5), [], prefix=True)
    assert isinstance(reserve(sink, "0/1", 20), RequestAborted)  # the pull ends
    sink.fail_import("0/1", quarantine=False)
    events = tokens(run(sink), "0/1")
    assert [e.token_id for e in events] == fake_output(PROMPT, 5)
    assert events[0].num_cached == 20
    assert_clean(sink)


def test_our_own_cache_may_hold_more_than_is_offered() -> None:
    source, sink = warm(PROMPT[:8]), warm(PROMPT[:16])
    move = offered(source, sink)
    sink.submit("0/1", make_request(PROMPT, 5), [], prefix=True)
    move.commit()
    events = tokens(run(sink), "0/1")
    assert [e.token_id for e in events] == fake_output(PROMPT, 5)
    assert events[0].num_cached == 16
    assert sink.check_integrity().load.num_prefixes_pulled == 0
    assert_clean(source)
    assert_clean(sink)


@pytest.mark.parametrize("reserved", [False, True])
def test_a_request_that_ends_while_its_prefix_is_on_the_way(reserved: bool) -> None:
    clock = Clock()
    sink = make(clock=clock)
    for key, prompt in (("0/1", PROMPT), ("0/2", PROMPT[::-1])):
        sink.submit(key, make_request(prompt, 5), [], handoff_id=key, prefix=True)
        if reserved:
            assert isinstance(reserve(sink, key, 20), Reservation)
    sink.abort("0/1")
    clock.now = 61.0
    output = sink.step()
    assert [(f.key, type(f.error)) for f in output.failures] == [("0/2", DeadlineExceeded)]
    assert [e.handoff_id for e in output.handoffs] == ["0/1", "0/2"]  # its own sinks are informed
    for key in ("0/1", "0/2"):
        with pytest.raises(DiptychError):
            sink.commit(key, make_seal(20, []), PullTimes())
        sink.fail_import(key, quarantine=False)
        sink.end_lease(key)
    assert not sink.scheduler.has_work
    assert_clean(sink)


def test_a_prefill_worker_pulls_a_prefix_and_hands_the_sequence_off() -> None:
    cached, prefill, decode = warm(), make(max_batch_tokens=3), make()
    prompt = [*PROMPT, *range(50, 58)]
    prefix = offered(cached, prefill, prompt)
    prefill.submit("0/1", make_request(prompt, 9), [], handoff_id="second", prefix=True)
    decode.submit("0/1", make_request(prompt, 9), [], importing=True)
    onward = Move(prefill, decode, handoff_id="second")
    prefix.commit()
    onward.hear([prefill.step()])
    assert sum(len(s.block_ids) for s in onward.segments) == 5  # the pulled prefix is handed on immediately
    reservation = reserve(decode, "0/1", len(prompt))
    assert isinstance(reservation, Reservation)
    onward.reservation = reservation
    made = [e.token_id for e in tokens(onward.hear(run(prefill)), "0/1")]
    onward.commit()
    assert made + [e.token_id for e in tokens(run(decode), "0/1")] == fake_output(prompt, 9)
    for engine in (cached, prefill, decode):
        assert_clean(engine)


def test_a_lease_lost_while_the_prefix_is_on_the_way_fails_the_sequence() -> None:
    sink = make()
    sink.submit("0/1", make_request(PROMPT, 5), [], handoff_id=HANDOFF, prefix=True)
    sink.end_lease(HANDOFF)
    assert [type(f.error) for f in sink.step().failures] == [LeaseLost]
    sink.fail_import("0/1", quarantine=False)
    assert not sink.scheduler.has_work
    assert_clean(sink)
