"""Step as the ranks of a worker compute it, and the message by which rank 0 broadcasts it to them. The message holds
numbers only; the receiver checks them.

    message (int32) = [S, B, R, picks, Q, P, Z, X] [S] new tokens [S] context lengths [R] sampled rows [Q] prompt rows
                    [P] pooled rows [Z, of all sequences or none] bounded tokens [X] blocks of the KV tail
                    [T] token ids [S, B] blocks

Ranks keep no account of sequences: a step says all that it takes to compute it. One of the model that drafts has DRAFT
in the place of `picks`, and asks for nothing but logits.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.attention.paged_batch import PagedBatch
from ...common.errors import InternalError
from ...core.sequence import DraftEntry, ScheduledSequence
from ...parallel.groups import Group
from .attention import StepMeta
from .rope import Ropes
from .sparse import SparseStep
from .tail import TailStep

Int32s = NDArray[np.int32]
IntArray = NDArray[np.integer[Any]]
FIRST_MESSAGE_LEN = 1024  # a step that fits, as most decodes do, takes one broadcast
MAX_MESSAGE_LEN = 1 << 26
HEADER = 8
PICKS, DRAFT, TAKEN = 1, 2, 4  # bits
NO_ROWS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a step of this worker."""

    block_size: int
    num_blocks: int
    max_context_tokens: int
    vocab_size: int
    num_chosen: int = 0  # blocks that a sparse decode attends to; 0: none is sparse
    num_tail_blocks: int = 0  # of the KV tail; 0: there is none

    def check_bounded(self, num_new: Int32s, context_lens: Int32s, bounded: Int32s) -> None:
        """Raise InternalError for bounds that Bounded cannot have counted. All: [S], or `bounded` is empty."""
        is_sparse = bounded >= 0
        if is_sparse.any():
            fits = context_lens[is_sparse] > self.num_chosen * self.block_size
            is_known = bounded[is_sparse] < context_lens[is_sparse]
            if not (self.num_chosen and (num_new[is_sparse] == 1).all() and fits.all() and is_known.all()):
                raise InternalError("a step is malformed: a sequence that is sparse cannot be")

    def check_tails(self, num_new: Int32s, context_lens: Int32s, tails: Int32s) -> None:
        """Raise InternalError for blocks of the tail that are not those of the new tokens."""
        num_due = int(num_tails(num_new, context_lens, self.block_size).sum()) if self.num_tail_blocks else 0
        if len(tails) != num_due:
            raise InternalError(f"a step is malformed: it names {len(tails)} blocks of the KV tail, not {num_due}")
        if not ((tails >= 0) & (tails < self.num_tail_blocks)).all() or len(np.unique(tails)) < num_due:
            raise InternalError("a step is malformed: a block of the KV tail does not exist, or is named twice")


def num_tails(num_new: Int32s, context_lens: Int32s, block_size: int) -> Int32s:
    """Number of blocks that the new tokens of each sequence lie in. All: [S]."""
    return (context_lens - 1) // block_size - (context_lens - num_new) // block_size + 1


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """S sequences, B blocks in the longest table, T new tokens of all sequences, R of them sampled."""

    num_new: Int32s  # [S]
    context_lens: Int32s  # [S], with the new tokens
    tables: Int32s  # [S, B], padded with block 0
    token_ids: Int32s  # [T]
    sampled: Int32s  # [R]: of the rows that they are, ascending
    picks: bool = False  # the likeliest token of those is all that is wanted
    prompt_rows: Int32s = field(default_factory=lambda: NO_ROWS)  # [Q], ascending, see prompt_rows.py; none is sampled
    pooled_rows: Int32s = field(default_factory=lambda: NO_ROWS)  # [P], ascending, see pooled_rows.py; none is either
    # [S], see Bounded.tokens; empty: all attend to all.
    bounded: Int32s = field(default_factory=lambda: NO_ROWS)
    is_draft: bool = False  # of the model that drafts, not of the one that is served
    is_taken: bool = False  # hidden states of all rows are, for a draft head
    # Blocks of the KV tail, see TailBlocks.update; empty: the KV cache has none.
    tails: Int32s = field(default_factory=lambda: NO_ROWS)

    @classmethod
    def of(
        cls,
        entries: SequenceOf[ScheduledSequence],
        block_size: int,
        *,
        picks: bool = False,
        prompt_rows: Int32s = NO_ROWS,
        pooled_rows: Int32s = NO_ROWS,
        bounded: SequenceOf[int] = (),
        tails: SequenceOf[int] = (),
        is_taken: bool = False,
    ) -> "Step":
        num_new = np.array([e.num_new for e in entries], dtype=np.int32)
        context_lens = num_new + np.array([e.sequence.num_computed for e in entries], dtype=np.int32)
        num_blocks = (-(-context_lens // block_size)).tolist()
        tables = np.zeros((len(entries), max(num_blocks)), dtype=np.int32)
        for row, entry, num in zip(tables, entries, num_blocks, strict=True):
            row[:num] = entry.sequence.block_table[:num]
        token_ids: list[int] = []
        sampled: list[int] = []
        for entry in entries:
            start, first = entry.sequence.num_computed, len(token_ids)
            if isinstance(entry, DraftEntry):
                token_ids += entry.token_ids
                sampled += range(first, len(token_ids))
                continue
            token_ids += entry.sequence.token_ids[start : start + entry.num_new]
            if entry.samples:
                sampled.append(len(token_ids) - 1)
        rows = np.array(sampled, dtype=np.int32)
        tokens = np.array(token_ids, dtype=np.int32)
        stands, own = np.array(bounded, dtype=np.int32), np.array(tails, dtype=np.int32)
        read = rows, picks, prompt_rows, pooled_rows, stands
        return cls(num_new, context_lens, tables, tokens, *read, is_taken=is_taken, tails=own)

    def sampled_alone(self, block_size: int) -> "Step":
        """Its sampled rows, each as a sequence whose one new token it is."""
        ends = np.cumsum(self.num_new)
        owner = np.searchsorted(ends, self.sampled, side="right")
        after = (ends[owner] - 1 - self.sampled).astype(np.int32)  # tokens of its sequence that are later
        rows = np.arange(len(owner), dtype=np.int32)
        tables, token_ids, context_lens = (
            self.tables[owner],
            self.token_ids[self.sampled],
            self.context_lens[owner] - after,
        )
        tails = self.tails
        if len(tails):
            tails = tails[self._tail_places(owner, context_lens - 1, block_size)]
        return Step(np.ones_like(rows), context_lens, tables, token_ids, rows, self.picks, tails=tails)

    def _tail_places(self, owner: IntArray, positions: IntArray, block_size: int) -> IntArray:
        """Places in `tails` of the blocks that tokens lie in: new ones, of sequence `owner` [N] at `positions` [N]."""
        num = num_tails(self.num_new, self.context_lens, block_size)
        first_place = np.cumsum(num) - num
        first_block = (self.context_lens - self.num_new) // block_size
        return first_place[owner] + positions // block_size - first_block[owner]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def reads_all(self) -> bool:
        """True where what layers make of all rows is read, not of the sampled ones alone."""
        is_read = self.is_taken or len(self.prompt_rows) > 0 or len(self.pooled_rows) > 0
        return is_read or len(self.sampled) == self.num_tokens

    def to_message(self) -> Int32s:
        rows = (self.sampled, self.prompt_rows, self.pooled_rows, self.bounded, self.tails)
        num_sampled, *others = map(len, rows)
        flags = DRAFT if self.is_draft else PICKS * self.picks + TAKEN * self.is_taken
        header = np.array((*self.tables.shape, num_sampled, flags, *others), dtype=np.int32)
        rest = (self.num_new, self.context_lens, *rows, self.token_ids, self.tables.reshape(-1))
        return np.concatenate((header, *rest))

    @classmethod
    def from_message(cls, message: Int32s, limits: StepLimits, *, is_draft: bool = False) -> "Step":
        """Raises InternalError, which says what is wrong, for a message that `to_message` cannot have made, and for one
        of the other model than `is_draft` says."""

        def check(is_right: bool, what: str) -> None:
            if not is_right:
                raise InternalError(f"a step is malformed: {what}")

        check(len(message) >= HEADER, "it has no header")
        num_seqs, width, num_sampled, flags, *others = message[:HEADER].tolist()
        num_prompt_rows, num_pooled_rows, num_bounded, num_tail_blocks = others
        check(num_seqs > 0 and width > 0, f"it has {num_seqs} sequences and tables of {width} blocks")
        kinds = (DRAFT,) if is_draft else (0, PICKS, TAKEN, PICKS | TAKEN)
        check(num_sampled >= 0 and flags in kinds, f"it has {num_sampled} sampled rows, picked {flags} of {kinds}")
        check(num_prompt_rows >= 0, f"it has {num_prompt_rows} prompt rows")
        check(num_pooled_rows >= 0, f"it has {num_pooled_rows} pooled rows")
        check(num_bounded in (0, num_seqs), f"it has bounds of {num_bounded} sequences")
        check(num_tail_blocks >= 0, f"it has {num_tail_blocks} blocks of the KV tail")
        num_rows = num_sampled + sum(others)
        check(num_rows == num_sampled or not is_draft, "it is of a draft, and asks for more than logits")
        num_tokens = len(message) - HEADER - num_seqs * (2 + width) - num_rows
        check(num_tokens > 0, f"it has {len(message)} words for {num_seqs} x {width} blocks and {num_rows} rows")
        sizes = (num_seqs, num_seqs, num_sampled, *others, num_tokens)
        num_new, context_lens, *lists, token_ids, tables = np.split(message[HEADER:], np.cumsum(sizes))
        sampled, prompt_rows, pooled_rows, bounded, tails = lists
        check(bool((num_new >= 1).all()), "a sequence has no new token")
        check(int(num_new.sum()) == num_tokens, f"it has {num_tokens} tokens, and its sequences others")
        check(bool(((token_ids >= 0) & (token_ids < limits.vocab_size)).all()), "a token is not in the vocabulary")
        for rows, what in ((sampled, "sampled"), (prompt_rows, "prompt"), (pooled_rows, "pooled")):
            check(bool(((rows >= 0) & (rows < num_tokens)).all()), f"a {what} row does not exist")
            check(bool((rows[1:] > rows[:-1]).all()), f"{what} rows must ascend")
        check(not np.intersect1d(sampled, prompt_rows).size, "a prompt row is sampled")
        check(not np.intersect1d(sampled, pooled_rows).size, "a pooled row is sampled")
        check(bool((context_lens >= num_new).all()), "a context is shorter than its new tokens")
        longest = int(context_lens.max())
        check(longest <= limits.max_context_tokens, f"a context of {longest} tokens is too long")
        check(-(-longest // limits.block_size) <= width, f"{width} blocks do not hold {longest} tokens")
        check(bool(((tables >= 0) & (tables < limits.num_blocks)).all()), "it names a block that does not exist")
        limits.check_bounded(num_new, context_lens, bounded)
        if not is_draft:
            limits.check_tails(num_new, context_lens, tails)
        tables = tables.reshape(num_seqs, width)
        rows = sampled, flags & PICKS > 0, prompt_rows, pooled_rows, bounded
        kind = {"is_draft": is_draft, "is_taken": flags & TAKEN > 0}
        return cls(num_new, context_lens, tables, token_ids, *rows, **kind, tails=tails)

    def meta(self, cos_sin: Ropes, block_size: int, num_chosen: int = 0) -> StepMeta:
        """Build the metadata of a step whose sequences with one new token come first, else InternalError. cos_sin: on
        the device that computes. num_chosen: blocks that sparse decodes attend to."""
        is_chunk = self.num_new > 1
        if not (is_chunk[1:] >= is_chunk[:-1]).all():
            raise InternalError("a step is malformed: sequences with one new token must come first")
        device = cos_sin[0].device
        num_new = self.num_new.tolist()
        owner = np.repeat(np.arange(len(num_new)), num_new)
        query_starts = np.concatenate(([0], np.cumsum(num_new)))
        starts = self.context_lens - self.num_new
        positions = np.arange(len(owner)) - query_starts[owner] + starts[owner]
        blocks, tail = self.tables[owner, positions // block_size].astype(np.int64), None
        if len(self.tails):
            tails = self.tails[self._tail_places(owner, positions, block_size)].astype(np.int64)
            ends = positions % block_size == block_size - 1
            filled = _tensor(np.stack((tails[ends], blocks[ends]), axis=1), device)
            slots = _tensor(tails * block_size + positions % block_size, device)
            tail = TailStep(slots, filled)
        else:
            slots = _tensor(blocks * block_size + positions % block_size, device)
        at = _tensor(positions, device)
        every = np.arange(len(num_new))
        return StepMeta(
            tuple(table[at] for table in cos_sin),
            slots,
            self._paged(every, block_size, device),
            self._sparse(owner, block_size, num_chosen, device) if (self.bounded >= 0).any() else None,
            tail,
        )

    def _paged(self, chosen: IntArray, block_size: int, device: torch.device) -> PagedBatch:
        """The sequences `chosen` alone."""
        num_new, context_lens = self.num_new[chosen], self.context_lens[chosen]
        return PagedBatch(
            block_tables=_tensor(self.tables[chosen], device),
            context_lens=_tensor(context_lens, device),
            query_starts=_tensor(np.concatenate(([0], np.cumsum(num_new))).astype(np.int32), device),
            host_context_lens=context_lens.tolist(),
            host_num_new=num_new.tolist(),
            num_decodes=int((num_new == 1).sum()),
            block_size=block_size,
        )

    def _sparse(self, owner: IntArray, block_size: int, num_chosen: int, device: torch.device) -> SparseStep:
        """owner: [T], the sequence of each row."""
        is_sparse = self.bounded >= 0
        sparse, others = np.flatnonzero(is_sparse), np.flatnonzero(~is_sparse)
        changed: list[int] = []
        lengths: list[int] = []
        for s in sparse:
            length = int(self.context_lens[s])
            starts = range(int(self.bounded[s]) // block_size * block_size, length, block_size)
            changed += [int(self.tables[s, start // block_size]) for start in starts]
            lengths += [min(length - start, block_size) for start in starts]
        return SparseStep(
            rows=_tensor(sparse.astype(np.int64), device),  # one row each, before all chunks
            tables=_tensor(self.tables[sparse], device),
            context_lens=_tensor(self.context_lens[sparse], device),
            changed=_tensor(np.array(changed, dtype=np.int64), device),
            lengths=_tensor(np.array(lengths, dtype=np.int32), device),
            num_chosen=num_chosen,
            other_rows=_tensor(np.flatnonzero(~is_sparse[owner]).astype(np.int64), device),
            others=self._paged(others, block_size, device),
        )


def is_of_draft(message: Int32s) -> bool:
    """Return whether a message, which is not checked yet, is of the model that drafts."""
    return len(message) >= HEADER and int(message[3]) == DRAFT


def _tensor(array: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def broadcast_message(group: Group, message: Int32s) -> None:
    """Send a step message from rank 0; the other ranks call `receive_message`."""
    assert len(message) < MAX_MESSAGE_LEN
    first = np.zeros(FIRST_MESSAGE_LEN, dtype=np.int32)
    first[0] = len(message)
    head, rest = message[: FIRST_MESSAGE_LEN - 1], message[FIRST_MESSAGE_LEN - 1 :]
    first[1 : 1 + len(head)] = head
    group.broadcast(torch.from_numpy(first), patient=True)
    if len(rest):
        group.broadcast(torch.from_numpy(rest))


def receive_message(group: Group) -> Int32s:
    """Wait, without a deadline, for rank 0's next message. Raises InternalError for an impossible length."""
    first = np.zeros(FIRST_MESSAGE_LEN, dtype=np.int32)
    group.broadcast(torch.from_numpy(first), patient=True)
    length = int(first[0])
    if not 0 < length < MAX_MESSAGE_LEN:
        raise InternalError(f"rank 0 announced a step message of invalid length {length}")
    head = first[1 : 1 + length]
    if len(head) == length:
        return head
    rest = np.zeros(length - len(head), dtype=np.int32)
    group.broadcast(torch.from_numpy(rest))
    return np.concatenate((head, rest))
