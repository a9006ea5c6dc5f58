"""Attention of prompts by FlashAttention 3 where it is installed, in place of prefill_attention.py where it is faster.

FlashAttention 3 (Shah et al. 2024, arXiv 2407.08608): the package `flash_attn_interface`, made from hopper/ of
Dao-AILab/flash-attention, for sm_90. It reads the cache as it is paged, whatever the size of a block and its strides.
Which of the two computes is not in a table: both are timed at load, on the GPU itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..common.tuning import chip_of
from .paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from .prefill_attention import prefill_attention_triton

PACKAGE = "flash_attn_interface"
MOST_DIM = 256
PROBE_TOKENS, PROBE_BLOCK = 4096, 16
NUM_RUNS = 3
TOLERANCE = 2e-2  # of bfloat16 results of random numbers, absolute: two roundings of numbers below 4

log = logging.getLogger("diptych.worker")


class FlashAttention3:
    """A PromptLibrary. Raises ImportError where the package does not load, AttributeError where it is another."""

    name = "FlashAttention 3"

    def __init__(self) -> None:
        self._attend: Callable[..., Tensor] = import_module(PACKAGE).flash_attn_with_kvcache

    def takes(self, q: Tensor, cache: Tensor, options: AttentionOptions, scales: Tensor | None) -> bool:
        is_plain = scales is None and options.sinks is None and cache.dtype == q.dtype
        return is_plain and q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] % 8 == 0 < q.shape[2] <= MOST_DIM

    def attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        # Sequences before `first_seq` have one row each.
        rows, num_new = slice(first_seq, sum(batch.host_num_new)), batch.host_num_new[first_seq:]
        key = "prompts of a library", first_seq
        if key not in batch.plans:  # once a step for all layers
            batch.plans[key] = batch.query_starts[first_seq:] - first_seq
        out[rows] = self._attend(
            q[rows],
            cache[:, 0],
            cache[:, 1],
            cache_seqlens=batch.context_lens[first_seq:],
            page_table=batch.block_tables[first_seq:],
            cu_seqlens_q=batch.plans[key],
            max_seqlen_q=max(num_new),
            softmax_scale=options.scale_of(q.shape[2]),
            causal=True,
            window_size=(options.window - 1, 0) if options.window else (-1, -1),
            softcap=options.softcap,
            num_splits=1,  # so that a row's bits do not depend on its company
        )


def find_library(device: torch.device) -> FlashAttention3 | None:
    """None where the device has none, or it is not installed."""
    if "sm_90" not in chip_of(device).kinds or find_spec(PACKAGE) is None:
        return None
    try:
        return FlashAttention3()
    except (ImportError, AttributeError, OSError) as e:
        log.warning("prompts are not attended to by %s: it does not load (%s)", FlashAttention3.name, e)
        return None


def faster_library(
    library: FlashAttention3, q: Tensor, cache: Tensor, seconds: Callable[[Callable[[], Any]], float]
) -> FlashAttention3 | None:
    """`library` where it computes what our kernel does, in less time. None: our kernel computes.

    q: [T, N, D], cache: [blocks, 2, block_size, K, D] of T tokens at least: random numbers. seconds: runs device work
    and returns the time that it took.
    """
    if not library.takes(q, cache, NO_OPTIONS, None):
        return None
    num_tokens, (num_blocks, _, block_size) = len(q), cache.shape[:3]
    lens = torch.tensor([0, num_tokens], dtype=torch.int32, device=q.device)
    table = torch.arange(num_blocks, dtype=torch.int32, device=q.device)[None]
    batch = PagedBatch(table, lens[1:], lens, [num_tokens], [num_tokens], 0, block_size)
    by_kernel, by_library = torch.empty_like(q), torch.empty_like(q)

    def own() -> None:
        prefill_attention_triton(q, cache, batch, NO_OPTIONS, None, by_kernel)

    def other() -> None:
        library.attend(q, cache, batch, NO_OPTIONS, by_library, 0)

    try:
        times = [min(seconds(run) for _ in range(1 + NUM_RUNS)) for run in (own, other)]
    except RuntimeError as e:
        log.warning("prompts are not attended to by %s: it fails (%s)", library.name, e)
        return None
    error = float((by_kernel.float() - by_library.float()).abs().max())
    if not error <= TOLERANCE:
        log.warning("prompts are not attended to by %s: its results differ by %.3g", library.name, error)
        return None
    is_faster = times[1] < times[0]
    log.info(
        "prompts are attended to by %s: %d tokens take %.0f us, by %s %.0f us",
        library.name if is_faster else "our own kernel",
        num_tokens,
        times[is_faster] * 1e6,
        "our own kernel" if is_faster else library.name,
        times[not is_faster] * 1e6,
    )
    return library if is_faster else None
