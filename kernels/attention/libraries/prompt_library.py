"""Attention of prompts by FlashAttention 3 (Shah et al. 2024, arXiv 2407.08608), for sm_90, where it is installed.

A build that knows no paged cache is given a copy of the contexts, in order: of a chunk of 2,048 tokens after 32k it
moves 0.3 GB, where attention computes 1 TFLOP. So are keys of latents, which here are in two parts.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...common.tuning import chip_of
from ..paged_batch import AttentionOptions, LatentChunks, PagedBatch, sent

MOST_DIM = 256
LATENT_DIMS = 192, 128  # of keys and of values (DeepSeek-V2): no others are unlike

log = logging.getLogger("diptych.worker")


@dataclass(frozen=True, slots=True)
class Build:
    """A package that contains FlashAttention 3, and what was left out of it."""

    package: str
    is_paged: bool
    has_windows: bool
    dtypes: tuple[torch.dtype, ...]


BUILDS = (
    Build("flash_attn_interface", True, True, (torch.bfloat16, torch.float16)),  # hopper/ of Dao-AILab/flash-attention
    Build("fa3_fwd_interface", False, False, (torch.bfloat16,)),  # fa3-fwd, of the package index
)


class FlashAttention3:
    """A PromptLibrary and a LatentPromptLibrary. Raises ImportError where the package does not load, AttributeError
    where it is another."""

    def __init__(self, build: Build) -> None:
        module = import_module(build.package)
        self.name = f"FlashAttention 3 ({build.package})"
        self._build = build
        self._paged: Callable[..., Tensor] = module.flash_attn_with_kvcache
        self._in_order: Callable[..., Tensor] = module.flash_attn_varlen_func

    def takes(self, q: Tensor, cache: Tensor, options: AttentionOptions, scales: Tensor | None) -> bool:
        is_plain = scales is None and options.sinks is None and cache.dtype == q.dtype
        knows = q.dtype in self._build.dtypes and (self._build.has_windows or not options.window)
        return is_plain and knows and q.shape[2] % 8 == 0 < q.shape[2] <= MOST_DIM

    def attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        # Sequences before `first_seq` have one row each.
        rows, num_new = slice(first_seq, sum(batch.host_num_new)), batch.host_num_new[first_seq:]
        key = "prompts of a library", first_seq
        if key not in batch.plans:  # once a step for all layers
            batch.plans[key] = batch.query_starts[first_seq:] - first_seq
        of_all: dict[str, Any] = {
            "cu_seqlens_q": batch.plans[key],
            "max_seqlen_q": max(num_new),
            "softmax_scale": options.scale_of(q.shape[2]),
            "causal": True,
            "window_size": (options.window - 1, 0) if options.window else (-1, -1),
            "softcap": options.softcap,
            "num_splits": 1,  # so that a row's bits do not depend on its company
        }
        if self._build.is_paged:
            places = batch.context_lens[first_seq:], batch.block_tables[first_seq:]
            of_all |= dict(zip(("cache_seqlens", "page_table"), places, strict=True))
            out[rows] = self._paged(q[rows], cache[:, 0], cache[:, 1], **of_all)
            return
        blocks, slots, starts = _contexts(batch, first_seq)
        keys, values = (cache[:, which][blocks, slots] for which in (0, 1))
        of_all |= {"cu_seqlens_k": starts, "max_seqlen_k": max(batch.host_context_lens[first_seq:])}
        out[rows] = self._in_order(q[rows], keys, values, **of_all)

    def takes_latent(self, q: Tensor, values: Tensor) -> bool:
        return q.dtype in self._build.dtypes and (q.shape[2], values.shape[2]) == LATENT_DIMS

    def attend_latent(
        self, q: Tensor, keys: Tensor, rope_keys: Tensor, values: Tensor, chunks: LatentChunks, scale: float
    ) -> Tensor:
        whole = torch.cat((keys, rope_keys[:, None].expand(-1, keys.shape[1], -1)), dim=2)
        rows, slots = chunks.starts(q.device)
        return self._in_order(
            q,
            whole,
            values,
            cu_seqlens_q=rows,
            cu_seqlens_k=slots,
            max_seqlen_q=max(chunks.num_new),
            max_seqlen_k=max(chunks.context_lens),
            softmax_scale=scale,
            causal=True,
            num_splits=1,
        )


def _contexts(batch: PagedBatch, first_seq: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block and slot of every token of these contexts, one after the other, [C] int64, and where each begins, [S + 1]
    int32. Made once a step for all layers."""
    key = "contexts of a library", first_seq
    if key not in batch.plans:
        lens, tables, host = batch.context_lens[first_seq:], batch.block_tables[first_seq:], batch.host_context_lens
        starts = sent([0, *itertools.accumulate(host[first_seq:])], lens.device)
        owner = torch.repeat_interleave(lens.long(), output_size=sum(host[first_seq:]))
        position = torch.arange(len(owner), device=lens.device) - starts[owner]
        blocks = tables[owner, position // batch.block_size].long()
        batch.plans[key] = blocks, position % batch.block_size, starts
    return batch.plans[key]


def find_library(device: torch.device) -> FlashAttention3 | None:
    """None where the device has none, or it is not installed."""
    if "sm_90" not in chip_of(device).kinds:
        return None
    for build in BUILDS:
        try:
            if find_spec(build.package) is not None:
                return FlashAttention3(build)
        except (ImportError, AttributeError, OSError) as e:
            log.warning("prompts are not attended to by %s: it does not load (%s)", build.package, e)
    return None
