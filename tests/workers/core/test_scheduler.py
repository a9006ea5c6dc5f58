from collections.abc import Iterable
from dataclasses import replace

import pytest

from diptych.workers.common.request import USUAL_LEVEL, RequestLevel
from diptych.workers.common.role import Role
from diptych.workers.core.block_manager import BlockManager
from diptych.workers.core.prefix_cache import PrefixCache
from diptych.workers.core.scheduler import Scheduler
from diptych.workers.core.scheduler_config import LEAST_PREFILL_TOKENS, SchedulerConfig
from diptych.workers.core.sequence import KNOWN, Batch, Sequence, SequenceStatus
from diptych.workers.core.waiting_queue import LATE_S
from diptych.workers.costs.step_cost import (
    ANSWER_TOKENS,
    LATE_DECODE_STEPS,
    LATE_STEP,
    LOAD_DECODE_STEPS,
    LOAD_TPOT_S,
    TPOT_MARGIN,
    WAITING_PER_LEFT,
    StepCost,
    StepWork,
)

from ...support.sequences import make_request, make_sequence

BLOCK = 4


def make(num_blocks: int = 64, **config: float) -> tuple[Scheduler, BlockManager]:
    manager = BlockManager(num_blocks)
    return Scheduler(SchedulerConfig(**config), manager, PrefixCache(manager, BLOCK, enabled=False)), manager


def compute(batch: Batch) -> None:
    """What the engine does with a batch, with token 7 for every sample."""
    for entry in batch.entries:
        samples = entry.samples
        entry.sequence.num_computed += entry.num_new
        if samples:
            entry.sequence.token_ids.append(7)


def shape(batch: Batch) -> list[tuple[Sequence, int]]:
    return [(e.sequence, e.num_new) for e in batch.entries]


def test_long_prompts_are_chunked_and_decodes_go_first() -> None:
    scheduler, _ = make(max_batch_tokens=8, chunk_tokens=6)
    short, long = make_sequence([1] * 4), make_sequence([1] * 20)
    scheduler.add(short)
    scheduler.add(long)
    batch = scheduler.schedule()
    assert shape(batch) == [(short, 4), (long, 4)]
    compute(batch)
    batch = scheduler.schedule()
    assert shape(batch) == [(short, 1), (long, 6)]
    compute(batch)
    assert [e.samples for e in scheduler.schedule().entries] == [True, False]


def test_chunks_without_a_limit_take_the_budget() -> None:
    scheduler, _ = make(max_batch_tokens=16)
    sequence = make_sequence([1] * 30)
    scheduler.add(sequence)
    sizes = []
    while sequence.num_output == 0:
        batch = scheduler.schedule()
        sizes.append(batch.num_tokens)
        compute(batch)
    assert sizes == [16, 14]


def test_in_the_decode_role_prefill_is_held_back_only_beside_decodes() -> None:
    scheduler, _ = make(max_batch_tokens=64, decode_role_prefill_tokens=8)
    scheduler.prefill_budget = scheduler.config.budget_of(Role.DECODE)
    first, second = make_sequence([1] * 32), make_sequence([1] * 32)
    scheduler.add(first)
    compute(scheduler.schedule())
    scheduler.add(second)
    assert shape(scheduler.schedule()) == [(first, 1), (second, 8)]


def test_with_a_prefill_budget_of_0_a_prompt_that_stands_there_ends() -> None:
    scheduler, _ = make(max_batch_tokens=64)
    scheduler.prefill_budget = 0
    first, second = make_sequence([1] * 40), make_sequence([1] * 40)
    scheduler.add(first)
    batch = scheduler.schedule()
    assert shape(batch) == [(first, 40)]
    compute(batch)
    scheduler.add(second)
    chunks = []
    while second.num_output == 0:
        batch = scheduler.schedule()
        chunks.append(batch.num_prefill_tokens)
        compute(batch)
    assert chunks == [LEAST_PREFILL_TOKENS, LEAST_PREFILL_TOKENS, 8]


def test_a_change_of_the_prefill_budget_holds_from_the_next_step() -> None:
    scheduler, _ = make(max_batch_tokens=64)
    first, second = make_sequence([1] * 8), make_sequence([1] * 200)
    scheduler.add(first)
    compute(scheduler.schedule())
    scheduler.add(second)
    sizes = []
    for budget in (5, 64, 0, 40, 63):
        scheduler.prefill_budget = budget
        batch = scheduler.schedule()
        sizes.append(batch.num_prefill_tokens)
        compute(batch)
    assert sizes == [5, 63, 16, 40, 63]


def beside_decodes(
    num_decodes: int,
    *waiting: int,
    decode_s: float = 0.001,
    fixed_s: float = 0.0,
    role: Role = Role.MIXED,
    num_left: int = 1 << 60,
    promised: Iterable[float] = (),
    **config: float,
) -> int:
    """Prompt tokens of the step in which so many sequences decode, each with `num_left` tokens to make, and prompts so
    long have come. It was measured that a prompt token takes a millisecond, each decoding sequence `decode_s`, and each
    step `fixed_s`. `promised`: time per output token, of the first of them."""
    scheduler, _ = make(num_blocks=1024, max_batch_tokens=100, **config)
    scheduler.prefill_budget = scheduler.config.budget_of(role)
    for number in range(300):
        num_prefill = 10 * (number % 3)
        scheduler.cost.add(
            StepWork(number % 5).with_chunk(0, num_prefill), fixed_s + 0.001 * num_prefill + decode_s * (number % 5)
        )
    levels = [RequestLevel(tpot_s=tpot_s) for tpot_s in promised]
    for number in range(num_decodes):
        sequence = make_sequence([1], level=levels[number] if number < len(levels) else USUAL_LEVEL)
        sequence.end = 2 + num_left
        scheduler.add(sequence)
    compute(scheduler.schedule())
    for num_prompt in waiting:
        scheduler.add(make_sequence([1] * num_prompt))
    batch = scheduler.schedule()
    assert batch.num_decodes == num_decodes
    return batch.num_prefill_tokens


def test_beside_decodes_prompts_fill_a_step_of_a_fixed_time() -> None:
    assert beside_decodes(4, 90) == pytest.approx(1000 * LOAD_TPOT_S - 4, abs=2)
    assert beside_decodes(4, 30, 30, 30) == pytest.approx(1000 * LOAD_TPOT_S - 4, abs=2)
    assert beside_decodes(4, 90, role=Role.PREFILL) == 90


def test_a_known_cost_in_place_of_the_measured_one_bounds_steps_and_slack() -> None:
    """As in simulated workers: what a step costs is known before they begin."""
    scheduler, _ = make(max_batch_tokens=100, target_step_s=0.02)
    request, usual_s = make_request([1]), scheduler.config.ttft_s
    assert scheduler.slack_s(250, request) == usual_s
    scheduler.cost = StepCost()
    for number in range(300):  # a token takes a millisecond
        work = StepWork(number % 5).with_chunk(0, 10 * (number % 3))
        scheduler.cost.add(work, 0.001 * (work.num_decodes + work.num_prefill))
    assert scheduler.slack_s(250, request) == pytest.approx(usual_s - 0.25, abs=0.01)
    scheduler.add(make_sequence([1]))
    compute(scheduler.schedule())
    scheduler.add(make_sequence([1] * 90))
    batch = scheduler.schedule()
    assert batch.num_decodes == 1 and batch.num_prefill_tokens == pytest.approx(19, abs=2)


def decode_steps(num_waiting: int, num_left: int) -> float:
    """How many steps that only decode the prompt tokens of a step may take."""
    return LOAD_DECODE_STEPS - 1 + num_waiting / (WAITING_PER_LEFT * num_left)


def test_where_decodes_take_long_prompts_have_their_share_of_time() -> None:
    expected = 20 * decode_steps(90, 4 * ANSWER_TOKENS)
    assert beside_decodes(4, 90, decode_s=0.005) == pytest.approx(expected, abs=2)


def test_the_bound_grows_with_what_waits_for_each_token_that_the_decodes_may_make() -> None:
    fixed = pytest.approx(1000 * LOAD_TPOT_S - 2, abs=2)
    assert beside_decodes(2, 190, 190) == fixed  # long answers are not held up
    assert beside_decodes(2, 190, 190, num_left=1) == 98  # nor are many prompts, by two tokens
    assert beside_decodes(2, 190, 190, num_left=4, decode_s=0.003) == pytest.approx(6 * decode_steps(380, 8), abs=2)
    assert beside_decodes(2, 190, num_left=4, decode_s=0.003) == pytest.approx(6 * decode_steps(190, 8), abs=2)


def test_a_promised_time_per_token_takes_the_place_of_the_fixed_one_and_never_starves_prompts() -> None:
    assert beside_decodes(4, 90, tpot_s=0.06) == pytest.approx(50, abs=2)
    assert beside_decodes(4, 90, decode_s=0.005, fixed_s=0.04, tpot_s=0.01) == pytest.approx(40, abs=3)
    assert beside_decodes(4, 90, decode_s=0.005, tpot_s=0.01) == LEAST_PREFILL_TOKENS


def test_steps_aim_at_the_shortest_time_per_token_that_was_promised_to_a_sequence_that_decodes() -> None:
    assert beside_decodes(4, 90, promised=[0.02], tpot_s=0.06) == pytest.approx(14, abs=2)
    assert beside_decodes(4, 90, promised=[0.08, 0.03, 0.08, 0.08], tpot_s=0.06) == pytest.approx(23, abs=2)
    assert beside_decodes(4, 90, promised=[0.08], tpot_s=0.06) == pytest.approx(50, abs=2)  # three without their own
    assert beside_decodes(4, 90, promised=[0.08] * 4, tpot_s=0.06) == pytest.approx(68, abs=2)


def test_a_promise_ends_with_its_sequence() -> None:
    scheduler, _ = make(num_blocks=1024, max_batch_tokens=100)
    for number in range(60):
        scheduler.cost.add(StepWork().with_chunk(0, number % 30), 0.001 * (number % 30))
    tight, other = make_sequence([1], level=RequestLevel(tpot_s=0.01)), make_sequence([1])
    scheduler.add(tight)
    scheduler.add(other)
    compute(scheduler.schedule())
    scheduler.add(make_sequence([1] * 90))
    assert scheduler.schedule().num_prefill_tokens == LEAST_PREFILL_TOKENS
    scheduler.remove(tight)
    assert scheduler.schedule().num_prefill_tokens == pytest.approx(1000 * LOAD_TPOT_S, abs=4)


def test_slack_is_what_its_own_goal_leaves() -> None:
    scheduler, _ = make(ttft_s=2.0)
    request = make_request([1])
    hasty, patient = (replace(request, level=RequestLevel(ttft_s=ttft_s)) for ttft_s in (0.5, 30.0))
    assert [scheduler.slack_s(1000, r) for r in (hasty, request, patient)] == [0.5, 2.0, 30.0]
    for _ in range(60):
        scheduler.cost.add(StepWork().with_chunk(0, 400), 0.4)
    slacks = [scheduler.slack_s(400, r) for r in (hasty, request, patient)]
    assert slacks == pytest.approx([0.1, 1.6, 29.6], abs=0.01)
    late = replace(request, level=RequestLevel(ttft_s=0.3))
    assert scheduler.slack_s(400, late) == 2.0  # too late whatever comes: it does not go before others
    assert scheduler.slack_s(400, replace(patient, timeout_s=4.0)) == pytest.approx(3.6, abs=0.01)


def test_slack_counts_the_steps_of_those_that_decode() -> None:
    scheduler, _ = make(ttft_s=2.0, tpot_s=0.02)
    for number in range(120):
        num_decodes, num_tokens = number % 4, 100 * (number % 3)
        work = StepWork(num_decodes).with_chunk(0, num_tokens)
        scheduler.cost.add(work, 0.008 + 0.001 * num_decodes + 0.0001 * num_tokens)
    alone = scheduler.slack_s(1000, make_request([1]))
    scheduler.add(make_sequence([1]))
    compute(scheduler.schedule())
    scheduler.schedule()  # it decodes from here on
    target, decode = TPOT_MARGIN * 0.02, 0.009
    assert alone == pytest.approx(2 - 0.108, abs=0.005)
    assert scheduler.slack_s(1000, make_request([1])) == pytest.approx(2 - 0.108 * target / (target - decode), abs=0.02)


class Late:
    """A late prompt of 40 tokens under way, of which a first step computed some. A token costs 2 ms, a step 1 ms
    besides; TTFT is 1 s."""

    def __init__(self, others_come: bool, **config: float) -> None:
        self.scheduler, _ = make(num_blocks=1024, ttft_s=1.0, **config)
        for number in range(60):
            self.scheduler.cost.add(StepWork().with_chunk(0, number), 0.001 + 0.002 * number)
        if others_come:
            self.add(1, due=10.0)
            compute(self.scheduler.schedule(9.9))
            for sequence in list(self.scheduler.sequences()):
                self.scheduler.remove(sequence)
        self.late = self.add(40, due=5.0)
        self.batch = self.scheduler.schedule(10.0)
        compute(self.batch)

    def add(self, num_tokens: int, due: float) -> Sequence:
        sequence = make_sequence([1] * num_tokens)
        sequence.due = due
        self.scheduler.add(sequence)
        return sequence


def test_a_late_prompt_is_computed_at_once_where_nobody_comes_who_can_be_in_time() -> None:
    assert shape(Late(others_come=False).batch)[0][1] == 40


def test_a_late_prompt_is_computed_in_short_steps_where_others_come() -> None:
    late = Late(others_come=True)
    assert late.batch.num_tokens == pytest.approx((max(LATE_STEP, LATE_DECODE_STEPS * 0.001) - 0.001) / 0.002, abs=1)
    assert late.scheduler.num_late_tokens == late.late.num_uncomputed
    long_after = late.scheduler.schedule(20.0)
    assert long_after.num_tokens == late.late.num_uncomputed


def test_a_late_prompt_under_way_gives_way_to_one_that_can_be_in_time_and_goes_on_after_it() -> None:
    late = Late(others_come=True, max_batch_tokens=16)
    num_before, scheduler = late.late.num_computed, late.scheduler
    other = late.add(30, due=11.0)
    for expected in (16, 14):
        batch = scheduler.schedule(10.1)
        assert shape(batch)[0] == (other, expected)
        compute(batch)
    assert late.late.num_computed == num_before + LEAST_PREFILL_TOKENS - 14
    scheduler.remove(other)
    while late.late.num_output == 0:
        compute(scheduler.schedule(10.3))


def test_a_late_prompt_gives_way_no_longer_than_a_time() -> None:
    late = Late(others_come=True, max_batch_tokens=16)
    other = late.add(30, due=100.0)
    assert late.late.gives_way_until == 10.0 + LATE_S
    assert shape(late.scheduler.schedule(10.1 + LATE_S))[0] == (late.late, 16)
    assert late.scheduler.num_late_tokens == 0
    assert other.num_computed == 0


def test_who_waits_for_the_blocks_of_a_late_prompt_does_not_wait_for_others_before_it() -> None:
    manager = BlockManager(64)
    cache = PrefixCache(manager, BLOCK, enabled=True)
    scheduler = Scheduler(SchedulerConfig(max_batch_tokens=16), manager, cache)
    late, alike, other = (make_sequence(tokens) for tokens in ([1] * 40, [1] * 40 + [2], [3] * 40))
    for sequence, due in ((late, 5.0), (alike, 11.0), (other, 11.5)):
        sequence.due = due
    scheduler.add(late)
    compute(scheduler.schedule(10.0))
    cache.insert(late, 0)
    scheduler.add(other)
    compute(scheduler.schedule(10.1))
    assert (late.num_computed, other.num_computed) == (16, 16)
    scheduler.add(alike)
    scheduler.schedule(10.2)
    assert late.gives_way_until == 0.0


@pytest.mark.parametrize(("target_step_s", "expected"), [(0.0, 96), (0.03, 26), (0.002, LEAST_PREFILL_TOKENS)])
def test_a_target_that_is_set_is_kept(target_step_s: float, expected: int) -> None:
    assert beside_decodes(4, 500, target_step_s=target_step_s) == pytest.approx(expected, abs=2)


def test_admission_is_in_order_and_waits_for_blocks() -> None:
    scheduler, manager = make(num_blocks=6)
    big, bigger, small = make_sequence([1] * 16), make_sequence([1] * 17), make_sequence([1] * 4)
    for sequence in (big, bigger, small):
        scheduler.add(sequence)
    assert shape(scheduler.schedule()) == [(big, 16)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    scheduler.remove(big)
    assert [s for s, _ in shape(scheduler.schedule())] == [bigger, small]
    assert manager.num_free == 0


def test_a_prompts_last_step_is_followed_by_its_decode_beside_one_that_waits_for_blocks() -> None:
    scheduler, manager = make(num_blocks=6)
    short, stuck = make_sequence([1] * 4), make_sequence([1] * 40)
    short.input_from_previous = True
    scheduler.add(short)
    scheduler.add(stuck)
    prompt = scheduler.schedule()
    assert shape(prompt) == [(short, 4)]
    ahead = scheduler.schedule_ahead(prompt)
    assert ahead is not None and shape(ahead) == [(short, 1)] and ahead.previous_entries == [0]
    assert (short.num_computed, scheduler.num_waiting, manager.num_free) == (0, 1, 4)


def ahead_of(scheduler: Scheduler, under_way: Batch) -> Batch:
    ahead = scheduler.schedule_ahead(under_way)
    assert ahead is not None
    return ahead


def test_a_prompt_goes_on_beneath_the_step_that_computes_its_chunk_before() -> None:
    scheduler, _ = make(max_batch_tokens=8)
    long, last = make_sequence(list(range(20))), make_sequence(list(range(50, 56)))
    long.input_from_previous = last.input_from_previous = True
    scheduler.add(long)
    first = scheduler.schedule()
    assert shape(first) == [(long, 8)]
    scheduler.add(last)
    second = ahead_of(scheduler, first)
    assert long.num_computed == 0, "the books stay as before the first"
    assert [(e.sequence, e.start, e.num_new, e.samples) for e in second.entries] == [
        (long, 8, 4, False),
        (last, 0, 4, False),
    ]
    assert list(second.previous_entries) == [KNOWN, KNOWN] and second.num_decodes == 0
    compute(first)
    third = ahead_of(scheduler, second)
    assert [(e.sequence, e.start, e.num_new, e.samples) for e in third.entries] == [(long, 12, 8, True)]
    compute(second)
    fourth = ahead_of(scheduler, third)
    assert [(e.sequence, e.start, e.num_new) for e in fourth.entries] == [(long, 20, 1), (last, 4, 2)]
    assert (list(fourth.previous_entries), fourth.num_decodes) == ([0, KNOWN], 1)
    compute(third)
    assert [(e.sequence, e.start, e.samples) for e in fourth.entries] == [(long, 20, True), (last, 4, True)]


def test_who_follows_a_grammar_gets_its_first_token_in_a_step_that_was_not_launched_ahead() -> None:
    scheduler, _ = make(max_batch_tokens=8)
    free, bound = make_sequence(list(range(12))), make_sequence(list(range(50, 56)))
    free.input_from_previous = True
    scheduler.add(free)
    first = scheduler.schedule()
    scheduler.add(bound)
    second = ahead_of(scheduler, first)
    assert shape(second) == [(free, 4), (bound, 4)]
    compute(first)
    third = ahead_of(scheduler, second)
    assert shape(third) == [(free, 1), (bound, 1)]  # all but its last token
    compute(second)
    assert scheduler.schedule_ahead(third) is None
    compute(third)
    assert shape(scheduler.schedule()) == [(free, 1), (bound, 1)]


def test_max_running_is_kept() -> None:
    scheduler, _ = make(max_running=2)
    for _ in range(5):
        scheduler.add(make_sequence([1]))
    assert len(scheduler.schedule().entries) == 2


def test_a_step_has_max_running_sequences_though_more_arrived_by_hand_off() -> None:
    scheduler, manager = make(max_running=4)
    arrived = [make_sequence([1] * (20 if i < 3 else 4)) for i in range(10)]
    for sequence in arrived:  # all but their last token is here, or, of the first three, no more than the beginning
        sequence.num_computed, sequence.block_table = 3, manager.allocate(6)
        if sequence.num_prompt == 4:
            sequence.token_ids.append(7)
            sequence.num_computed = 4
        scheduler.add_running(sequence)
    for _ in range(12):
        batch = scheduler.schedule()
        assert 0 < len(batch.entries) <= 4
        compute(batch)
    assert all(sequence.num_output >= 3 for sequence in arrived), "everybody has a turn"


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler, manager = make(num_blocks=4)
    old, young, waiting = make_sequence([1] * 8), make_sequence([1] * 8), make_sequence([1] * 4)
    for sequence in (old, young, waiting):
        scheduler.add(sequence)
    compute(scheduler.schedule())
    batch = scheduler.schedule()  # both need a third block, but none is free
    assert shape(batch) == [(old, 1)]
    assert young.status is SequenceStatus.WAITING
    assert (young.block_table, young.num_computed, young.num_tokens) == ([], 0, 9)
    assert scheduler.num_preemptions == 1
    compute(batch)
    assert scheduler.num_waiting == 2
    scheduler.remove(old)
    assert [s for s, _ in shape(scheduler.schedule())] == [young, waiting]
    assert manager.check_integrity([young.block_table, waiting.block_table]) == 0


def test_a_source_is_never_preempted() -> None:
    scheduler, _ = make(num_blocks=4, chunk_tokens=7)
    decoding, source = make_sequence([1] * 7), make_sequence([1] * 8)
    source.handoff_id = "handoff"
    scheduler.add(decoding)
    compute(scheduler.schedule())
    scheduler.add(source)
    compute(scheduler.schedule())
    assert shape(scheduler.schedule()) == [(source, 1)]
    assert decoding.status is SequenceStatus.WAITING


def test_removing_a_waiting_sequence_touches_nothing_else() -> None:
    scheduler, manager = make()
    first, second = make_sequence([1] * 4), make_sequence([1] * 4)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.remove(first)
    assert shape(scheduler.schedule()) == [(second, 4)]
    scheduler.remove(second)
    assert (manager.num_free, scheduler.has_work) == (64, False)


def steps_until_all_have_begun(scheduler: Scheduler, sequences: Iterable[Sequence]) -> int:
    wanted, num_steps = list(sequences), 0
    while not all(s.num_output for s in wanted):
        batch = scheduler.schedule()
        assert batch.num_tokens <= scheduler.config.step_tokens
        compute(batch)
        num_steps += 1
        assert num_steps < 1000
    return num_steps


def test_short_prompts_do_not_wait_for_a_long_one_to_end() -> None:
    scheduler, _ = make(num_blocks=8192, max_batch_tokens=256)
    long = make_sequence([1] * 12_800, tenant=b"a")
    scheduler.add(long)
    compute(scheduler.schedule())
    short = [make_sequence([2] * 16, tenant=b"b") for _ in range(8)]
    for sequence in short:
        scheduler.add(sequence)
    batch = scheduler.schedule()
    assert shape(batch) == [(long, 128), *((each, 16) for each in short)]
    compute(batch)
    assert shape(scheduler.schedule())[-1] == (long, 256 - 8)  # nobody waits any more: all that is left


def test_what_short_prompts_leave_of_their_half_is_the_long_one_s() -> None:
    scheduler, _ = make(num_blocks=8192, max_batch_tokens=256)
    long, short = make_sequence([1] * 12_800), make_sequence([2] * 16)
    scheduler.add(long)
    compute(scheduler.schedule())
    scheduler.add(short)
    assert shape(scheduler.schedule()) == [(long, 240), (short, 16)]


def test_equal_prompts_come_one_after_the_other_and_shorter_ones_pass_both() -> None:
    scheduler, _ = make(num_blocks=8192, max_batch_tokens=64)
    first, second = make_sequence([1] * 640), make_sequence([2] * 640)
    scheduler.add(first)
    compute(scheduler.schedule())
    scheduler.add(second)
    middle, short = make_sequence([3] * 160), make_sequence([4] * 16)
    scheduler.add(middle)
    scheduler.add(short)
    assert steps_until_all_have_begun(scheduler, [short]) <= 4
    assert steps_until_all_have_begun(scheduler, [middle]) <= 6
    assert second.num_computed == 0
    assert steps_until_all_have_begun(scheduler, [first]) <= 6
    assert steps_until_all_have_begun(scheduler, [second]) <= 12


def test_a_long_prompt_keeps_half_of_each_step_whatever_comes() -> None:
    scheduler, _ = make(num_blocks=8192, max_batch_tokens=64)
    long = make_sequence([1] * 640)
    scheduler.add(long)
    compute(scheduler.schedule())
    while not long.num_output:
        for _ in range(4):
            scheduler.add(make_sequence([2] * 16))
        before, num_decoding = long.num_computed, scheduler.num_decoding
        batch = scheduler.schedule()
        compute(batch)
        num_prompt = batch.num_prefill_tokens
        assert long.num_computed - before >= min(num_prompt // 2, 640 - before), num_decoding
        for sequence in [e.sequence for e in batch.entries if e.sequence is not long and e.sequence.num_output]:
            scheduler.remove(sequence)


def test_a_long_prompt_and_short_ones_share_a_step_of_a_set_time() -> None:
    scheduler, _ = make(num_blocks=8192, max_batch_tokens=1000, target_step_s=0.1)
    for number in range(300):  # a millisecond for each decode and each prompt token
        work = StepWork(number % 5).with_chunk(0, 10 * (number % 3))
        scheduler.cost.add(work, 0.001 * (10 * (number % 3) + number % 5))
    decoding, long = make_sequence([1]), make_sequence([1] * 12_000)
    scheduler.add(decoding)
    compute(scheduler.schedule())
    scheduler.add(long)
    compute(scheduler.schedule())
    short = [make_sequence([2] * 20) for _ in range(5)]
    for sequence in short:
        scheduler.add(sequence)
    batch = scheduler.schedule()
    sizes = {e.sequence: e.num_new for e in batch.entries[1:]}
    assert sum(sizes.values()) == pytest.approx(99, abs=2)
    assert sizes[long] == pytest.approx(50, abs=1)
    assert sizes[short[0]] == sizes[short[1]] == 20
