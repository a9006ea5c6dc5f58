"""KV memory of any layout, known number by number: what a sequence reads back must be what it wrote, in every head,
layer and rank. Freed blocks are poisoned.

    a number = (digit of the token (K) or of its position (V) + shifts by head, layer, K or V, dimension, cache salt,
                and in a draft layer the draft) mod 256

so that a byte from another token, head, layer, half or tenant is another number; all are exact in every dtype of a
cache.
"""

import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.workers.common.request import SamplingParams
from diptych.workers.core.batch_tables import BatchTables
from diptych.workers.core.draft import ModelDrafts
from diptych.workers.core.draft_kv import DraftKV
from diptych.workers.core.runner import InFlightStep, LayerWatch, ModelInfo
from diptych.workers.core.sequence import KNOWN, Batch, IsHere, SampledRow, SampledToken, Sequence, everybody
from diptych.workers.execution.draft.drafted_step import DraftedStep
from diptych.workers.kv.layout import AXIS_ORDERS, DOT, GROUP, ROWS, KVLayout, Region
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.staging import GRAIN_BYTES, Slice, Staging
from diptych.workers.kv.wire import STORAGE, Numbers
from diptych.workers.sampling.grammar_masks import GrammarMasks, Masks, PendingMasks
from diptych.workers.testing.fake_runner import next_allowed
from diptych.workers.testing.fake_stream import FakeRow, FakeStep, FakeStream

from ..checks.sampling import SALTS, VOCAB_SIZE, logprobs, next_token
from ..checks.violation import Violation, demand

POISON = 300  # no number is
MAX_CONTEXT = 512
NUM_GRAINS = 4  # of a staging buffer: pulls that come together wait for each other
Places = npt.NDArray[np.int64]


def plan_layout(rng: random.Random) -> KVLayout:
    """Draw the layout that all workers of a world share."""
    head_dim = GROUP if rng.random() < 0.1 else 2
    layout = KVLayout("float32", 4, rng.randint(1, 3), rng.choice((1, 2, 4)), head_dim, "fake")
    is_unlike = head_dim == 2 and layout.num_layers == 3 and layout.num_kv_heads > 1
    return replace(layout, layer_shapes=((layout.num_kv_heads, 2), (1, 6), (1, 6))) if is_unlike else layout


def with_draft(layout: KVLayout, draft_id: str) -> KVLayout:
    """The same layout with one more layer, of a model that drafts."""
    shape = layout.layer_shapes[:1]  # that of the first, where layers differ
    return replace(
        layout,
        num_layers=layout.num_layers + 1,
        layer_shapes=(*layout.layer_shapes, *shape),
        num_draft_layers=1,
        draft_id=draft_id,
    )


def vary(rng: random.Random, layout: KVLayout) -> KVLayout:
    """Another worker's layout, with which the bridge can deal."""
    can_be_dot = layout.head_dim % GROUP == 0
    packing = rng.choice((ROWS, DOT)) if can_be_dot else ROWS
    return replace(
        layout,
        dtype=rng.choice(("float32", "bfloat16")),
        block_size=GROUP if packing == DOT else rng.choice((2, 4, 4, 8)),
        axis_order=rng.choice(list(AXIS_ORDERS.values())),
        tensor_parallel=rng.choice((1, 1, 2, 4)),
        packing=packing,
    )


class CheckedRunner:
    """A Runner. Raises a Violation as soon as a token would be made from KV that is not the sequence's own; a
    provisional one may be, and is wrong then, for nobody must ever see it."""

    def __init__(self, layout: KVLayout, num_blocks: int, haste: random.Random | None = None) -> None:
        """`haste`: steps may be launched ahead; it decides whether one is computed at once or as late as possible."""
        max_context = min(MAX_CONTEXT, num_blocks * layout.block_size)
        self.info = ModelInfo("fake", "FakeForCausalLM", VOCAB_SIZE, max_context, (0,), layout.dtype)
        self.layout = layout
        self._numbers: Numbers = np.zeros(num_blocks * layout.block_bytes // _width(layout), STORAGE[layout.dtype])
        self._places = _places(layout, num_blocks)
        alike = replace(layout, block_size=1, axis_order=KVLayout.axis_order, packing=ROWS)
        self._known = {salt: _known(alike, i) for i, salt in enumerate(SALTS)}
        num_tables = 1 if haste is None else 2  # used in turn, as compiled_steps.py does
        self._tables = deque(BatchTables(layout.block_size, num_blocks) for _ in range(num_tables))
        masks = _MasksAtOnce(VOCAB_SIZE, (0,))
        self._stream, self._haste = FakeStream(self._compute, masks, self._store), haste
        self.proposer = SimProposer(self) if layout.num_draft_layers and haste is None else None
        self.may_fail: Callable[[FakeStep], None] = lambda step: None  # raises where a step is to fail
        self.launch_failed: Callable[[SequenceOf[FakeStep]], None] = lambda steps: None  # given all that are under way
        region = Region(self._numbers.ctypes.data, self._numbers.nbytes, memoryview(self._numbers).cast("B"))
        self.memory = KVMemory(layout, num_blocks, region)

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> InFlightStep:
        step = self._stream.launch(batch, watch)
        self._check_tables(batch, step)
        if batch.previous_entries and self._haste is not None and self._haste.random() < 0.5:
            try:
                self._stream.compute_launched()
            except Exception:
                self.launch_failed(self._stream.under_way)
                step.abandon()  # no other code knows of it
                raise
        return step if self.proposer is None else DraftedStep(step, batch, self.proposer.computed)

    def expert_tokens(self) -> None:
        return None

    @property
    def has_borrowed_cores(self) -> bool:
        return False

    @property
    def looks_ahead(self) -> bool:
        return self._haste is not None

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        return self.looks_ahead

    def copy_blocks(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copy at once, or after the steps that are launched: `haste` decides."""

        def copy() -> None:
            for source, target in pairs:
                self._numbers[self._places[:, target]] = self._numbers[self._places[:, source]]

        if self._haste is not None and self._haste.random() < 0.5:
            copy()
        else:
            self._stream.queue(copy)

    def check(self) -> None:
        """Do nothing: no rank can be lost."""

    def close(self) -> None:
        """Do nothing: it holds only memory."""

    def poison(self, block: int) -> None:
        self._numbers[self._places[:, block]] = _stored(np.float32(POISON), self.layout.dtype)

    def block_at(self, offset: int) -> int:
        """Return the block that a byte belongs to."""
        layout, num_blocks = self.layout, self.memory.num_blocks
        in_rank = offset % (num_blocks * layout.rank_block_bytes)
        if layout.is_block_major:
            return in_rank // layout.rank_block_bytes
        for of in layout.layer_groups(0, layout.num_layers):
            if in_rank < (of.start + of.num_bytes) * num_blocks:
                return (in_rank - of.start * num_blocks) // of.uniform.layer_bytes % num_blocks
        raise AssertionError("beyond the pool")

    def _compute(self, step: FakeStep) -> list[SampledToken]:
        if not step.is_stored:
            self._store(step)
        sampled, masks = [row for row in step.rows if row.samples], step.masks or {}
        return [self._sample(step, row, masks.get(i)) for i, row in enumerate(sampled)]

    def _store(self, step: FakeStep) -> None:
        self.may_fail(step)
        watch = step.watch
        ends = watch.ends if watch is not None else (self.layout.num_target_layers,)
        for first, end in zip((0, *ends), ends, strict=False):
            for row in step.rows:
                self.store(row, slice(first, end))
            if watch is not None:
                watch.reached(end)

    def _check_tables(self, batch: Batch, step: FakeStep) -> None:
        tables, previous_entries = self._tables[0], batch.previous_entries
        self._tables.rotate()
        indices = tables.update(batch.entries, previous_entries)
        rows = {row.sequence: row for row in step.rows}  # of a draft the last, which has all of its tokens
        for row, index, previous in zip(rows.values(), indices, previous_entries or repeat(KNOWN), strict=False):
            num_blocks = (len(row.token_ids) + (previous != KNOWN) - 1) // self.layout.block_size + 1
            kept = tables.array[index, :num_blocks].tolist()
            demand(kept == row.table[:num_blocks], "a compiled step would use other blocks")

    def store(self, row: FakeRow, layers: slice) -> None:
        """Write KV of the row's new tokens."""
        first, end = row.start, len(row.token_ids)
        positions = np.arange(first, end)
        blocks = np.asarray(row.table)[positions // self.layout.block_size]
        places = self._places[:, blocks, positions % self.layout.block_size, layers]
        known = self._known[row.sequence.request.cache_salt]
        self._numbers[places[0]] = known[0, row.token_ids[first:end], layers]
        self._numbers[places[1]] = known[1, first:end, layers]

    def wrong(self, row: FakeRow, layers: slice) -> list[int]:
        """Positions of the row's tokens of which another KV is held than theirs."""
        tokens = row.token_ids
        places = self._places[:, row.table]
        places = places.reshape(2, -1, *places.shape[3:])[:, : len(tokens), layers]
        held, known = self._numbers[places], self._known[row.sequence.request.cache_salt]
        wrong = (held[0] != known[0, tokens, layers]) | (held[1] != known[1, : len(tokens), layers])
        return np.flatnonzero(wrong.any(axis=(1, 2))).tolist()

    def _sample(self, step: FakeStep, row: FakeRow, mask: npt.NDArray[np.int32] | None) -> SampledToken:
        sequence, tokens = row.sequence, row.token_ids
        wrong = self.wrong(row, slice(self.layout.num_target_layers))
        is_wrong = bool(wrong)
        if is_wrong and sequence.provisional is None:
            raise Violation(
                f"a token made from wrong KV: {sequence.request.request_id} at positions {wrong} of {self.layout}"
            )
        sampling, num_prompt = sequence.request.sampling, sequence.num_prompt
        # What a sampler reads is the row's, except in a step that was launched before its last token was known.
        seen, position = (tokens, len(tokens)) if step.previous_entries else (row.of.token_ids, row.of.num_tokens)
        token_id = (next_token(seen, num_prompt, sampling, position) + is_wrong) % VOCAB_SIZE
        if mask is not None:
            token_id = next_allowed(token_id, mask, VOCAB_SIZE)
        return SampledToken(sequence, token_id, *logprobs(token_id, position - num_prompt, sampling))


class _MasksAtOnce(GrammarMasks):
    """GrammarMasks without a thread: a seed decides all."""

    def begin(self, sequences: SequenceOf[SampledRow], is_here: IsHere = everybody) -> PendingMasks | None:
        wanted = self.rows(sequences, is_here)
        if not wanted:
            return None
        made = Future[Masks]()
        made.set_result(self.make(list(wanted.values())))
        return PendingMasks(list(wanted), made, lambda: None)


class SimProposer:
    """A ModelProposer that keeps the KV of a model that drafts: it stores what the target's layers would, and reads all
    that is counted. SimModelDrafter chooses the tokens."""

    num_failures = 0
    is_off = False

    def __init__(self, runner: CheckedRunner) -> None:
        self._runner, self._layers = runner, slice(runner.layout.num_target_layers, runner.layout.num_layers)
        self._written: dict[str, int] = {}  # by sequence: drafted tokens whose KV the last draft left
        self._kv: DraftKV | None = None
        self.num_anew = 0

    def attach(self, kv: DraftKV | None) -> None:
        self._kv = kv

    def may_draft(self, sequence: Sequence) -> bool:
        return True

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        raise AssertionError("SimModelDrafter drafts, not ModelSpeculator")

    def computed(self, batch: Batch) -> None:
        """Compute the draft's KV of what a step has computed of prompts."""
        for entry in batch.entries[batch.num_decodes + batch.num_runs :]:
            sequence = entry.sequence
            if sequence.request.speculates and sequence.pooling is None:
                self._compute(sequence, sequence.num_computed + entry.num_new)

    def draft(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Compute the draft's KV that is missing, and that of what is drafted but for its last token."""
        self._compute(sequence, sequence.num_tokens)
        start, known = sequence.num_tokens, sequence.token_ids + token_ids[:-1]
        self._runner.store(FakeRow(sequence, list(sequence.block_table), known, start, False), self._layers)
        self._written[sequence.key] = len(token_ids) - 1

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        assert self._kv is not None
        num_written = self._written.pop(sequence.key, 0)
        self._kv.advance(sequence, sequence.num_tokens + min(num_accepted, num_written))

    def ended(self, sequence: Sequence) -> None:
        self._written.pop(sequence.key, None)

    def _compute(self, sequence: Sequence, end: int) -> None:
        assert self._kv is not None
        start, table = sequence.num_draft_computed, list(sequence.block_table)
        counted = FakeRow(sequence, table, sequence.token_ids[:start], start, False)
        wrong = self._runner.wrong(counted, self._layers) if start else []
        if wrong and sequence.provisional is None:
            name = sequence.request.request_id
            raise Violation(f"a draft reads wrong KV: {name} at positions {wrong} of {self._runner.layout}")
        if start < end:
            self._runner.store(FakeRow(sequence, table, sequence.token_ids[:end], start, False), self._layers)
            self._kv.advance(sequence, end)


class PoisonedList(list[int]):
    """Free blocks: their content is lost immediately."""

    def __init__(self, blocks: list[int], runner: CheckedRunner) -> None:
        super().__init__(blocks)
        self._runner = runner

    def append(self, block: int) -> None:
        self._runner.poison(block)
        super().append(block)


class CountedStaging(Staging):
    """Knows when a slice has changed hands."""

    def __init__(self) -> None:
        super().__init__(NUM_GRAINS * GRAIN_BYTES)
        self.times_returned = [0] * NUM_GRAINS

    def give_back(self, piece: Slice) -> None:
        for grain in range(piece.start // GRAIN_BYTES, (piece.start + piece.num_bytes) // GRAIN_BYTES):
            self.times_returned[grain] += 1
        super().give_back(piece)


def _width(layout: KVLayout) -> int:
    return np.dtype(STORAGE[layout.dtype]).itemsize


def _stored(values: npt.NDArray[np.float32] | np.float32, dtype: str) -> Numbers:
    """Whole numbers as a cache holds them."""
    wide = np.asarray(values, np.float32)
    return wide if dtype == "float32" else (wide.view(np.uint32) >> 16).astype(np.uint16)


def layer_sizes(layout: KVLayout) -> list[int]:
    """Bytes of each layer in a block of a rank."""
    return [layer.uniform.layer_bytes for i in range(layout.num_layers) for layer in layout.layer_groups(i, 1)]


@lru_cache(maxsize=256)
def _places(layout: KVLayout, num_blocks: int) -> Places:
    """[k and v, block, slot, layer, numbers of all ranks]: where in the pool each is, by kv/layout.py's description and
    not by its code. A layer of fewer numbers than another one has some of them twice."""
    ranks, slots = layout.tensor_parallel, layout.block_size
    own = [_own(layout, layer) for layer in range(layout.num_layers)]
    ends = np.cumsum([2 * slots * heads * dim for heads, dim in own]).tolist()
    count = np.arange(ranks * num_blocks * ends[-1], dtype=np.int64).reshape(ranks, -1)
    found: list[Places] = []
    for first, end, (heads, dim) in zip((0, *ends), ends, own, strict=False):
        if layout.is_block_major:
            pieces = count.reshape(ranks, num_blocks, -1)[:, :, first:end]
        else:
            pieces = count[:, first * num_blocks : end * num_blocks]
        both = _in_rows(layout, pieces.reshape(ranks, num_blocks, 2, -1), heads, dim)
        found.append(both.transpose(2, 1, 3, 0, 4, 5).reshape(2, num_blocks, slots, -1))
    return _side_by_side(found)


def _own(layout: KVLayout, layer: int) -> tuple[int, int]:
    """Heads of a rank, and their numbers."""
    heads, dim = layout.shape_of(layer)
    return max(heads // layout.tensor_parallel, 1), dim


def _in_rows(layout: KVLayout, pieces: Places, heads: int, dim: int) -> Places:
    """[ranks, blocks, k and v, numbers] -> [ranks, blocks, k and v, slot, head, dim]."""
    outer, slots, pair = pieces.shape[:2], layout.block_size, 4 // _width(layout)
    if layout.packing == ROWS:
        return pieces.reshape(*outer, 2, slots, heads, dim)
    groups = slots // GROUP
    keys = pieces[:, :, 0].reshape(*outer, heads, groups, dim // pair, GROUP, pair)
    keys = keys.transpose(0, 1, 3, 5, 2, 4, 6).reshape(*outer, slots, heads, dim)
    values = pieces[:, :, 1].reshape(*outer, heads, groups, GROUP // pair, dim, pair)
    values = values.transpose(0, 1, 3, 4, 6, 2, 5).reshape(*outer, slots, heads, dim)
    return np.stack((keys, values), axis=2)


def _side_by_side(layers: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """[..., numbers] of each -> [..., layer, numbers], as many as the widest has: a narrower one's begin anew."""
    widest = max(layer.shape[-1] for layer in layers)
    return np.stack([layer[..., np.arange(widest) % layer.shape[-1]] for layer in layers], axis=-2)


@lru_cache(maxsize=256)
def _known(layout: KVLayout, salt: int) -> Numbers:
    """[k and v, token or position, layer, numbers of all ranks]: the values, in the order of `_places`."""
    number, ranks = np.arange(VOCAB_SIZE)[:, None, None], layout.tensor_parallel
    found: list[npt.NDArray[np.float32]] = []
    for layer in range(layout.num_layers):
        all_heads, own = layout.shape_of(layer)[0], _own(layout, layer)[0]
        heads = [r * all_heads // ranks + h for r in range(ranks) for h in range(own)]
        dim = np.arange(layout.shape_of(layer)[1])
        digit = np.where(dim % 2, number // 256, number)
        model = 29 * (layer >= layout.num_target_layers and layout.draft_id == "other")
        codes = digit + 53 * salt + 11 * layer + model + 37 * np.array(heads)[:, None] + 7 * dim
        both = np.stack((codes % 256, (codes + 101) % 256)).astype(np.float32)
        found.append(both.reshape(2, VOCAB_SIZE, -1))
    return _stored(_side_by_side(found), layout.dtype)
