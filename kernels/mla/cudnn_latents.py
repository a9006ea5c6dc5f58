"""Attention of prompts over expanded latents by cuDNN, which takes keys of 192 numbers with values of 128.

Heads are computed some at a time: a layer expands as many as fit into memory, which depends on the contexts, and plans
are for fixed numbers. Many of short contexts take few calls, so that the device does not wait for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..attention.libraries.cudnn_calls import DTYPES, CudnnCalls, SequenceCalls, Sizes, is_usable
from ..attention.libraries.prompt_library import LATENT_DIMS
from ..attention.paged_batch import LatentChunks
from ..common.lang import kernel_for
from .prefill import Chunks, mla_prefill_triton, mla_prefill_twin

MANY, FEW = 64, 16  # heads of a call, whichever divide those that a layer has expanded
MOST_OF_MANY = 8192  # tokens of a context

Shape = tuple[torch.dtype, int]  # numbers' dtype, heads of a call


@dataclass(frozen=True, slots=True)
class LatentPart:
    """Sequences side by side, see Sizes.runs."""

    rows: slice  # of the queries
    slots: slice  # of the keys
    cut: SequenceCalls | None
    ours: Chunks  # where there is no cut


class CudnnLatents:
    """A LatentPromptLibrary. Sequences of little work are our kernel's."""

    name = "cuDNN"

    def __init__(self, sizes: Sizes) -> None:
        short = Sizes.of(sizes.most_new, min(sizes.most_context, MOST_OF_MANY), sizes.config)
        self._least_new, self._of_few, self._of_many = sizes.config.least_new, CudnnCalls(sizes), CudnnCalls(short)
        self._prepared: set[Shape] | None = None  # None: no request waits yet, and plans are built as they are needed

    def takes_latent(self, q: Tensor, values: Tensor) -> bool:
        fits = q.dtype in DTYPES and (q.shape[2], values.shape[2]) == LATENT_DIMS
        is_long = len(q) >= self._least_new
        return fits and is_long and (self._prepared is None or _shape(q) in self._prepared)

    def attend_latent(
        self, q: Tensor, keys: Tensor, rope_keys: Tensor, values: Tensor, chunks: LatentChunks, scale: float
    ) -> Tensor:
        assert isinstance(chunks, Chunks)
        heads = _shape(q)[1]
        calls, out = self._calls_of(heads), q.new_empty(*q.shape[:2], values.shape[2])
        key = "parts of cuDNN", heads
        if key not in chunks.plans:  # once a step for all layers
            chunks.plans[key] = _parts(calls.sizes, chunks)
        parts: list[LatentPart] = chunks.plans[key]
        for part in parts:
            if part.cut is None:
                run, slots = kernel_for(q, mla_prefill_triton, mla_prefill_twin), part.slots
                of = q[part.rows], keys[slots], rope_keys[slots], values[slots]
                out[part.rows] = run(*of, part.ours, scale)
        if any(part.cut for part in parts):
            calls.run(q.device, partial(_attend, calls, heads, q, (keys, rope_keys, values), parts, scale, out))
        return out

    def prepare(self, q: Tensor, scale: float) -> None:
        """Build the plans of calls for these heads, some or all of them; others are no longer taken. q: [1, N, D]."""
        self._prepared = self._prepared or set()
        for heads in {_shape(q[:, :num])[1] for num in (MANY, FEW, q.shape[1]) if q.shape[1] % num == 0}:
            if (q.dtype, heads) not in self._prepared:
                calls, rope = self._calls_of(heads), LATENT_DIMS[0] - LATENT_DIMS[1]
                most = max(calls.sizes.most_context, *calls.sizes.sides)
                nothing = q.new_zeros(1, 1, LATENT_DIMS[1]).expand(most, heads, -1)
                fetch = partial(_fetch, nothing, q.new_zeros(1, rope).expand(most, -1), nothing)
                calls.run(q.device, partial(calls.build, q[:, :heads], fetch, scale))
                self._prepared.add((q.dtype, heads))

    def _calls_of(self, heads: int) -> CudnnCalls:
        return self._of_many if heads == MANY else self._of_few


def _parts(sizes: Sizes, chunks: Chunks) -> list[LatentPart]:
    row, slot, parts = 0, 0, list[LatentPart]()
    for run, cut in sizes.runs(chunks.num_new, chunks.context_lens):
        new, contexts = (lens[run.start : run.stop] for lens in (chunks.num_new, chunks.context_lens))
        rows, slots = slice(row, row + sum(new)), slice(slot, slot + sum(contexts))
        parts.append(LatentPart(rows, slots, cut, Chunks(new, contexts)))
        row, slot = rows.stop, slots.stop
    return parts


def _attend(
    calls: CudnnCalls,
    num_heads: int,
    q: Tensor,
    in_order: tuple[Tensor, Tensor, Tensor],
    parts: list[LatentPart],
    scale: float,
    out: Tensor,
) -> None:
    """in_order: keys, their rotated parts, and values; num_heads: of a call. To be called on the library's thread."""
    keys, rope_keys, values = in_order
    for part in parts:
        if part.cut is not None:
            rows, slots = part.rows, part.slots
            for heads in (slice(first, first + num_heads) for first in range(0, q.shape[1], num_heads)):
                fetch = partial(_fetch, keys[slots, heads], rope_keys[slots], values[slots, heads])
                out[rows, heads] = calls.attend(q[rows, heads], part.cut, fetch, scale)


def _shape(q: Tensor) -> Shape:
    return q.dtype, next((num for num in (MANY, FEW) if q.shape[1] % num == 0), q.shape[1])


def _fetch(keys: Tensor, rope_keys: Tensor, values: Tensor, first: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """See Fetch. keys: [C, N, D]; rope_keys: [C, rope]; values: [C, N, V]."""
    dim, seen = keys.shape[2], slice(first, first + count)
    whole = keys.new_empty(size, keys.shape[1], dim + rope_keys.shape[1])
    whole[:count, :, :dim] = keys[seen]
    whole[:count, :, dim:] = rope_keys[seen, None]
    copied = values.new_empty(size, *values.shape[1:])
    copied[:count] = values[seen]
    for numbers in (whole, copied):
        numbers[count:] = 0
    return whole, copied


def find_cudnn_latents(device: torch.device, sizes: Sizes) -> CudnnLatents | None:
    """Return it, or None where ATen has no such cuDNN, or no prompt of the largest step is long enough for it."""
    return CudnnLatents(sizes) if sizes.is_of_use and is_usable(device) else None
