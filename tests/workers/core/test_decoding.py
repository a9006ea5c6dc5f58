"""Sequences that decode. Those that got several tokens at once: as urgent as any other, within the step's tokens."""

import random

from diptych.workers.common.request import RequestLevel
from diptych.workers.core.decoding import TightestTpot, work_of
from diptych.workers.core.scheduler import Scheduler
from diptych.workers.core.sequence import Sequence
from diptych.workers.costs.step_cost import StepWork

from ...support.sequences import make_sequence
from .test_scheduler import BLOCK, compute, make, shape

DEFAULT_S = 0.04  # of those that were promised nothing


def decoding(scheduler: Scheduler, *prompts: int) -> list[Sequence]:
    """Sequences with prompts of so many tokens, that have their first token."""
    found = [make_sequence([i] * num, max_tokens=100) for i, num in enumerate(prompts)]
    for sequence in found:
        scheduler.add(sequence)
    while any(not sequence.num_output for sequence in found):
        compute(scheduler.schedule())
    scheduler.schedule()
    return found


def force(scheduler: Scheduler, sequence: Sequence, num: int) -> None:
    """Give it a run of so many tokens, with the one that it has got."""
    sequence.token_ids += [7] * (num - 1)
    sequence.run_length = num
    scheduler.forward(sequence)


def test_a_run_comes_after_decodes_and_before_prompts_and_then_it_decodes() -> None:
    scheduler, _ = make()
    first, second = decoding(scheduler, 4, 4)
    force(scheduler, first, 6)
    prompt = make_sequence([9] * 20)
    scheduler.add(prompt)
    batch = scheduler.schedule()
    assert shape(batch) == [(second, 1), (first, 6), (prompt, 20)]
    assert (batch.num_decodes, batch.num_runs) == (1, 1)
    assert (batch.num_decode_tokens, batch.num_prefill_tokens, batch.num_tokens) == (7, 20, 27)
    assert scheduler.num_decoding == 2
    compute(batch)
    batch = scheduler.schedule()
    assert shape(batch) == [(first, 1), (second, 1), (prompt, 1)] and batch.num_runs == 0


def test_a_run_is_computed_where_no_prompt_is() -> None:
    scheduler, _ = make()
    first, second = decoding(scheduler, 4, 4)
    force(scheduler, first, 6)
    scheduler.prefill_budget = 0
    assert shape(scheduler.schedule()) == [(second, 1), (first, 6)]


def test_the_run_of_a_first_token_does_not_wait_behind_a_longer_prompt() -> None:
    scheduler, _ = make(max_batch_tokens=16)
    long, short = make_sequence([1] * 40), make_sequence([2] * 4)
    scheduler.add(long)
    compute(scheduler.schedule())
    scheduler.add(short)
    while not short.num_output:
        compute(scheduler.schedule())
    force(scheduler, short, 5)
    assert (short, 5) in shape(scheduler.schedule())


def test_runs_share_what_a_step_may_compute_and_each_computes_a_token() -> None:
    scheduler, _ = make(max_batch_tokens=8)
    sequences = decoding(scheduler, 2, 2, 2)
    for sequence in sequences:
        force(scheduler, sequence, 7)
    batch = scheduler.schedule()
    assert [num for _, num in shape(batch)] == [6, 1, 1] and not any(e.samples for e in batch.entries)
    assert batch.num_tokens == 8 and batch.num_runs == 3
    compute(batch)
    batch = scheduler.schedule()
    assert shape(batch) == [(s, num) for s, num in zip(sequences, (1, 6, 1), strict=True)]
    assert [e.samples for e in batch.entries] == [True, True, False]


def test_a_run_gets_blocks_over_several_ends_and_takes_them_from_the_youngest() -> None:
    scheduler, manager = make(num_blocks=8)
    old, young = decoding(scheduler, 4, 8)
    force(scheduler, old, 18)
    batch = scheduler.schedule()
    assert shape(batch) == [(old, 18)]
    assert len(old.block_table) * BLOCK >= old.num_tokens > (len(old.block_table) - 1) * BLOCK
    assert scheduler.num_preemptions == 1 and not young.block_table
    assert manager.check_integrity(scheduler.tables()) == 0


def test_who_lacks_blocks_for_a_run_and_is_alone_is_preempted_and_computed_again() -> None:
    scheduler, _ = make(num_blocks=4)
    source, young = decoding(scheduler, 8, 3)
    source.handoff_id = "offered"  # its blocks cannot be taken
    force(scheduler, young, 6)
    assert shape(scheduler.schedule()) == [(source, 1)]
    assert not young.is_decoding and not young.block_table
    assert young.run_length == 1, "it would decode before all that others wait for is computed"


def test_a_run_counts_in_the_work_of_a_step() -> None:
    scheduler, _ = make()
    first, second = decoding(scheduler, 4, 4)
    force(scheduler, first, 6)
    work = work_of(scheduler.schedule())
    assert work == StepWork(2, first.num_tokens + second.num_tokens).with_chunk(4, 5)


def test_what_waits_for_a_peer_computes_no_run() -> None:
    scheduler, _ = make()
    first, second = decoding(scheduler, 4, 4)
    force(scheduler, first, 6)
    first.is_held = True
    assert shape(scheduler.schedule()) == [(second, 1)]
    first.is_held = False
    assert shape(scheduler.schedule()) == [(second, 1), (first, 6)]
    scheduler.remove(first)
    assert shape(scheduler.schedule()) == [(second, 1)]


def test_the_shortest_time_of_those_that_are_there() -> None:
    """The multiset of promised times against a list."""
    choice = random.Random(5)
    tightest = TightestTpot(DEFAULT_S)
    present: list[Sequence] = []
    for _ in range(2000):
        if present and choice.random() < 0.5:
            tightest.remove(present.pop(choice.randrange(len(present))))
        else:
            present.append(make_sequence([1], level=RequestLevel(tpot_s=choice.choice([None, 0.01, 0.04, 0.2, 1.0]))))
            tightest.add(present[-1])
        times = [s.request.level.tpot_s or DEFAULT_S for s in present]
        assert tightest.least_s == min(times, default=DEFAULT_S)
