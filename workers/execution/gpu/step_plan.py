"""Plan of a step, which rank 0 makes and broadcasts; every rank of a worker on GPUs carries it out. No torch.

    message (int32) = [STEP, C, D, sampled, plain, E, B, X, T, S, N, follows, Q, P, Z, F, taken] [2, C] tables
                    [5, D] decodes [E] ends [B] bounds [X] tails [3, T] [3, S] [N] ([T]) [Q] [P] [Z] [F] prompts
                or  [COPY] [2, P] blocks
                or  [PASSES, C, D, S] [2, C] tables [5, D] rows [S] depths         of what drafts (PassPlan)
                or  [DRAFT_STEP] a step of what drafts, as models/layers/step.py has it

Rank 0 makes it from the entries of a batch (common/entry_rows.py). Other ranks know no sequences: a plan has everything
needed to compute the step, and all ranks have the same buffers and graphs. A received message is checked before use.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ...common.errors import InternalError
from ...core.sequence import KNOWN
from ..common.entry_rows import Ints

STEP, COPY, PASSES, DRAFT_STEP = range(4)
HEADER = 17
PASSES_HEADER = 4
NO_ROWS = np.empty(0, dtype=np.int32)
TOKEN, FEED, CONTEXT, TABLE, SPARSE = range(5)  # rows of StepPlan.decodes


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Arrays of S sequences with T tokens in all; those with one new token come first."""

    token_ids: Ints  # [T]
    previous_rows: Ints | None  # [T], see DecodeRows; None: the host knows all tokens
    positions: Ints  # [T]
    slots: Ints  # [T], of the KV tail where there is one
    context_lens: Ints  # [S]
    num_new: Ints  # [S]
    table_rows: Ints  # [S], of the device's tables
    sampled: Ints  # [n]: the tokens after which one is sampled, in the order of the logits
    prompt_rows: Ints = field(default_factory=lambda: NO_ROWS)  # [Q]: see prompt_rows.py
    pooled_rows: Ints = field(default_factory=lambda: NO_ROWS)  # [P]: see pooled_rows.py
    sparse: Ints = field(default_factory=lambda: NO_ROWS)  # [S], 1: it decodes with part of its context; empty: none
    filled: Ints = field(default_factory=lambda: NO_ROWS)  # [F]: blocks that tokens fill, in order; empty: no KV tail
    is_taken: bool = False  # hidden states of all are, for a draft head

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def filled_pairs(self, block_size: int) -> Ints:
        """The blocks of the KV tail that tokens fill, and the cache's blocks that these become, [F, 2]; none of tokens
        whose KV is stored already."""
        ends = self._fill_blocks(block_size)
        return np.stack((self.slots[ends] // block_size, self.filled), axis=1)

    def _fill_blocks(self, block_size: int) -> NDArray[np.bool_]:
        """Tokens that fill a block of the KV tail, [T]."""
        return (self.positions % block_size == block_size - 1) & (len(self.filled) > 0)

    def sampled_alone(self) -> "Numbers":
        """Its sampled tokens, each as a sequence whose one new token it is; tokens that the host does not know are
        any."""
        rows = self.sampled
        owner = np.searchsorted(np.cumsum(self.num_new), rows, side="right")
        positions, each = self.positions[rows], np.arange(len(rows), dtype=np.int32)
        contexts, ones, tables = positions + 1, np.ones_like(each), self.table_rows[owner]
        return Numbers(self.token_ids[rows], None, positions, self.slots[rows], contexts, ones, tables, each)

    def between(self, first: int, end: int, block_size: int) -> "Numbers":
        """Its tokens [first, end), of which none is sampled or read: of a sequence that is cut there are some here."""
        num_filled = np.cumsum(self._fill_blocks(block_size))
        filled = slice(*(int(num_filled[at - 1]) if at else 0 for at in (first, end)))
        ends = np.cumsum(self.num_new, dtype=np.int32)
        here = (ends > first) & (ends - self.num_new < end)
        lasts = np.minimum(ends[here], end)
        num_new = lasts - np.maximum(ends[here] - self.num_new[here], first)
        return Numbers(
            self.token_ids[first:end],
            None if self.previous_rows is None else self.previous_rows[first:end],
            self.positions[first:end],
            self.slots[first:end],
            self.context_lens[here] - (ends[here] - lasts),
            num_new.astype(np.int32),
            self.table_rows[here],
            NO_ROWS,
            sparse=self.sparse[here] if len(self.sparse) else NO_ROWS,
            filled=self.filled[filled],
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """First the rows that a decode graph computes, then those that are prompts or go with them."""

    tables: Ints  # [2, C]: places among the numbers of the block tables, and the blocks that are there from now on
    # [5, D]: token, feed, context length with it, row of the block tables, 1 for sparse; a draft's side by side
    decodes: Ints
    prompts: Numbers | None
    ends: tuple[int, ...]  # of the prompts' layers after which a hand-off must learn that KV is stored
    num_sampled: int
    is_plain: bool  # see DeviceSampler.write
    bounds: Ints = field(default_factory=lambda: NO_ROWS)  # [B]: full blocks whose bounds are computed before the step
    tails: Ints = field(default_factory=lambda: NO_ROWS)  # [D]: each decode's block of the KV tail; empty: no tail

    @property
    def is_empty(self) -> bool:
        return self.prompts is None and not self.decodes.shape[1]

    def to_message(self) -> Ints:
        of = self.prompts
        sizes: tuple[int, ...] = (0,) * 9
        if of is not None:
            sizes = of.num_tokens, len(of.num_new), len(of.sampled), of.previous_rows is not None
            sizes += len(of.prompt_rows), len(of.pooled_rows), len(of.sparse), len(of.filled), of.is_taken
        num_changed, num_decodes = self.tables.shape[1], self.decodes.shape[1]
        own = (STEP, num_changed, num_decodes, self.num_sampled, self.is_plain, len(self.ends), len(self.bounds))
        own += (len(self.tails),)
        ends, header = np.array(self.ends, dtype=np.int32), np.array((*own, *sizes), dtype=np.int32)
        parts = [header, self.tables.ravel(), self.decodes.ravel(), ends, self.bounds, self.tails]
        if of is not None:
            parts += [of.token_ids, of.positions, of.slots, of.context_lens, of.num_new, of.table_rows, of.sampled]
            parts += [] if of.previous_rows is None else [of.previous_rows]
            parts += [of.prompt_rows, of.pooled_rows, of.sparse, of.filled]
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")


# A step of the other workers that share experts.
NOTHING = StepPlan(np.empty((2, 0), dtype=np.int32), np.empty((5, 0), dtype=np.int32), None, (), 0, is_plain=True)


@dataclass(frozen=True, slots=True, eq=False)
class PassPlan:
    """Passes of a draft of S sequences, those that draft most first: so each pass has the first ones of that before."""

    tables: Ints  # [2, C]: as StepPlan has them
    rows: Ints  # [5, D]: of the first pass, as StepPlan.decodes; first the last row of each sequence; none is sparse
    depths: Ints  # [S]: number of passes of each, descending

    @property
    def num_passes(self) -> int:
        return int(self.depths[0])

    def num_drafting(self, number: int) -> int:
        """Number of sequences that draft a token in pass `number`, from 0 on."""
        return int((self.depths > number).sum())

    def columns(self, number: int) -> Ints:
        """Return the rows of a pass, as StepPlan.decodes. After the first one: a token of each sequence, which the same
        row of the pass before has drafted."""
        if number == 0:
            return self.rows
        num = self.num_drafting(number)
        columns = self.rows[:, :num].copy()
        columns[TOKEN], columns[FEED] = 0, np.arange(num)
        columns[CONTEXT] += number
        return columns

    def to_message(self) -> Ints:
        header = (PASSES, self.tables.shape[1], self.rows.shape[1], len(self.depths))
        parts = [np.array(header, dtype=np.int32), self.tables.ravel(), self.rows.ravel(), self.depths]
        return np.concatenate(parts, dtype=np.int32, casting="same_kind")


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Limits of a step of this worker."""

    max_rows: int
    table_shape: tuple[int, int]  # rows, blocks
    num_blocks: int
    block_size: int
    num_layers: int  # that keep KV
    max_context_tokens: int
    vocab_size: int
    num_chosen: int = 0  # blocks that a sparse decode attends to; 0: none is sparse
    num_tail_blocks: int = 0  # of the KV tail; 0: there is none

    def parse(self, message: Ints) -> "StepPlan | Ints":
        """A plan, or blocks to be copied, [2, P]: from, to. Raises InternalError, saying what is wrong, for a
        message that rank 0 of this worker cannot have sent."""
        _check(len(message) > 1 and message[0] in (STEP, COPY), "it has no header")
        if message[0] == COPY:
            _check(len(message) % 2 == 1, "a block is copied nowhere")
            return _within(message[1:].reshape(2, -1), self.num_blocks, "a block")
        _check(len(message) >= HEADER, "it has no header")
        num_changed, num_decodes, num_sampled, is_plain, *read, num_tails = message[1:8].tolist()
        *sizes, is_taken = message[8:HEADER].tolist()
        are_sizes = min(num_changed, num_decodes, *read, *sizes) >= 0
        _check(num_tails == (num_decodes if self.num_tail_blocks else 0), f"it has {num_tails} blocks of the KV tail")
        _check(is_taken in (0, sizes[0] > 0), f"it says {is_taken} of whether hidden states are taken")
        _check(are_sizes and sizes[3] <= 1 and sizes[6] in (0, sizes[1]), "it has sizes that cannot be")
        _check(0 <= num_sampled <= self.max_rows and num_decodes <= self.max_rows, "it has more rows than fit")
        num_tokens, num_seqs, num_last, follows, *read_rows = sizes
        _check(is_plain in (0, 1) and num_sampled == num_decodes + num_last, f"{num_sampled} of its rows are sampled")
        _check(num_tokens > 0 or not any(sizes), "it has sequences without tokens")
        lengths = [2 * num_changed, 5 * num_decodes, *read, num_tails]
        lengths += [num_tokens] * 3 + [num_seqs] * 3 + [num_last] + [num_tokens] * follows + read_rows
        _check(len(message) == HEADER + sum(lengths), f"it has {len(message)} words and announces another number")
        tables, decodes, ends, bounds, tails, *prompts = np.split(message[HEADER:], np.cumsum(lengths)[:-1])
        return StepPlan(
            self._tables(tables.reshape(2, -1)),
            self._decodes(decodes.reshape(5, -1)),
            replace(self._prompts(prompts), is_taken=is_taken == 1) if num_tokens else None,
            tuple(_within(ends, self.num_layers + 1, "a layer", 1).tolist()),
            num_sampled,
            bool(is_plain),
            _within(bounds, self.num_blocks, "a block"),
            _within(tails, self.num_tail_blocks, "a block of the KV tail"),
        )

    def parse_passes(self, message: Ints, max_sequences: int, max_passes: int) -> PassPlan:
        """A draft of at most so many sequences and passes, whose first one has at most `max_rows` rows. Raises
        InternalError, saying what is wrong, for a message that rank 0 of this worker cannot have sent."""
        _check(len(message) >= PASSES_HEADER and message[0] == PASSES, "it has no header")
        num_changed, num_rows, num_seqs = message[1:PASSES_HEADER].tolist()
        _check(num_changed >= 0 and 0 < num_seqs <= min(num_rows, max_sequences), f"it has {num_seqs} sequences")
        _check(num_rows <= self.max_rows, "it has more rows than fit")
        lengths = [2 * num_changed, 5 * num_rows, num_seqs]
        is_whole = len(message) == PASSES_HEADER + sum(lengths)
        _check(is_whole, f"it has {len(message)} words and announces another number")
        tables, rows, depths = np.split(message[PASSES_HEADER:], np.cumsum(lengths)[:-1])
        plan = PassPlan(self._tables(tables.reshape(2, -1)), self._rows(rows.reshape(5, -1)), depths)
        _within(depths, max_passes + 1, "a pass", 1)
        _check(bool((depths[1:] <= depths[:-1]).all()), "its sequences are not in order")
        _check(not plan.rows[SPARSE].any(), "a row of a draft is sparse")
        _within(plan.rows[CONTEXT, :num_seqs] + depths - 1, self.max_context_tokens + 1, "a context")
        return plan

    def _check_sparse(self, flags: Ints, context_lens: Ints, num_new: Ints | int = 1) -> None:
        """Check which sequences are sparse: each has one new token, and a context beyond the budget."""
        is_long = (context_lens > self.num_chosen * self.block_size) & (num_new == 1) & (self.num_chosen > 0)
        _check(bool(((flags == 0) | ((flags == 1) & is_long)).all()), "a sequence that is sparse cannot be")

    def _tables(self, tables: Ints) -> Ints:
        rows, width = self.table_shape
        _within(tables[0], rows * width, "a place in the block tables")
        _within(tables[1], self.num_blocks, "a block")
        return tables

    def _rows(self, rows: Ints) -> Ints:
        _within(rows[TOKEN], self.vocab_size, "a token")
        _within(rows[FEED], self.max_rows, "a previous row", KNOWN)
        _within(rows[CONTEXT], self.max_context_tokens + 1, "a context", 1)
        _within(rows[TABLE], self.table_shape[0], "a row of the block tables")
        return rows

    def _decodes(self, rows: Ints) -> Ints:
        self._rows(rows)
        is_draft = rows[TABLE, 1:] == rows[TABLE, :-1]
        is_next = rows[CONTEXT, 1:] == rows[CONTEXT, :-1] + 1
        _check(bool((is_next | ~is_draft).all()), "a draft's rows are not in order")
        self._check_sparse(rows[SPARSE], rows[CONTEXT])
        return rows

    def _prompts(self, columns: SequenceOf[Ints]) -> Numbers:
        token_ids, positions, slots, context_lens, num_new, table_rows, sampled, *rest = columns
        *previous_rows, prompt_rows, pooled_rows, sparse, filled = rest
        _within(token_ids, self.vocab_size, "a token")
        _within(positions, self.max_context_tokens, "a position")
        _within(slots, (self.num_tail_blocks or self.num_blocks) * self.block_size, "a slot")
        num_filled = int((positions % self.block_size == self.block_size - 1).sum()) if self.num_tail_blocks else 0
        _check(len(filled) == num_filled, f"it fills {len(filled)} blocks, not {num_filled}")
        _within(filled, self.num_blocks, "a block that is filled")
        _within(context_lens, self.max_context_tokens + 1, "a context", 1)
        _within(num_new, len(token_ids) + 1, "a sequence's tokens", 1)
        _check(int(num_new.sum()) == len(token_ids), "it has other tokens than its sequences")
        _check(bool((context_lens >= num_new).all()), "a context is shorter than its new tokens")
        is_chunk = num_new > 1
        _check(bool((is_chunk[1:] >= is_chunk[:-1]).all()), "sequences with one new token must come first")
        _within(table_rows, self.table_shape[0], "a row of the block tables")
        _within(sampled, len(token_ids), "a sampled row")
        _within(prompt_rows, len(token_ids), "a prompt row")
        _within(pooled_rows, len(token_ids), "a pooled row")
        previous = _within(previous_rows[0], self.max_rows, "a previous row", KNOWN) if previous_rows else None
        if len(sparse):
            self._check_sparse(sparse, context_lens, num_new)
        seqs = context_lens, num_new, table_rows
        rows = sampled, prompt_rows, pooled_rows, sparse, filled
        return Numbers(token_ids, previous, positions, slots, *seqs, *rows)


def copy_message(pairs: SequenceOf[tuple[int, int]]) -> Ints:
    return np.concatenate(([COPY], np.array(pairs).T.ravel())).astype(np.int32)


def _within(numbers: Ints, end: int, what: str, start: int = 0) -> Ints:
    """All are in [start, end)."""
    _check(bool(((numbers >= start) & (numbers < end)).all()), f"{what} does not exist")
    return numbers


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise InternalError(f"a step is malformed: {what}")
