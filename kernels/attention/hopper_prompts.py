"""Attention of prompts by hopper_prompt_kernel.py, in bfloat16 on sm_90. It has not run on a GPU.

Gluon is imported where the kernel is wanted, and nowhere else (common/untried.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.tuning import chip_of
from ..common.untried import is_wanted
from .paged_batch import AttentionOptions, PagedBatch
from .prefill_attention import tiles_of

DIMS = 64, 128
WIDTH = 64  # numbers of a head that one copy brings: 128 bytes, which shared memory has side by side
LEAST_BLOCK, MOST_BLOCK = 8, 1024
ALIGNMENT = 16  # bytes: of the cache's address and strides, for TMA
MAX_REGISTERS = 168  # of 384 threads, so that a core has enough

log = logging.getLogger("diptych.worker")


@dataclass(frozen=True, slots=True)
class HopperPromptConfig:
    rows: int  # of a tile of queries; BLOCK_M
    slots: int  # of a tile of keys; BLOCK_N
    stages: int
    turns: bool = False

    @property
    def name(self) -> str:
        turns = ", in turns" if self.turns else ""
        return f"{self.rows} x {self.slots}, {self.stages} stages{turns}"


CONFIGS = (  # those worth a comparison; the first is used
    HopperPromptConfig(128, 128, 3),
    HopperPromptConfig(128, 128, 3, turns=True),
    HopperPromptConfig(128, 64, 6),
)


class HopperPrompts:
    """A PromptLibrary. Raises ImportError where Triton has no Gluon, AttributeError where it has another."""

    def __init__(self, config: HopperPromptConfig = CONFIGS[0]) -> None:
        from triton.errors import TritonError
        from triton.experimental.gluon import language
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from .hopper_prompt_kernel import hopper_prompt_kernel

        self.name = f"the Hopper kernel ({config.name})"
        self._kernel: Any = hopper_prompt_kernel
        self._config, self._error = config, TritonError
        self._descriptor, self._layout = TensorDescriptor, language.NVMMASharedLayout(128, 16, 5)

    def takes(self, q: Tensor, cache: Tensor, options: AttentionOptions, scales: Tensor | None) -> bool:
        is_plain = scales is None and options.sinks is None and not options.softcap
        block_size, num_kv_heads, dim = cache.shape[2:]
        fits = dim == q.shape[2] and dim in DIMS and q.shape[1] // num_kv_heads <= self._config.rows
        is_box = LEAST_BLOCK <= block_size <= MOST_BLOCK and block_size & (block_size - 1) == 0
        places = cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:4])
        is_aligned = all(place % ALIGNMENT == 0 for place in places)
        return is_plain and q.dtype == cache.dtype == torch.bfloat16 and fits and is_box and is_aligned

    def attend(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        """Raises RuntimeError where it does not compile."""
        try:
            self._launch(q, cache, batch, options, out, first_seq)
        except self._error as e:
            raise RuntimeError(f"{type(e).__name__}: {e}") from e

    def _launch(
        self, q: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor, first_seq: int
    ) -> None:
        config = self._config
        block_size, num_kv_heads, dim = cache.shape[2:]
        group = q.shape[1] // num_kv_heads
        tiles = tiles_of(batch, first_seq, config.rows // group, options.window)
        box = [1, 1, min(block_size, config.slots), 1, WIDTH]
        scale, _, window = options.numbers(dim)
        self._kernel[(min(len(tiles) * num_kv_heads, chip_of(q.device).num_cores),)](
            self._descriptor(cache, list(cache.shape), list(cache.stride()), box, self._layout),
            q,
            out,
            tiles,
            batch.block_tables,
            batch.context_lens,
            batch.query_starts,
            *q.stride()[:2],
            *out.stride()[:2],
            batch.block_tables.stride(0),
            len(tiles),
            scale,
            window,
            KV_HEADS=num_kv_heads,
            GROUP=group,
            HAS_WINDOW=window > 0,
            BLOCK_SIZE=block_size,
            DIM=dim,
            BLOCK_M=config.rows,
            BLOCK_N=config.slots,
            STAGES=config.stages,
            TURNS=config.turns,
            num_warps=4,
            maxnreg=MAX_REGISTERS,
        )


def find_hopper_prompts(device: torch.device, config: HopperPromptConfig = CONFIGS[0]) -> HopperPrompts | None:
    """Return it, or None where the device has no such kernel, or Triton no such Gluon."""
    if device.type != "cuda" or "sm_90" not in chip_of(device).kinds:
        return None
    try:
        return HopperPrompts(config)
    except (ImportError, AttributeError) as e:
        log.warning("prompts are not attended to by the Hopper kernel: Triton has no such Gluon (%s)", e)
        return None


def wanted_hopper_prompts(device: torch.device) -> HopperPrompts | None:
    """Return what `find_hopper_prompts` does, or None where the environment does not name the kernel."""
    return find_hopper_prompts(device) if is_wanted("hopper-prompts") else None
