"""A step's words: what rank 0 says is what the others hear, and what cannot be said is refused."""

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diptych.workers.errors import InternalError
from diptych.workers.sequence import ScheduledSequence
from diptych.workers.step import FIRST_WORDS, MAX_WORDS, Step, StepLimits, hear, tell

from .sequences import make_sequence

LIMITS = StepLimits(block_size=4, num_blocks=50, max_context_tokens=40)


class Wire:
    """Both ends of a group of two, in one thread: what is broadcast first by rank 0 is received next by rank 1."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.is_receiving = False

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def broadcast(self, tensor: Tensor, *, patient: bool = False) -> None:
        if self.is_receiving:
            tensor.copy_(self.sent.popleft())
        else:
            self.sent.append(tensor.clone())


def entry(num_computed: int, num_new: int, table: list[int]) -> ScheduledSequence:
    sequence = make_sequence(list(range(1, num_computed + num_new + 1)))
    sequence.num_computed, sequence.block_table = num_computed, table
    return ScheduledSequence(sequence, num_new)


def example() -> Step:
    """Two decodes (at 4 and at 9 tokens) and a chunk of 5 that starts at 3."""
    return Step.of([entry(4, 1, [7, 8]), entry(9, 1, [1, 2, 3]), entry(3, 5, [4, 5, 6])], LIMITS.block_size)


def test_the_words_say_all() -> None:
    step = Step.from_words(example().to_words(), LIMITS)
    assert step.num_new.tolist() == [1, 1, 5]
    assert step.context_lens.tolist() == [5, 10, 8]
    assert step.tables.tolist() == [[7, 8, 0], [1, 2, 3], [4, 5, 0]]
    assert step.num_tokens == 7


def test_what_the_layers_get_of_it() -> None:
    cos_sin = torch.arange(40.0)[:, None].expand(-1, 2)
    meta = example().meta((cos_sin,), LIMITS.block_size)
    positions = [4, 9, 3, 4, 5, 6, 7]
    assert meta.cos_sin[0][:, 0].tolist() == positions
    blocks = [8, 3, 4, 5, 5, 5, 5]
    assert meta.slots.tolist() == [b * 4 + p % 4 for b, p in zip(blocks, positions, strict=True)]
    assert meta.paged.query_starts.tolist() == [0, 1, 2, 7]
    assert (meta.paged.host_context_lens, meta.paged.host_num_new, meta.paged.num_decodes) == ([5, 10, 8], [1, 1, 5], 2)


@pytest.mark.parametrize("length", [1, FIRST_WORDS - 1, FIRST_WORDS, 3 * FIRST_WORDS])
def test_what_is_told_is_heard(length: int) -> None:
    wire, words = Wire(), np.arange(length, dtype=np.int32)
    tell(wire, words)
    assert len(wire.sent) == (1 if length < FIRST_WORDS else 2)
    wire.is_receiving = True
    assert hear(wire).tolist() == words.tolist()
    assert not wire.sent


@pytest.mark.parametrize("length", [0, -1, MAX_WORDS])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    wire = Wire()
    first = torch.zeros(FIRST_WORDS, dtype=torch.int32)
    first[0] = length
    wire.broadcast(first)
    wire.is_receiving = True
    with pytest.raises(InternalError, match="announces"):
        hear(wire)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no header"),
        ([0, 1], "0 sequences"),
        ([1, -1, 1, 1], "tables of -1"),
        ([1, 1, 1, 1], "4 words for 1 x 1"),
        ([1, 1, 1, 1, 3, 3], "6 words"),
        ([1, 1, 0, 1, 3], "no new token"),
        ([2, 1, 2, 1, 2, 1, 3, 4], "must come first"),
        ([1, 1, 3, 2, 3], "shorter than its new"),
        ([1, 11, 1, 41, *range(11)], "41 tokens is too long"),
        ([1, 1, 1, 5, 3], "do not hold 5"),
        ([1, 1, 1, 1, 50], "a block that does not exist"),
        ([1, 1, 1, 1, -1], "a block that does not exist"),
    ],
)
def test_malformed_words_are_refused(words: list[int], message: str) -> None:
    with pytest.raises(InternalError, match=message):
        Step.from_words(np.array(words, dtype=np.int32), LIMITS)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_any_words_are_a_step_or_refused(words: list[int]) -> None:
    array = np.array(words, dtype=np.int32)
    try:
        step = Step.from_words(array, LIMITS)
    except InternalError:
        return
    assert step.to_words().tolist() == words
