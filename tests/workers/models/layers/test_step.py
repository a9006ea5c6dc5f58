"""A step's message: received as rank 0 broadcasts it, and refused where malformed."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diptych.workers.common.errors import InternalError
from diptych.workers.core.sequence import ScheduledSequence
from diptych.workers.models.layers.step import (
    FIRST_MESSAGE_LEN,
    MAX_MESSAGE_LEN,
    Step,
    StepLimits,
    broadcast_message,
    is_of_draft,
    receive_message,
)

from ....support.sequences import make_sequence

LIMITS = StepLimits(block_size=4, num_blocks=50, max_context_tokens=40, vocab_size=60, num_chosen=3)


class Wire:
    """Both ends of a group of two, in one thread: rank 1 receives broadcasts in rank 0's order."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.is_receiving = False

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return [part, part]

    def all_to_all(self, rows: Tensor, to_counts: Sequence[int], from_counts: Sequence[int]) -> Tensor:
        return rows

    def broadcast(self, tensor: Tensor, *, patient: bool = False) -> None:
        if self.is_receiving:
            tensor.copy_(self.sent.popleft())
        else:
            self.sent.append(tensor.clone())


def entry(num_computed: int, num_new: int, table: list[int], num_more: int = 0) -> ScheduledSequence:
    """num_more: tokens that this step leaves."""
    sequence = make_sequence(list(range(1, num_computed + num_new + num_more + 1)))
    sequence.num_computed, sequence.block_table = num_computed, table
    return ScheduledSequence(sequence, num_new)


def example() -> Step:
    """Two decodes (at 4 and at 9 tokens) and a chunk of 5 that starts at 3."""
    entries = [entry(4, 1, [7, 8]), entry(9, 1, [1, 2, 3]), entry(3, 5, [4, 5, 6], num_more=1)]
    return Step.of(entries, LIMITS.block_size, picks=True)


def test_the_words_say_all() -> None:
    step = Step.from_message(example().to_message(), LIMITS)
    assert step.num_new.tolist() == [1, 1, 5]
    assert step.context_lens.tolist() == [5, 10, 8]
    assert step.tables.tolist() == [[7, 8, 0], [1, 2, 3], [4, 5, 0]]
    assert step.token_ids.tolist() == [5, 10, 4, 5, 6, 7, 8]
    assert step.sampled.tolist() == [0, 1]
    assert step.num_tokens == 7
    assert step.picks
    rows = np.array([2, 3, 5], dtype=np.int32)
    told = Step.from_message(replace(example(), prompt_rows=rows).to_message(), LIMITS)
    assert (told.prompt_rows.tolist(), told.token_ids.tolist()) == ([2, 3, 5], step.token_ids.tolist())
    told = Step.from_message(replace(example(), pooled_rows=rows).to_message(), LIMITS)
    assert (told.pooled_rows.tolist(), told.prompt_rows.tolist()) == ([2, 3, 5], [])
    assert told.reads_all and not step.reads_all
    of_draft = replace(example(), picks=False, is_draft=True).to_message()
    told = Step.from_message(of_draft, LIMITS, is_draft=True)
    assert is_of_draft(of_draft) and told.is_draft and not told.picks
    assert not (step.is_draft or is_of_draft(example().to_message()) or is_of_draft(of_draft[:5]))


def test_what_is_sparse_is_told() -> None:
    entries = [entry(13, 1, [7, 8, 9, 1]), entry(4, 1, [7, 8]), entry(3, 5, [4, 5, 6])]
    step = Step.of(entries, LIMITS.block_size, bounded=[12, -1, -1])
    assert Step.from_message(step.to_message(), LIMITS).bounded.tolist() == [12, -1, -1]
    assert Step.from_message(example().to_message(), LIMITS).bounded.tolist() == []
    with pytest.raises(InternalError, match="a sequence that is sparse cannot be"):
        Step.from_message(step.to_message(), replace(LIMITS, num_chosen=0))


def with_tail() -> Step:
    """The example, its tokens in blocks of the KV tail: 20, 30, and of the chunk 41 (token 3) and 40 (4 to 7)."""
    return replace(example(), tails=np.array([20, 30, 41, 40], dtype=np.int32))


def test_blocks_of_the_tail_are_told() -> None:
    message, limits = with_tail().to_message(), replace(LIMITS, num_tail_blocks=50)
    told = Step.from_message(message, limits)
    assert (told.tails.tolist(), told.token_ids.tolist()) == ([20, 30, 41, 40], example().token_ids.tolist())
    with pytest.raises(InternalError, match="it names 4 blocks of the KV tail, not 0"):
        Step.from_message(message, LIMITS)
    with pytest.raises(InternalError, match="it names 0 blocks of the KV tail, not 4"):
        Step.from_message(example().to_message(), limits)
    with pytest.raises(InternalError, match="a block of the KV tail does not exist, or is named twice"):
        Step.from_message(message, replace(limits, num_tail_blocks=41))
    twice = replace(with_tail(), tails=np.array([20, 30, 41, 20], dtype=np.int32)).to_message()
    with pytest.raises(InternalError, match="a block of the KV tail does not exist, or is named twice"):
        Step.from_message(twice, limits)


def test_new_tokens_go_to_the_tail_and_full_blocks_from_there() -> None:
    meta = with_tail().meta((torch.zeros(40, 2),), LIMITS.block_size)
    assert meta.slots.tolist() == [20 * 4, 30 * 4 + 1, 41 * 4 + 3, *range(40 * 4, 40 * 4 + 4)]
    assert meta.tail is not None
    assert meta.tail.filled.tolist() == [[41, 4], [40, 5]]
    step = replace(with_tail(), sampled=np.array([1, 2, 6], dtype=np.int32)).sampled_alone(4)
    assert step.tails.tolist() == [30, 41, 40]


def test_what_the_layers_get_of_it() -> None:
    cos_sin = torch.arange(40.0)[:, None].expand(-1, 2)
    meta = example().meta((cos_sin,), LIMITS.block_size)
    positions = [4, 9, 3, 4, 5, 6, 7]
    assert meta.cos_sin[0][:, 0].tolist() == positions
    blocks = [8, 3, 4, 5, 5, 5, 5]
    assert meta.slots.tolist() == [b * 4 + p % 4 for b, p in zip(blocks, positions, strict=True)]
    assert meta.paged.query_starts.tolist() == [0, 1, 2, 7]
    with pytest.raises(InternalError, match="must come first"):
        Step.of([entry(0, 2, [1]), entry(4, 1, [7, 8])], LIMITS.block_size).meta(cos_sin, LIMITS.block_size)
    assert (meta.paged.host_context_lens, meta.paged.host_num_new, meta.paged.num_decodes) == ([5, 10, 8], [1, 1, 5], 2)


def test_what_is_sampled_alone() -> None:
    """A decode, and two tokens of the chunk."""
    step = replace(example(), sampled=np.array([1, 3, 6], dtype=np.int32)).sampled_alone(4)
    assert step.num_new.tolist() == [1, 1, 1]
    assert step.context_lens.tolist() == [10, 5, 8]
    assert step.tables.tolist() == [[1, 2, 3], [4, 5, 0], [4, 5, 0]]
    assert (step.token_ids.tolist(), step.sampled.tolist()) == ([10, 5, 8], [0, 1, 2])


@pytest.mark.parametrize("length", [1, FIRST_MESSAGE_LEN - 1, FIRST_MESSAGE_LEN, 3 * FIRST_MESSAGE_LEN])
def test_what_is_told_is_heard(length: int) -> None:
    wire, message = Wire(), np.arange(length, dtype=np.int32)
    broadcast_message(wire, message)
    assert len(wire.sent) == (1 if length < FIRST_MESSAGE_LEN else 2)
    wire.is_receiving = True
    assert receive_message(wire).tolist() == message.tolist()
    assert not wire.sent


@pytest.mark.parametrize("length", [0, -1, MAX_MESSAGE_LEN])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    wire = Wire()
    first = torch.zeros(FIRST_MESSAGE_LEN, dtype=torch.int32)
    first[0] = length
    wire.broadcast(first)
    wire.is_receiving = True
    with pytest.raises(InternalError, match="announced a step message of invalid length"):
        receive_message(wire)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ([], "no header"),
        ([1, 1, 0], "no header"),
        ([0, 1, 0, 0, 0, 0, 0, 0], "0 sequences"),
        ([1, -1, 0, 0, 0, 0, 0, 0, 1, 1, 7], "tables of -1"),
        ([1, 1, -1, 0, 0, 0, 0, 0, 1, 1, 7, 3], "-1 sampled rows"),
        ([1, 1, 0, 2, 0, 0, 0, 0, 1, 1, 7, 3], r"picked 2 of \(0, 1, 4, 5\)"),
        ([1, 1, 0, 3, 0, 0, 0, 0, 1, 1, 7, 3], "picked 3"),
        ([1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 3], "11 words for 1 x 1 blocks and 0 rows"),
        ([1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 7, 8, 3], "it has 2 tokens"),
        ([2, 1, 0, 0, 0, 0, 0, 0, 0, 2, 1, 2, 7, 8, 3, 3], "no new token"),
        ([1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 60, 3], "not in the vocabulary"),
        ([1, 1, 0, 0, 0, 0, 0, 0, 1, 1, -1, 3], "not in the vocabulary"),
        ([1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 7, 3], "sampled row does not exist"),
        ([1, 1, 1, 0, 0, 0, 0, 0, 1, 1, -1, 7, 3], "sampled row does not exist"),
        ([1, 1, 2, 0, 0, 0, 0, 0, 2, 2, 1, 1, 7, 8, 3], "must ascend"),
        ([1, 1, 0, 0, 0, 0, 0, 0, 3, 2, 7, 7, 7, 3], "shorter than its new"),
        ([1, 11, 0, 0, 0, 0, 0, 0, 1, 41, 7, *range(11)], "41 tokens is too long"),
        ([1, 1, 0, 0, 0, 0, 0, 0, 1, 5, 7, 3], "do not hold 5"),
        ([1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 7, 50], "a block that does not exist"),
        ([1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 7, -1], "a block that does not exist"),
        ([1, 1, 0, 0, -1, 0, 0, 0, 1, 1, 7, 3], "-1 prompt rows"),
        ([1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 7, 3], "prompt row does not exist"),
        ([1, 1, 0, 0, 2, 0, 0, 0, 2, 2, 1, 1, 7, 8, 3], "prompt rows must ascend"),
        ([1, 1, 1, 0, 1, 0, 0, 0, 2, 2, 1, 1, 7, 8, 3], "a prompt row is sampled"),
        ([1, 1, 0, 0, 0, -1, 0, 0, 1, 1, 7, 3], "-1 pooled rows"),
        ([1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 1, 7, 3], "pooled row does not exist"),
        ([1, 1, 1, 0, 0, 1, 0, 0, 2, 2, 1, 1, 7, 8, 3], "a pooled row is sampled"),
        ([1, 1, 0, 0, 0, 0, -1, 0, 1, 1, 7, 3], "bounds of -1 sequences"),
        ([1, 1, 0, 0, 0, 0, 0, -1, 1, 1, 7, 3], "-1 blocks of the KV tail"),
        ([1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 7, 3], "names 1 blocks of the KV tail, not 0"),
        ([2, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, -1, 7, 7, 3, 3], "bounds of 1 sequences"),
        ([1, 4, 0, 0, 0, 0, 1, 0, 1, 13, 13, 7, 1, 2, 3, 4], "a sequence that is sparse cannot be"),
        ([1, 3, 0, 0, 0, 0, 1, 0, 1, 12, 0, 7, 1, 2, 3], "a sequence that is sparse cannot be"),
        ([1, 4, 0, 0, 0, 0, 1, 0, 2, 14, 0, 7, 7, 1, 2, 3, 4], "a sequence that is sparse cannot be"),
    ],
)
def test_malformed_messages_are_refused(message: list[int], match: str) -> None:
    with pytest.raises(InternalError, match=match):
        Step.from_message(np.array(message, dtype=np.int32), LIMITS)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ([1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 7, 3], r"picked 0 of \(2,\)"),
        ([1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 7, 3], r"picked 1 of \(2,\)"),
        ([1, 1, 0, 2, 1, 0, 0, 0, 1, 1, 0, 7, 3], "asks for more than logits"),
        ([1, 1, 0, 2, 0, 1, 0, 0, 1, 1, 0, 7, 3], "asks for more than logits"),
        ([1, 1, 0, 2, 0, 0, 0, 0, 1, 1, 60, 3], "not in the vocabulary"),
        ([1, 4, 0, 2, 0, 0, 1, 0, 1, 13, 0, 7, 1, 2, 3, 4], "asks for more than logits"),
    ],
)
def test_malformed_messages_of_a_draft_are_refused(message: list[int], match: str) -> None:
    with pytest.raises(InternalError, match=match):
        Step.from_message(np.array(message, dtype=np.int32), LIMITS, is_draft=True)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_any_message_is_a_step_or_refused(message: list[int]) -> None:
    array = np.array(message, dtype=np.int32)
    try:
        step = Step.from_message(array, LIMITS)
    except InternalError:
        return
    assert step.to_message().tolist() == message
