"""What the layers must know of one step, as rank 0 tells it to the others: numbers only, checked on arrival.

    words (int32) = [S, B] [S] new tokens [S] context lengths [S, B] block tables

Sequences with one new token come first. The tokens themselves do not travel: rank 0 sends their embeddings.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.paged_batch import PagedBatch
from .errors import InternalError
from .models.attention import StepMeta
from .models.rope import Ropes
from .parallel import Group
from .sequence import ScheduledSequence

Words = NDArray[np.int32]
FIRST_WORDS = 1024  # a step that fits, as most decodes do, is told in one broadcast
MAX_WORDS = 1 << 26


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step of this worker can hold."""

    block_size: int
    num_blocks: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """S sequences, B blocks in the longest table."""

    num_new: Words  # [S]
    context_lens: Words  # [S], with the new tokens
    tables: Words  # [S, B], padded with block 0

    @classmethod
    def of(cls, entries: SequenceOf[ScheduledSequence], block_size: int) -> "Step":
        """`entries`: those with one new token first."""
        num_new = np.array([e.num_new for e in entries], dtype=np.int32)
        context_lens = num_new + np.array([e.sequence.num_computed for e in entries], dtype=np.int32)
        num_blocks = (-(-context_lens // block_size)).tolist()
        tables = np.zeros((len(entries), max(num_blocks)), dtype=np.int32)
        for row, entry, num in zip(tables, entries, num_blocks, strict=True):
            row[:num] = entry.sequence.block_table[:num]
        return cls(num_new, context_lens, tables)

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())

    def to_words(self) -> Words:
        shape = np.array(self.tables.shape, dtype=np.int32)
        return np.concatenate((shape, self.num_new, self.context_lens, self.tables.reshape(-1)))

    @classmethod
    def from_words(cls, words: Words, limits: StepLimits) -> "Step":
        """Raises InternalError, saying what is wrong, for words that `to_words` of such a worker cannot have made."""

        def check(is_right: bool, what: str) -> None:
            if not is_right:
                raise InternalError(f"a step is malformed: {what}")

        check(len(words) >= 2, "it has no header")
        num_seqs, width = int(words[0]), int(words[1])
        check(num_seqs > 0 and width > 0, f"it has {num_seqs} sequences and tables of {width} blocks")
        check(len(words) == 2 + num_seqs * (2 + width), f"it has {len(words)} words for {num_seqs} x {width} blocks")
        num_new, context_lens, tables = np.split(words[2:], (num_seqs, 2 * num_seqs))
        check(bool((num_new >= 1).all()), "a sequence has no new token")
        check(bool(((num_new > 1)[1:] >= (num_new > 1)[:-1]).all()), "sequences with one new token must come first")
        check(bool((context_lens >= num_new).all()), "a context is shorter than its new tokens")
        longest = int(context_lens.max())
        check(longest <= limits.max_context_tokens, f"a context of {longest} tokens is too long")
        check(-(-longest // limits.block_size) <= width, f"{width} blocks do not hold {longest} tokens")
        check(bool(((tables >= 0) & (tables < limits.num_blocks)).all()), "it names a block that does not exist")
        return cls(num_new, context_lens, tables.reshape(num_seqs, width))

    def meta(self, cos_sin: Ropes, block_size: int) -> StepMeta:
        """cos_sin: on the device that computes."""
        device = cos_sin[0].device

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        num_new = self.num_new.tolist()
        owner = np.repeat(np.arange(len(num_new)), num_new)
        query_starts = np.concatenate(([0], np.cumsum(num_new)))
        starts = self.context_lens - self.num_new
        positions = np.arange(len(owner)) - query_starts[owner] + starts[owner]
        slots = self.tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
        paged = PagedBatch(
            block_tables=tensor(self.tables),
            context_lens=tensor(self.context_lens),
            query_starts=tensor(query_starts.astype(np.int32)),
            host_context_lens=self.context_lens.tolist(),
            host_num_new=num_new,
            num_decodes=int((self.num_new == 1).sum()),
            block_size=block_size,
        )
        at = tensor(positions)
        return StepMeta(tuple(table[at] for table in cos_sin), tensor(slots), paged)


def tell(group: Group, words: Words) -> None:
    """Rank 0's side of `hear`."""
    assert len(words) < MAX_WORDS
    first = np.zeros(FIRST_WORDS, dtype=np.int32)
    first[0] = len(words)
    head, rest = words[: FIRST_WORDS - 1], words[FIRST_WORDS - 1 :]
    first[1 : 1 + len(head)] = head
    group.broadcast(torch.from_numpy(first), patient=True)
    if len(rest):
        group.broadcast(torch.from_numpy(rest))


def hear(group: Group) -> Words:
    """Wait for what rank 0 tells, however long it takes. Raises InternalError for a length that cannot be."""
    first = np.zeros(FIRST_WORDS, dtype=np.int32)
    group.broadcast(torch.from_numpy(first), patient=True)
    length = int(first[0])
    if not 0 < length < MAX_WORDS:
        raise InternalError(f"rank 0 announces {length} words")
    head = first[1 : 1 + length]
    if len(head) == length:
        return head
    rest = np.zeros(length - len(head), dtype=np.int32)
    group.broadcast(torch.from_numpy(rest))
    return np.concatenate((head, rest))
