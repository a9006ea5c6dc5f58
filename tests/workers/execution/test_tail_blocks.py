"""Blocks of the KV tail: own tokens are there, and nobody else's, from the first one until all are recorded."""

from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.workers.common.errors import InternalError
from diptych.workers.core.sequence import ScheduledSequence, Sequence, SequenceStatus
from diptych.workers.execution.common.tail_blocks import TailBlocks

from ...support.sequences import make_sequence

SIZE = 4


def running(num_tokens: int, num_computed: int = 0) -> Sequence:
    sequence = make_sequence(list(range(num_tokens)))
    sequence.status, sequence.num_computed = SequenceStatus.RUNNING, num_computed
    return sequence


def test_a_block_is_kept_until_all_its_tokens_are_recorded() -> None:
    tail, sequence = TailBlocks(8, SIZE), running(12)
    first, second = tail.update([ScheduledSequence(sequence, 6)])
    sequence.num_computed = 3  # of the step's tokens the others were a draft that was rejected
    assert tail.update([ScheduledSequence(sequence, 3)]) == [first, second]
    sequence.num_computed = 4
    assert tail.update([ScheduledSequence(sequence, 1)]) == [second]
    assert tail.num_assigned == 1
    sequence.num_computed = 8
    assert tail.update([ScheduledSequence(sequence, 1)]) != [second] or tail.num_assigned == 1


def test_a_step_ahead_gets_the_blocks_after_those_of_the_step_under_way() -> None:
    """Its tokens are those after `token_ids`, whose last one the step under way yields."""
    tail, sequence = TailBlocks(8, SIZE), running(8)
    under_way = tail.update([ScheduledSequence(sequence, 8)])
    ahead = tail.update([ScheduledSequence(sequence, 1)], [0])
    assert len(under_way) == 2 and len({*under_way, *ahead}) == 3


def test_what_ended_or_is_recorded_is_used_again_before_other_blocks() -> None:
    tail = TailBlocks(100, SIZE)
    for _ in range(20):
        sequence = running(16)
        assert max(tail.update([ScheduledSequence(sequence, 16)])) < 8
        sequence.num_computed = 16
        other = running(12)
        assert max(tail.update([ScheduledSequence(other, 12)])) < 8
        sequence.status = other.status = SequenceStatus.FINISHED


def test_rows_outlive_no_sequence() -> None:
    """The tokens of those that were computed lately may be millions. What a sequence had that is gone is used again,
    also where another takes its place."""
    tail = TailBlocks(200, SIZE)
    for _ in range(200):
        sequence = running(16)
        gone = ref(sequence)
        tail.update([ScheduledSequence(sequence, 16)])
        del sequence
        assert gone() is None


def test_a_preempted_sequence_begins_at_the_start_of_a_block() -> None:
    tail, sequence = TailBlocks(8, SIZE), running(11)
    tail.update([ScheduledSequence(sequence, 11)])
    sequence.num_computed = 10
    tail.update([ScheduledSequence(sequence, 1)])
    sequence.num_computed = 4  # from the prefix cache
    assert len(set(tail.update([ScheduledSequence(sequence, 7)]))) == 2


def test_tokens_that_were_never_here_are_an_error() -> None:
    with pytest.raises(InternalError, match="the KV tail has lost the last 2 tokens of"):
        TailBlocks(8, SIZE).update([ScheduledSequence(running(8, num_computed=6), 1)])
    with pytest.raises(InternalError, match="more than 2 blocks are to be in the KV tail at once"):
        TailBlocks(2, SIZE).update([ScheduledSequence(running(12), 12)])


class Model:
    """What the tail holds of each sequence: a block's content is (sequence, block, tokens written)."""

    def __init__(self, num_sequences: int) -> None:
        self.tail = TailBlocks(64, SIZE)
        self.content: dict[int, tuple[Sequence, int, set[int]]] = {}
        self.sequences = [running(40) for _ in range(num_sequences)]

    def step(self, entries: list[ScheduledSequence]) -> None:
        """Write new tokens; all tokens before them of the first block that they lie in must be there."""
        tails = self.tail.update(entries)
        assert len(set(tails)) == len(tails)
        places = iter(tails)
        for entry in entries:
            first, end = entry.start, entry.start + entry.num_new
            for block in range(first // SIZE, (end - 1) // SIZE + 1):
                place = next(places)
                held = self.content.get(place)
                if held is None or held[:2] != (entry.sequence, block):
                    held = self.content[place] = entry.sequence, block, set()
                held[2].update(range(max(first, block * SIZE), min(end, (block + 1) * SIZE)))
                assert held[2] >= set(range(block * SIZE, min(end, (block + 1) * SIZE)))
        assert next(places, None) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_own_tokens_are_there_whatever_happens(data: st.DataObject) -> None:
    """Chunks, drafts of which some are rejected, steps that sequences sit out, preemption, and ends."""
    model = Model(3)
    for _ in range(data.draw(st.integers(1, 25))):
        entries = [
            ScheduledSequence(sequence, data.draw(st.integers(1, min(9, sequence.num_uncomputed))))
            for sequence in model.sequences
            if sequence.num_uncomputed and data.draw(st.booleans())
        ]
        if entries:
            model.step(entries)
        for entry in entries:
            entry.sequence.num_computed += data.draw(st.integers(0, entry.num_new))  # recorded; the rest was rejected
        for i, sequence in enumerate(model.sequences):
            match data.draw(st.sampled_from(["goes on"] * 6 + ["is preempted", "ends"])):
                case "is preempted":
                    sequence.num_computed = data.draw(st.integers(0, sequence.num_computed // SIZE)) * SIZE
                case "ends":
                    sequence.status, model.sequences[i] = SequenceStatus.FINISHED, running(40)
                case _:
                    pass
