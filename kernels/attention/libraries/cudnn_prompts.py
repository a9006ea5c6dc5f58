"""Attention of prompts over the paged cache by cuDNN: keys and values are copied in order, a piece at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...common.lang import kernel_for
from ...common.tuning import chip_of
from ..paged_batch import AttentionOptions, PagedBatch
from ..prefill_attention import prefill_attention_triton, prefill_attention_twin
from .cudnn_calls import DTYPES, CudnnCalls, SequenceCalls, Sizes, is_usable

Shape = tuple[torch.dtype, int, int, int]  # numbers' dtype, query heads, KV heads, numbers of a head


@dataclass(frozen=True, slots=True)
class PagedPart:
    """Sequences side by side, see Sizes.runs."""

    rows: slice  # of the queries
    sequence: int  # the first
    cut: SequenceCalls | None
    ours: PagedBatch  # where there is no cut


class CudnnPrompts:
    """A PromptLibrary. Sequences of little work are our kernel's."""

    name = "cuDNN"

    def __init__(self, sizes: Sizes, most_dim: int) -> None:
        self._calls, self._most_dim = CudnnCalls(sizes), most_dim
        self._prepared: set[Shape] | None = None  # None: no request waits yet, and plans are built as they are needed

    def takes(self, q: Tensor, cache: Tensor, options: AttentionOptions, scales: Tensor | None) -> bool:
        is_long = scales is None and len(q) >= self._calls.sizes.config.least_new
        is_prepared = self._prepared is None or _shape(q, cache) in self._prepared
        return is_long and is_prepared and self.knows(q, cache, options)

    def knows(self, q: Tensor, cache: Tensor, options: AttentionOptions) -> bool:
        """Return whether it attends with such heads, whatever the number of tokens."""
        is_plain = options.sinks is None and not options.window and not options.softcap
        dim = q.shape[2]
        return is_plain and q.dtype == cache.dtype and q.dtype in DTYPES and dim % 8 == 0 < dim <= self._most_dim

    def attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        key = "parts of cuDNN", first_seq
        if key not in batch.plans:  # once a step for all layers
            batch.plans[key] = self._parts(batch, first_seq)
        parts: list[PagedPart] = batch.plans[key]
        for part in parts:
            if part.cut is None:
                run = kernel_for(q, prefill_attention_triton, prefill_attention_twin)
                out[part.rows] = run(q[part.rows], cache, part.ours, options)
        if any(part.cut for part in parts):
            scale = options.scale_of(q.shape[2])
            self._calls.run(q.device, partial(self._attend, q, cache, batch, parts, scale, out))

    def prepare(self, q: Tensor, cache: Tensor, scale: float) -> None:
        """Build the plans for these heads; other heads are no longer taken. q: [1, N, D]; cache: as attend's."""
        self._prepared = self._prepared or set()
        if _shape(q, cache) not in self._prepared:
            most = max(self._calls.sizes.most_context, *self._calls.sizes.sides)
            table = torch.zeros(1, -(-most // cache.shape[2]), dtype=torch.int32, device=q.device)
            nowhere = PagedBatch(table, table[:, 0], table[0, :1], [], [], 0, cache.shape[2])
            self._calls.run(q.device, partial(self._calls.build, q, partial(_fetch, cache, nowhere, 0), scale))
            self._prepared.add(_shape(q, cache))

    def _parts(self, batch: PagedBatch, first_seq: int) -> list[PagedPart]:
        row, parts = sum(batch.host_num_new[:first_seq]), list[PagedPart]()
        for run, cut in self._calls.sizes.runs(batch.host_num_new, batch.host_context_lens, first_seq):
            rows = slice(row, row + sum(batch.host_num_new[run.start : run.stop]))
            parts.append(PagedPart(rows, run.start, cut, batch if cut else _some(batch, run)))
            row = rows.stop
        return parts

    def _attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, parts: list[PagedPart], scale: float, out: Tensor
    ) -> None:
        for part in parts:
            if part.cut is not None:
                fetch = partial(_fetch, cache, batch, part.sequence)
                out[part.rows] = self._calls.attend(q[part.rows], part.cut, fetch, scale)


def _shape(q: Tensor, cache: Tensor) -> Shape:
    return q.dtype, q.shape[1], cache.shape[3], q.shape[2]


def _some(batch: PagedBatch, run: range) -> PagedBatch:
    """Return the batch of these sequences alone, none of which decodes. Contexts are copied: Triton compiles a kernel
    apart for an address that is no multiple of 16."""
    some = slice(run.start, run.stop)
    return replace(
        batch,
        block_tables=batch.block_tables[some],
        context_lens=batch.context_lens[some].clone(),
        query_starts=batch.query_starts[run.start : run.stop + 1] - batch.query_starts[run.start],
        host_context_lens=batch.host_context_lens[some],
        host_num_new=batch.host_num_new[some],
        num_decodes=0,
        plans={},
    )


def _fetch(cache: Tensor, batch: PagedBatch, sequence: int, first: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """See Fetch. Behind the context, where the cache may be NaN, there is its last token again."""
    key = "places of cuDNN", sequence, first, size
    if key not in batch.plans:  # once a step for all layers
        position = torch.arange(first, first + size, device=cache.device).clamp_(max=first + count - 1)
        blocks = batch.block_tables[sequence][position // batch.block_size].long()
        batch.plans[key] = blocks, position % batch.block_size
    both = cache.transpose(1, 2)[batch.plans[key]].contiguous()  # [size, 2, K, D]
    return both[:, 0], both[:, 1]


def find_cudnn_prompts(device: torch.device, sizes: Sizes) -> CudnnPrompts | None:
    """Return it, or None where ATen has no such cuDNN, or no prompt of the largest step is long enough for it."""
    if not sizes.is_of_use or not is_usable(device):
        return None
    return CudnnPrompts(sizes, 256 if "sm_90" in chip_of(device).kinds else 128)
