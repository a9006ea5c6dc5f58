"""The engine with the FakeRunner: every token is computed from values read back from KV memory."""

import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from diptych.workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    InvalidRequest,
    LeaseLost,
    PromptReturned,
    RequestAborted,
)
from diptych.workers.common.request import FinishReason, Request, SamplingParams
from diptych.workers.common.timings import HandoffTimings, PullTimes, SequenceTimings
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.handoff.types import HandoffEnded, HandoffSealed, Reservation, SegmentReady
from diptych.workers.testing.fake_runner import FakeRunner, fake_output

from ...support.engines import (
    HANDOFF,
    Clock,
    assert_clean,
    copy_blocks,
    make,
    make_seal,
    make_slow,
    reserve,
    run,
    seal_of,
    tokens,
)
from ...support.sequences import make_request


@pytest.mark.parametrize("chunk_tokens", [0, 3, 16])
def test_tokens_are_what_a_person_computes(chunk_tokens: int) -> None:
    engine = make(chunk_tokens=chunk_tokens)
    prompt = list(range(1, 30))
    engine.submit("0/1", make_request(prompt, 10), [])
    events = tokens(run(engine), "0/1")
    assert [e.token_id for e in events] == fake_output(prompt, 10)
    assert [e.position for e in events] == list(range(10))
    assert [e.finish for e in events] == [None] * 9 + [FinishReason.LENGTH]
    assert [e.num_cached for e in events] == [0] + [None] * 9
    assert_clean(engine)


def test_a_cached_prefix_is_reused_and_reported() -> None:
    engine = make()
    prompt = list(range(1, 18))
    found: list[tuple[int | None, int]] = []
    for key, num in (("0/1", 17), ("0/2", 17), ("0/3", 11), ("0/4", 16)):
        engine.submit(key, make_request(prompt[:num], 3), [])
        events = tokens(run(engine), key)
        assert [e.token_id for e in events] == fake_output(prompt[:num], 3)
        found.append((events[0].num_cached, events[0].num_stored))
    assert found == [(0, 16), (16, 0), (8, 0), (12, 0)], (
        "the last block of the last one is known, though computed again"
    )
    assert_clean(engine)


def test_ends_at_eos_stop_tokens_and_the_context() -> None:
    engine = make()
    prompt = [400, 600]  # sums to 1000: the next token is 0, which is eos
    engine.submit("0/1", make_request(prompt, 5), [])
    engine.submit("0/2", make_request(prompt, 3, ignore_eos=True), [])
    engine.submit("0/3", make_request([1, 2], 5, stop_token_ids=(6,)), [])
    engine.submit("0/4", make_request([1] * 254, 2), [])
    outputs = run(engine)
    assert [(e.token_id, e.finish) for e in tokens(outputs, "0/1")] == [(0, FinishReason.STOP)]
    assert [e.finish for e in tokens(outputs, "0/2")] == [None, None, FinishReason.LENGTH]
    assert [(e.token_id, e.finish) for e in tokens(outputs, "0/3")] == [(3, None), (6, FinishReason.STOP)]
    assert [e.finish for e in tokens(outputs, "0/4")] == [None, FinishReason.LENGTH]
    assert_clean(engine)


def test_preemption_changes_no_token() -> None:
    engine = make(num_blocks=12)
    prompts = {f"0/{i}": [i + 1] * (5 + i) for i in range(5)}
    for key, prompt in prompts.items():
        engine.submit(key, make_request(prompt, 20, ignore_eos=True), [])
    outputs = run(engine)
    for key, prompt in prompts.items():
        expected = list(prompt)
        for _ in range(20):
            expected.append(sum(expected) % 1000)
        assert [e.token_id for e in tokens(outputs, key)] == expected[len(prompt) :]
    assert engine.scheduler.num_preemptions > 0
    assert_clean(engine)


def test_prompts_that_have_not_begun_go_back_when_the_prefill_budget_becomes_0() -> None:
    """Those that run, resumed or not, end here; and what comes afterwards is computed."""
    engine = make(max_running=2)
    prompts = {f"0/{i}": [i + 1] * (5 + i) for i in range(4)}
    for key, prompt in prompts.items():
        engine.submit(key, make_request(prompt, 20, ignore_eos=True), [])
    outputs = [engine.step()]
    engine.set_prefill_budget(0)
    engine.set_prefill_budget(0)
    outputs.append(engine.step())
    returned = [(f.key, type(f.error)) for output in outputs for f in output.failures]
    assert returned == [("0/2", PromptReturned), ("0/3", PromptReturned)]
    engine.submit("0/4", make_request([7, 8], 20, ignore_eos=True), [])
    outputs += run(engine)
    for key, prompt in {"0/0": prompts["0/0"], "0/1": prompts["0/1"], "0/4": [7, 8]}.items():
        assert len(tokens(outputs, key)) == 20, (key, prompt)
    assert sum(len(output.failures) for output in outputs) == 2
    assert_clean(engine)


def test_a_budget_is_a_whole_steps_at_most() -> None:
    engine = make(max_batch_tokens=64)
    engine.set_prefill_budget(2**32 - 1)
    assert engine.scheduler.prefill_budget == 64


def test_a_busy_engine_tells_its_blocks_with_its_load() -> None:
    clock = Clock()
    engine = make(clock=clock)
    engine.submit("0/1", make_request([1, 2, 3], 40, ignore_eos=True), [])
    outputs = [engine.step() for _ in range(20)]
    assert sum(bool(output.stored) for output in outputs) <= 1
    clock.now += 1.0
    outputs.append(engine.step())
    assert outputs[-1].load is not None and outputs[-1].stored
    outputs += [*run(engine), engine.step()]  # the last one has nothing to compute
    told = [name for output in outputs for name in output.stored]
    assert len(told) == len(set(told)) and set(told) == set(engine.all_block_names())


def test_an_answers_end_comes_with_its_blocks() -> None:
    """Else a request that follows at once would be sent to a worker without them."""
    engine = make(clock=Clock())
    engine.submit("0/1", make_request([1, 2, 3], 40, ignore_eos=True), [])
    (last,) = [output for output in run(engine) if output.tokens.has_finish]
    assert last.ran and last.load is None
    assert set(last.stored) == set(engine.all_block_names())


def test_a_resumed_request_continues_where_it_stopped() -> None:
    engine = make()
    prompt, expected = [1, 2, 3], fake_output([1, 2, 3], 9)
    engine.submit("0/1", make_request(prompt, 9), expected[:4])
    events = tokens(run(engine), "0/1")
    assert [(e.position, e.token_id) for e in events] == list(enumerate(expected))[4:]
    assert_clean(engine)


@pytest.mark.parametrize(
    ("request_", "outputs"),
    [
        (make_request([], 4), []),
        (make_request([1000], 4), []),
        (make_request([1] * 256, 1), []),
        (make_request([1] * 250, 7), []),
        (make_request([1], 2), [5, 5]),
        (make_request([1], 4), [-1]),
        (Request("r", (1,), SamplingParams(temperature=float("nan")), 1.0), []),
        (Request("r", (1,), SamplingParams(), float("inf")), []),
    ],
)
def test_bad_requests_become_events_not_exceptions(request_: Request, outputs: list[int]) -> None:
    engine = make()
    engine.submit("0/1", request_, outputs, handoff_id=HANDOFF)
    output = engine.step()
    assert [isinstance(f.error, InvalidRequest) for f in output.failures] == [True]
    assert isinstance(output.handoffs[0], HandoffEnded)
    assert_clean(engine)


def test_abort_and_deadline_free_the_blocks() -> None:
    clock = Clock()
    engine = make(clock=clock, max_batch_tokens=8)
    for i in range(4):
        engine.submit(f"0/{i}", make_request([1] * 20, 50), [])
    engine.step()
    engine.abort("0/0")
    engine.abort("0/0")
    engine.abort("9/9")
    clock.now = 61.0
    output = engine.step()
    assert {(f.key, type(f.error)) for f in output.failures} == {(f"0/{i}", DeadlineExceeded) for i in (1, 2, 3)}
    assert_clean(engine)


def test_deadline_and_slack_count_from_receipt_though_a_step_ran_since_then() -> None:
    clock = Clock()
    engine = make(clock=clock)
    clock.now = 7.0
    engine.submit("0/1", replace(make_request([1] * 20, 50), received_at=5.0), [])
    engine.submit("0/2", make_request([1] * 20, 50), [])
    received, taken = engine.scheduler.sequences()
    assert (received.deadline, taken.deadline) == (5.0 + received.request.timeout_s, 7.0 + taken.request.timeout_s)
    assert (received.due, taken.due) == (6.0, 8.0)


def test_a_failed_step_fails_its_sequences_and_leaves_the_engine_usable() -> None:
    engine = make()
    engine.submit("0/1", make_request([1, 2, 3], 9), [])
    engine.submit("0/2", make_request([4, 5, 6], 9), [], handoff_id=HANDOFF)
    engine.step()
    engine.step_failed(RuntimeError("a kernel"))
    output = engine.step()
    assert [f.key for f in output.failures] == ["0/1"]  # the other was sealed before
    engine.end_lease(HANDOFF)
    engine.submit("0/3", make_request([4], 2), [])
    assert [e.token_id for e in tokens(run(engine), "0/3")] == [4, 8]
    assert_clean(engine)


def hand_off(source: Engine, sink: Engine, key: str, request: Request, resumed: list[int]) -> list[StepOutput]:
    """Prefill `request` on one engine, move it, and run it to its end on the other."""
    source.submit(key, request, resumed, handoff_id=HANDOFF)
    sink.submit(key, request, resumed, importing=True)
    reservation = reserve(sink, key, len(request.prompt_token_ids) + len(resumed))
    assert isinstance(reservation, Reservation)
    outputs = run(source)
    events = [e for o in outputs for e in o.handoffs]
    for event in events:
        if isinstance(event, SegmentReady):
            copy_blocks(source, sink, event.segment, reservation)
    sealed = events[-1]
    assert isinstance(sealed, HandoffSealed)
    sink.incoming.commit(key, seal_of(sealed))
    source.end_lease(HANDOFF)
    return outputs + run(sink)


def test_the_first_token_tells_what_it_waited_for() -> None:
    clock = Clock()
    engine = make_slow(clock, chunk_tokens=4)
    engine.submit("0/1", make_request([1] * 10, 3), [])
    clock.now += 5
    events = tokens(run(engine), "0/1")  # three chunks
    assert [e.timings for e in events] == [SequenceTimings(queue_s=5, compute_s=6), None, None]


def test_a_sinks_first_token_tells_of_its_pull() -> None:
    clock = Clock()
    sink = make_slow(clock)
    sink.submit("0/1", make_request([1] * 5, 3), [], importing=True)
    assert isinstance(reserve(sink, "0/1", 5), Reservation)
    clock.now += 7
    times = PullTimes(announce_to_pull_s=0.25, pull_s=3, last_segment_s=1, read_at=4, num_bytes=99, transport="grpc")
    sink.commit("0/1", make_seal(5, [5]), times)
    clock.now += 0.5
    events = tokens(run(sink), "0/1")
    handoff = HandoffTimings(0.25, 3, 1, release_s=3, num_bytes=99, transport="grpc")
    assert [e.timings for e in events] == [SequenceTimings(0.5, 2, handoff), None]


@pytest.mark.parametrize("num_resumed", [0, 3])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 31, 32])
@pytest.mark.parametrize("chunk_tokens", [0, 5])
def test_a_handed_off_sequence_goes_on_with_the_same_tokens(
    num_prompt: int, num_resumed: int, chunk_tokens: int
) -> None:
    source, sink = make(chunk_tokens=chunk_tokens), make()
    prompt = list(range(1, num_prompt + 1))
    expected = fake_output(prompt, 12)
    for key in ("0/1", "0/2"):  # the second time with both prefix caches warm
        outputs = hand_off(source, sink, key, make_request(prompt, 12), expected[:num_resumed])
        events = tokens(outputs, key)
        assert [(e.position, e.token_id) for e in events] == list(enumerate(expected))[num_resumed:]
    assert_clean(source)
    assert_clean(sink)


def test_leased_blocks_wait_for_the_end_of_the_lease() -> None:
    source = make(prefix_cache=False)
    source.submit("0/1", make_request([1] * 9, 5), [], handoff_id=HANDOFF)
    run(source)
    assert source.check_integrity().load.num_leased_blocks == 3
    source.end_lease(HANDOFF)
    source.end_lease(HANDOFF)
    assert_clean(source)


def test_a_sequence_that_ends_with_its_first_token_ends_its_handoff() -> None:
    source = make()
    source.submit("0/1", make_request([400, 600], 5), [], handoff_id=HANDOFF)
    outputs = run(source)
    ended = outputs[0].handoffs[-1]
    assert isinstance(ended, HandoffEnded)
    assert isinstance(ended.error, RequestAborted)
    source.end_lease(HANDOFF)
    assert_clean(source)


def test_aborting_a_sealed_sequence_tells_its_sink() -> None:
    source = make()
    source.submit("0/1", make_request([1] * 9, 5), [], handoff_id=HANDOFF)
    run(source)
    source.abort("0/1")
    assert isinstance(source.step().handoffs[0], HandoffEnded)
    source.end_lease(HANDOFF)
    assert_clean(source)


def test_a_lease_lost_while_computing_fails_the_sequence() -> None:
    source = make(max_batch_tokens=4)
    source.submit("0/1", make_request([1] * 20, 5), [], handoff_id=HANDOFF)
    source.step()
    source.end_lease(HANDOFF)
    output = source.step()
    assert isinstance(output.failures[0].error, LeaseLost)
    assert output.failures[0].error.retryable
    assert_clean(source)


def test_a_reservation_waits_for_blocks_in_order() -> None:
    sink = make(num_blocks=8, prefix_cache=False)
    sink.submit("0/1", make_request([1] * 20, 5), [])
    sink.step()
    sink.submit("0/2", make_request([1] * 16, 5), [], importing=True)
    sink.submit("0/3", make_request([1] * 4, 5), [], importing=True)
    granted: list[str] = []
    sink.incoming.reserve("0/2", 16, lambda _: granted.append("0/2"))
    sink.incoming.reserve("0/3", 4, lambda _: granted.append("0/3"))
    assert granted == []
    run(sink)
    assert granted == ["0/2", "0/3"]
    sink.abort("0/2")
    sink.abort("0/3")
    assert sink.check_integrity().load.num_free_blocks == 3  # the pulls may still be reading
    sink.fail_import("0/2", quarantine=False)
    sink.fail_import("0/3", quarantine=True)
    assert sink.check_integrity().load.num_quarantined_blocks == 1
    sink.incoming.settle("0/3")
    assert_clean(sink)


def test_reserving_and_committing_check_what_the_source_says() -> None:
    sink = make()
    assert isinstance(reserve(sink, "0/9", 4), RequestAborted)
    sink.submit("0/1", make_request([1] * 5, 5), [], importing=True)
    for num_tokens in (0, 3, 11):  # at least all but the last token, at most prompt and max_tokens
        assert isinstance(reserve(sink, "0/1", num_tokens), DiptychError)
    assert isinstance(reserve(sink, "0/1", 5), Reservation)
    for num_computed, outputs in ((4, [7]), (5, []), (5, [7, 8])):
        with pytest.raises(DiptychError, match="the source sealed"):
            sink.incoming.commit("0/1", make_seal(num_computed, outputs))
    sink.fail_import("0/1", quarantine=False)
    sink.fail_import("0/1", quarantine=False)
    assert_clean(sink)


@pytest.mark.parametrize("seed", range(30))
def test_random_work_never_loses_a_block_or_a_token(seed: int) -> None:
    rng = random.Random(seed)
    engine = make(
        num_blocks=rng.choice([10, 24, 64]), max_batch_tokens=rng.choice([7, 64]), chunk_tokens=rng.choice([0, 5])
    )
    wanted: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    open_handoffs: set[str] = set()
    for number in range(120):
        key = f"0/{number}"
        roll = rng.random()
        if roll < 0.3:
            prompt = [rng.randint(1, 3)] * rng.randint(1, 24)
            wanted[key] = fake_output(prompt, 8)
            engine.submit(key, make_request(prompt, 8), [])
        elif roll < 0.4:
            engine.submit(key, make_request([2] * rng.randint(1, 24), 8), [], handoff_id=key)
            open_handoffs.add(key)
        elif roll < 0.5 and wanted:
            gone = rng.choice(list(wanted))
            del wanted[gone]
            engine.abort(gone)
        elif roll < 0.6 and open_handoffs:
            engine.end_lease(open_handoffs.pop())
        for event in engine.step().tokens:
            got.setdefault(event.key, []).append(event.token_id)
        assert engine.check_integrity().num_unaccounted_blocks == 0
    for handoff_id in open_handoffs:
        engine.end_lease(handoff_id)
    for output in run(engine):
        for event in output.tokens:
            got.setdefault(event.key, []).append(event.token_id)
    assert {key: got[key] for key in wanted} == wanted
    assert_clean(engine)


class RunnerWithExperts(FakeRunner):
    def __init__(self) -> None:
        super().__init__()
        self.info = replace(self.info, num_experts=(0, 3))

    def expert_tokens(self) -> npt.NDArray[np.int64]:
        return np.array([[0, 0, 0], [1, 7, 4]])


def test_the_load_of_experts_is_reported() -> None:
    state = Engine(RunnerWithExperts(), SchedulerConfig()).check_integrity()
    load = state.load
    assert list(load.expert_tokens) == [1, 7, 4]
    assert list(load.expert_imbalance) == [0.0, 1.75]
    assert [(of.layer, list(of.tokens)) for of in state.experts] == [(1, [1, 7, 4])]
    without = make().check_integrity()
    assert not without.load.expert_tokens and not without.experts
