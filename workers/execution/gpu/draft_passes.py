"""Passes of what drafts on a GPU, one for each token of a draft, launched one after the other without waiting.

    pass 1    rows of the tokens that have no KV of the draft yet: first the last of each sequence, then all before it
    pass 2 .. a row of each sequence that drafts on: the token that the pass before has drafted, read on the device

Sequences that draft most come first, so that each pass has the first rows of the one before. A pass is a graph from
tokens to logits and one that samples, each of the smallest bucket that fits (decode_graphs.py); without graphs the same
work is launched kernel by kernel. Tokens, and how sure the model was of them, are read back once, at the end. Where
penalties count the drafted tokens, the host reads them after each pass.

All is on a lane of its own: drafts begin when a step was waited for, and are waited for before the next one.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ....kernels.sampling.logsumexp import logsumexp_top_k
from ...core.draft import Draft
from ...core.sequence import KNOWN, DraftedRow, SampledRow, ScheduledSequence
from ...device.device import Device, Lane, Work
from ...device.device_errors import needing_memory
from ...device.kv_cache import KVCache
from ...models.heads.draft_head import DraftHead
from ...models.heads.passes import TorchPasses
from ...models.heads.vocabulary_map import DraftVocabulary
from ...models.layers.attention import StepMeta
from ...models.layers.decoder import Decoder
from ...models.layers.rope import Ropes
from ...models.layers.step import Step
from ...sampling.sampler import Sampler
from ..common.draft_rows import DraftPasses, DraftRows
from .buckets import StepSizes, bucket_for, row_buckets
from .device_sampler import DeviceSampler
from .device_tables import ChangedTables, DeviceTables
from .forward import ForwardPieces
from .processed_rows import is_penalised
from .prompt_part import TABLE_BLOCKS
from .step_buffers import NUM_HOST_BUFFERS, StepBuffers
from .step_plan import NO_ROWS, Ints

T = TypeVar("T")
_REMEDY = "lower kv_memory_fraction (or kv_memory_bytes) or max_running, or set cuda_graphs to false"


class PassWork(Protocol):
    """Device work of a pass, which may be captured: from the first `bucket` rows of the buffers to their logits."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def cos_sin(self) -> Tensor:
        """[positions, A] float32, of the ropes of what drafts."""
        ...

    def first(self, buffers: StepBuffers, bucket: int) -> None: ...

    def further(self, buffers: StepBuffers, bucket: int) -> None: ...


class PassChain:
    """Passes that follow one another, of any kind of work."""

    def __init__(
        self,
        device: Device,
        work: PassWork,
        sampler: DeviceSampler,
        sizes: StepSizes,
        max_rows: int,
        *,
        has_graphs: bool,
    ) -> None:
        """sampler: the target's, between whose steps these passes are. sizes: of the target's steps. max_rows: of a
        first pass. Raises ConfigError where the device has too little memory."""
        self._device, self._work, self._sampler = device, work, sampler
        self.lane = device.lane("drafts")
        self.max_rows = max_rows
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}  # by bucket, and whether it is of a first pass
        self._choices: dict[tuple[int, int], Callable[[], None]] = {}  # by bucket and set of host buffers
        self._buckets: tuple[int, ...] = ()
        with needing_memory("the buffers and graphs of drafts", _REMEDY):
            layout = work.cache.layout
            max_blocks = -(-layout.num_blocks_for(len(work.cos_sin)) // TABLE_BLOCKS) * TABLE_BLOCKS
            self.buffers = StepBuffers(device, sizes, max_blocks, sampler.logits)
            self._tables = DeviceTables(device, max_blocks, sizes.max_sequences)
            self._changed = ChangedTables(layout.block_size, max_blocks, sizes.max_sequences)
            self._chances = torch.zeros(sizes.max_rows, dtype=torch.float32, device=device.torch_device)
            shape = sizes.max_draft_tokens, sizes.max_sequences
            self._tokens_here, self._chances_here = (device.pinned(shape, of) for of in (torch.int64, torch.float32))
            device.synchronize()
            if has_graphs:
                self._capture()
            device.synchronize()

    def _capture(self) -> None:
        buckets = row_buckets(self.max_rows)
        most_further = bucket_for(buckets, min(self.buffers.sizes.max_sequences, self.max_rows))
        assert most_further is not None
        for bucket in reversed(buckets):
            works = {True: self._work.first}
            works |= {False: self._work.further} if bucket <= most_further else {}
            for is_first, work in works.items():
                captured = self._device.capture(self.lane, partial(work, self.buffers, bucket))
                self._graphs[bucket, is_first] = captured
            for index in range(NUM_HOST_BUFFERS if bucket <= most_further else 0):
                choose = partial(self._choose, bucket, index, is_plain=True)
                self._choices[bucket, index] = self._device.capture(self.lane, choose)
        self._buckets = buckets

    def draft(self, rows: DraftRows, prepare: Work | None = None) -> list[Draft]:
        """See DraftPasses. prepare: device work before the first pass."""
        assert rows.num_rows <= self.max_rows and rows.depths == sorted(rows.depths, reverse=True)
        assert rows.depths[0] <= self.buffers.sizes.max_draft_tokens
        reads_each = any(is_penalised(sequence.request.sampling) for sequence in rows.sequences)
        known: list[list[int]] = [[] for _ in rows.sequences]
        try:
            table_rows = self._place(rows)
            for number in range(rows.depths[0]):
                num = sum(depth > number for depth in rows.depths)
                drafted = [known[s] if reads_each else [0] * number for s in range(num)]
                sampled: list[SampledRow] = [
                    DraftedRow(of, [*ids]) if ids else of for of, ids in zip(rows.sequences, drafted, strict=False)
                ]
                self._launch(number, rows, table_rows, sampled, prepare)
                if reads_each:
                    self.lane.record().wait()
                    for ids, token_id in zip(known, self._tokens_here[number, :num].tolist(), strict=False):
                        ids.append(token_id)
            self.lane.record().wait()
        except Exception:
            self._sampler.forget()
            self._changed.forget_all()
            settle(self.lane)
            raise
        tokens, chances = self._tokens_here.numpy(), self._chances_here.numpy()
        return [Draft(tokens[:d, s].tolist(), chances[:d, s].tolist()) for s, d in enumerate(rows.depths)]

    def _place(self, rows: DraftRows) -> list[int]:
        """Return the row of each sequence in the device's tables, which are brought up to date."""
        entries = [
            ScheduledSequence(of, of.num_tokens + depth - 1 - of.num_computed)
            for of, depth in zip(rows.sequences, rows.depths, strict=True)
        ]
        table_rows = self._changed.update(entries)
        changes = self._changed.take()
        if changes.size:
            self._tables.change(self.lane, changes)
        return table_rows

    def _launch(
        self, number: int, rows: DraftRows, table_rows: list[int], sampled: list[SampledRow], prepare: Work | None
    ) -> None:
        index = number % NUM_HOST_BUFFERS
        host = self.buffers.host[index]
        host.wait()
        columns = _columns(rows, table_rows, number, len(sampled))
        is_plain = self._sampler.write_drafts(index, sampled)
        bucket = bucket_for(self._buckets, columns.shape[1]) or columns.shape[1]
        host.write(columns, bucket, 1)
        if prepare is not None and number == 0:
            self.lane.run(prepare)
        self.lane.run(partial(self._pass, number, bucket, len(sampled), is_plain))
        host.used = self.lane.record()

    def _pass(self, number: int, bucket: int, num_sampled: int, is_plain: bool) -> None:
        """Device work."""
        buffers, index, is_first = self.buffers, number % NUM_HOST_BUFFERS, number == 0
        buffers.upload(buffers.host[index])
        if is_first:
            buffers.gather_tables(self._tables.tensor, bucket)
        graph = self._graphs.get((bucket, is_first))
        if graph is not None:
            graph()
        else:
            (self._work.first if is_first else self._work.further)(buffers, bucket)
        choice = self._choices.get((bucket_for(self._buckets, num_sampled) or 0, index)) if is_plain else None
        if choice is not None:
            choice()
        else:
            self._choose(num_sampled, index, is_plain=is_plain)
        self._tokens_here[number, :num_sampled].copy_(buffers.tokens[:num_sampled], non_blocking=True)
        self._chances_here[number, :num_sampled].copy_(self._chances[:num_sampled], non_blocking=True)

    def _choose(self, num_rows: int, index: int, *, is_plain: bool) -> None:
        """Device work, captured where rows are plain: from logits to tokens, and how likely the likeliest was."""
        logits, tokens = self.buffers.logits[:num_rows], self.buffers.tokens[:num_rows]
        totals, _, best = logsumexp_top_k(logits, 1)
        self._chances[:num_rows].copy_((best[:, 0] - totals).exp_())
        self._sampler.upload(index)
        if is_plain:
            self._sampler.choose(index, logits, tokens, num_rows)
        else:
            self._sampler.process_and_choose(index, logits, tokens)


def _columns(rows: DraftRows, table_rows: list[int], number: int, num: int) -> Ints:
    """Decode columns of a pass, see StepPlan: of each new token in the first one; then of one token of each of `num`
    sequences, which the same row of the pass before has drafted. No row is sparse."""
    if number == 0:
        first = [(rows.token_ids[s][i], KNOWN, rows.starts[s] + i + 1, table_rows[s], 0) for s, i in rows.own_first]
        return np.array(first, dtype=np.int32).T
    contexts = [start + len(ids) + number for start, ids in zip(rows.starts, rows.token_ids, strict=True)]
    return np.array(([0] * num, range(num), contexts[:num], table_rows[:num], [0] * num), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A PassWork: a decoder's."""

    pieces: ForwardPieces
    cos_sin: Tensor  # [positions, A] float32

    @property
    def cache(self) -> KVCache:
        return self.pieces.cache

    def first(self, buffers: StepBuffers, bucket: int) -> None:
        decoder, cache = self.pieces.decoder, self.pieces.cache
        of = buffers.inputs(bucket, 1, self.cos_sin, cache.layout.block_size)
        meta = StepMeta(self.pieces.angles(of.cos_sin), of.slots, of.paged)
        logits = decoder.whole_logits(decoder.forward(of.tokens, cache, meta))
        assert logits is not None
        buffers.logits[:bucket].copy_(logits)

    further = first


class HeadWork:
    """A PassWork: a head's, which is given hidden states of its target first, and then what it made itself."""

    def __init__(self, head: DraftHead, cache: KVCache, cos_sin: Tensor, dtype: torch.dtype, max_rows: int) -> None:
        """dtype: of hidden states. Raises torch.OutOfMemoryError."""
        self.cache, self.cos_sin, self._head, spec = cache, cos_sin, head, head.spec
        sizes = spec.aux_size, spec.decoder.hidden_size
        self.taken, self._hidden = (torch.zeros(max_rows, n, dtype=dtype, device=cos_sin.device) for n in sizes)
        self._vocabulary = DraftVocabulary(spec.decoder.vocab_size, head.parts.to_target)

    def first(self, buffers: StepBuffers, bucket: int) -> None:
        self._compute(self._head.enter(self.taken[:bucket]), buffers, bucket)

    def further(self, buffers: StepBuffers, bucket: int) -> None:
        self._compute(self._hidden[:bucket], buffers, bucket)

    def prompt(self, tokens: Tensor, meta: StepMeta) -> None:
        """Compute entries of any hidden states. tokens: [T] int64."""
        hidden = self._head.enter(self.taken.new_zeros(len(tokens), self.taken.shape[1]))
        self._head.forward(tokens, hidden, self.cache, meta)

    def _compute(self, entering: Tensor, buffers: StepBuffers, bucket: int) -> None:
        of = buffers.inputs(bucket, 1, self.cos_sin, self.cache.layout.block_size)
        ropes = of.cos_sin.split([dim for _, dim in self._head.spec.decoder.ropes], dim=1)
        hidden = self._head.forward(of.tokens, entering, self.cache, StepMeta(ropes, of.slots, of.paged))
        self._hidden[:bucket].copy_(hidden)
        buffers.logits[:bucket].copy_(self._vocabulary.logits(self._head.logits(hidden)))


@dataclass(frozen=True, slots=True)
class LaneDecoder:
    """A StepDecoder, which launches kernel by kernel."""

    decoder: Decoder
    cache: KVCache
    cos_sin: Ropes
    sampler: Sampler
    lane: Lane

    @property
    def passes(self) -> None:
        """See StepDecoder."""

    def compute(self, step: Step) -> Tensor | None:
        """See StepDecoder."""
        return wait_for(self.lane, lambda: self.decoder.compute(step, self.cache, self.cos_sin))


@dataclass(frozen=True, slots=True)
class ModelPasses:
    """A StepDecoder and DraftPasses."""

    steps: LaneDecoder
    chain: PassChain

    @property
    def sampler(self) -> Sampler:
        return self.steps.sampler

    @property
    def passes(self) -> DraftPasses:
        return self

    @property
    def max_rows(self) -> int:
        return self.chain.max_rows

    def compute(self, step: Step) -> Tensor | None:
        """See StepDecoder."""
        return self.steps.compute(step)

    def draft(self, rows: DraftRows) -> list[Draft]:
        """See DraftPasses."""
        return self.chain.draft(rows)


class GpuHeadPasses(TorchPasses):
    """HeadPasses."""

    def __init__(self, head: DraftHead, work: HeadWork, cos_sin: Ropes, chain: PassChain) -> None:
        super().__init__(head, work.cache, cos_sin)
        self._work, self._chain = work, chain

    @property
    def max_rows(self) -> int:
        return self._chain.max_rows

    def draft(self, rows: DraftRows, taken: SequenceOf[SequenceOf[Tensor]]) -> list[Draft]:
        """See HeadPasses."""
        lasts = [parts[-1][-1:] for parts in taken]
        before = [part for parts in taken for part in (*parts[:-1], parts[-1][:-1]) if len(part)]
        return self._chain.draft(rows, lambda: torch.cat(lasts + before, out=self._work.taken[: rows.num_rows]))

    def run(self, work: Callable[[], T]) -> T:
        """See HeadPasses."""
        return wait_for(self._chain.lane, work)


def warm_up(
    lane: Lane,
    cache: KVCache,
    cos_sin: Ropes,
    sizes: Iterable[tuple[int, int]],
    compute: Callable[[Tensor, StepMeta], object],
) -> None:
    """Compile the kernels that a prompt needs, before the first one. Stores nothing. sizes: of prompt_sizes. compute: a
    forward pass of what drafts, of token ids [T] int64."""
    block_size, num_positions = cache.layout.block_size, len(cos_sin[0])
    for num_new, context_len in sizes:
        new, context = (np.array([min(n, num_positions)], dtype=np.int32) for n in (num_new, context_len))
        ids = np.zeros(int(new[0]), dtype=np.int32)
        tables = np.zeros((1, cache.layout.num_blocks_for(int(context[0]))), dtype=np.int32)
        step = Step(new, context, tables, ids, NO_ROWS)

        def work(step: Step = step) -> None:
            meta = step.meta(cos_sin, block_size)
            nowhere = replace(meta, slots=torch.full_like(meta.slots, -1))
            compute(torch.zeros(step.num_tokens, dtype=torch.int64, device=meta.slots.device), nowhere)

        wait_for(lane, work)


def wait_for(lane: Lane, work: Callable[[], T]) -> T:
    """Do work on a lane, wait for it, and return what it gives."""
    found: list[T] = []
    try:
        lane.run(lambda: found.append(work()))
        lane.record().wait()
    except Exception:
        settle(lane)
        raise
    return found[0]


def settle(lane: Lane) -> None:
    """Wait for what was launched before something failed: the target's next step writes where that does."""
    with suppress(RuntimeError):  # a lost device is reported already
        lane.record().wait()
