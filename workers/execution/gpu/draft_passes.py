"""Passes of what drafts on a GPU, one for each token of a draft, launched one after the other without waiting.

    pass 1    rows of the tokens that have no KV of the draft yet: first the last of each sequence, then all before it
    pass 2 .. a row of each sequence that drafts on: the token that the pass before has drafted, read on the device

Sequences that draft most come first, so that each pass has the first rows of the one before. A pass is a graph from
tokens to logits and one that samples, each of the smallest bucket that fits (decode_graphs.py); without graphs the same
work is launched kernel by kernel. Tokens, and how sure the model was of them, are read back once, at the end. Where
penalties count the drafted tokens, the host reads them after each pass.

All is on a lane of its own: drafts begin when a step was waited for, and are waited for before the next one. What other
ranks do of it, and what each does of a pass, is in rank_passes.py.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ....kernels.sampling.logsumexp import logsumexp_top_k
from ...core.draft import Draft
from ...core.sequence import KNOWN, DraftedRow, SampledRow, ScheduledSequence
from ...device.device import Lane, Work
from ...device.device_errors import needing_memory
from ...device.kv_cache import KVCache
from ...models.heads.draft_head import DraftHead
from ...models.heads.passes import TorchPasses
from ...models.heads.vocabulary_map import DraftVocabulary
from ...models.layers.attention import StepMeta
from ...models.layers.rope import Ropes
from ...models.layers.row_exchange import RowExchange
from ...models.layers.step import Step
from ...ranks.agreed_step import PassesSize
from ...ranks.rank_processes import RankProcesses
from ...sampling.sampler import Sampler
from ..common.draft_rows import DraftPasses, DraftRows
from ..common.draft_turns import DraftTurns
from .buckets import bucket_for
from .device_sampler import DeviceSampler
from .device_tables import ChangedTables
from .processed_rows import is_penalised
from .rank_passes import A_PASS, REMEDY, LaneDecoder, RankPasses, num_rows_of, settle, wait_for
from .step_buffers import NUM_HOST_BUFFERS, StepBuffers
from .step_plan import NO_ROWS, Ints, PassPlan

T = TypeVar("T")


class PassChain:
    """Passes that follow one another, of any kind of work, as rank 0 plans and samples them."""

    def __init__(
        self,
        own: RankPasses,
        sampler: DeviceSampler,
        ranks: RankProcesses | None = None,
        turns: DraftTurns | None = None,
        *,
        has_graphs: bool,
    ) -> None:
        """own: of rank 0. sampler: the target's, between whose steps these passes are. ranks: those that compute each
        pass with us. turns: with workers that do; None: there are none. Raises ConfigError where the device has too
        little memory."""
        self._own, self._sampler, self._ranks, self._turns = own, sampler, ranks, turns
        self.lane, self.max_rows, self.buffers = own.lane, own.max_rows, own.buffers
        self._choices: dict[tuple[int, int], Callable[[], None]] = {}  # by bucket and set of host buffers
        try:
            with needing_memory("the buffers and graphs of drafts", REMEDY):
                self._make_ready(has_graphs=has_graphs)
        except BaseException:
            self.close()
            raise
        if turns is not None:
            turns.add(own)

    def _make_ready(self, *, has_graphs: bool) -> None:
        """Make the buffers, and capture graphs. Raises torch.OutOfMemoryError."""
        device, sizes = self._own.device, self.buffers.sizes
        self._changed = ChangedTables(self._own.block_size, self.buffers.block_tables.shape[1], sizes.max_sequences)
        self._chances = torch.zeros(sizes.max_rows, dtype=torch.float32, device=device.torch_device)
        shape = sizes.max_draft_tokens, sizes.max_sequences
        self._tokens_here, self._chances_here = (device.pinned(shape, of) for of in (torch.int64, torch.float32))
        device.synchronize()
        if has_graphs:
            self._capture()
        device.synchronize()

    def _capture(self) -> None:
        for bucket in reversed([of for of in self._own.buckets if of <= self._own.most_further]):
            for index in range(NUM_HOST_BUFFERS):
                choose = partial(self._choose, bucket, index, is_plain=True)
                self._choices[bucket, index] = self._own.device.capture(self.lane, choose)

    def draft(self, rows: DraftRows, prepare: Work | None = None) -> list[Draft]:
        """See DraftPasses. prepare: device work before the first pass. If it fails once other ranks, or workers,
        compute it with us, they end; raises RankLost, which names the cause."""
        assert rows.num_rows <= self.max_rows and rows.depths == sorted(rows.depths, reverse=True)
        assert rows.depths[0] <= self.buffers.sizes.max_draft_tokens
        if self._turns is None:
            return self._draft(rows, prepare, None)
        size = PassesSize(rows.num_rows, len(rows.sequences), rows.depths[0])
        return self._turns.share(size, partial(self._draft, rows, prepare))

    def _draft(self, rows: DraftRows, prepare: Work | None, size: PassesSize | None) -> list[Draft]:
        """size: of the passes that workers share, of which some may have no row of ours; None: all are ours alone."""
        try:
            plan = self._plan(rows)
            with self._ranks.sharing(A_PASS) if self._ranks is not None else nullcontext():
                if self._ranks is not None:
                    self._ranks.broadcast(plan.to_message())
                self._compute(plan, rows, prepare, size)
        except Exception:
            self._sampler.forget()
            self._changed.forget_all()
            settle(self.lane)
            raise
        tokens, chances = self._tokens_here.numpy(), self._chances_here.numpy()
        return [Draft(tokens[:d, s].tolist(), chances[:d, s].tolist()) for s, d in enumerate(rows.depths)]

    def close(self) -> None:
        """See DraftPasses."""
        self._choices.clear()
        self._own.close()

    def _plan(self, rows: DraftRows) -> PassPlan:
        """Plan the passes, with what changed in the block tables."""
        entries = [
            ScheduledSequence(of, of.num_tokens + depth - 1 - of.num_computed)
            for of, depth in zip(rows.sequences, rows.depths, strict=True)
        ]
        table_rows = self._changed.update(entries)
        first = [(rows.token_ids[s][i], KNOWN, rows.starts[s] + i + 1, table_rows[s], 0) for s, i in rows.own_first]
        depths = np.array(rows.depths, dtype=np.int32)
        return PassPlan(self._changed.take(), np.array(first, dtype=np.int32).T, depths)

    def _compute(self, plan: PassPlan, rows: DraftRows, prepare: Work | None, size: PassesSize | None) -> None:
        """Launch all passes, and wait for them."""
        reads_each = any(is_penalised(sequence.request.sampling) for sequence in rows.sequences)
        known: list[list[int]] = [[] for _ in rows.sequences]
        self._own.begin(plan)
        if prepare is not None:
            self.lane.run(prepare)
        for number in range(plan.num_passes if size is None else size.num_passes):
            num = plan.num_drafting(number)
            drafted = [known[s] if reads_each else [0] * number for s in range(num)]
            sampled: list[SampledRow] = [
                DraftedRow(of, [*ids]) if ids else of for of, ids in zip(rows.sequences, drafted, strict=False)
            ]
            num_rows = 0 if size is None else num_rows_of(size, number)
            self._launch(number, plan.columns(number), num_rows, sampled)
            if reads_each:
                self.lane.record().wait()
                for ids, token_id in zip(known, self._tokens_here[number, :num].tolist(), strict=False):
                    ids.append(token_id)
        self.lane.record().wait()

    def _launch(self, number: int, columns: Ints, num_rows: int, sampled: list[SampledRow]) -> None:
        """num_rows: see RankPasses.write."""
        bucket = self._own.write(number, columns, num_rows)
        if sampled:
            is_plain = self._sampler.write_drafts(number % NUM_HOST_BUFFERS, sampled)
            self.lane.run(partial(self._pass, number, bucket, len(sampled), is_plain))
        else:
            self.lane.run(partial(self._own.compute, number, bucket))
        self._own.hold(number)

    def _pass(self, number: int, bucket: int, num_sampled: int, is_plain: bool) -> None:
        """Device work."""
        buffers, index = self.buffers, number % NUM_HOST_BUFFERS
        self._own.compute(number, bucket)
        choice = self._choices.get((bucket_for(self._own.buckets, num_sampled) or 0, index)) if is_plain else None
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


class HeadWork:
    """A PassWork: a head's, which is given hidden states of its target first, and then what it made itself."""

    def __init__(self, head: DraftHead, cache: KVCache, cos_sin: Tensor, dtype: torch.dtype, max_rows: int) -> None:
        """dtype: of hidden states. Raises torch.OutOfMemoryError."""
        self.cache, self.cos_sin, self._head, spec = cache, cos_sin, head, head.spec
        self.exchange: RowExchange | None = None  # its experts are here, whole
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

    def close(self) -> None:
        """See DraftPasses."""
        self.chain.close()


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

    def close(self) -> None:
        """See DraftPasses."""
        self._chain.close()


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
