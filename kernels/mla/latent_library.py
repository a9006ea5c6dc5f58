"""Decodes over latents by FlashMLA (deepseek-ai/FlashMLA), for sm_90, where it is installed. It has not run here on a
GPU.

It knows latents of 512 numbers and rotated keys of 64, bfloat16, in blocks of 64 slots, and one new token a sequence:
drafted tokens that attend together stay with the kernel here. A sequence of no context gets zeros from it, too. Its
second kernel may end before its first one: what follows must not begin early, and is a product of torch's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..attention.decode_plan import DecodePlan, Decodes
from ..common.tuning import chip_of

PACKAGE = "flash_mla"
RANK, ROPE, BLOCK_SIZE = 512, 64, 64
_ALIGNED_BYTES = 16  # addresses and strides of what TMA reads
_KEPT = "FlashMLA's parts"

log = logging.getLogger("diptych.worker")


class FlashMla:
    """A LatentLibrary. Raises what its import does, and AttributeError where the package is another."""

    name = "FlashMLA"

    def __init__(self) -> None:
        module = import_module(PACKAGE)
        self._parts_of: Callable[..., tuple[Any, Any]] = module.get_mla_metadata
        self._attend: Callable[..., tuple[Tensor, Tensor]] = module.flash_mla_with_kvcache

    def takes(self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, decodes: Decodes) -> bool:
        sizes = q_latent.shape[2], q_rope.shape[2], cache.shape[1]
        is_single = decodes.max_queries == 1 and len(decodes.context_lens) == len(q_latent) > 0
        strides = (stride * cache.element_size() % _ALIGNED_BYTES for stride in cache.stride()[:2])
        is_aligned = cache.data_ptr() % _ALIGNED_BYTES == 0 and not any(strides)
        is_known = sizes == (RANK, ROPE, BLOCK_SIZE) and q_latent.dtype == cache.dtype == torch.bfloat16
        return is_known and is_single and is_aligned and decodes.block_tables.dim() == 2

    def attend(
        self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, decodes: Decodes, plan: DecodePlan, scale: float
    ) -> Tensor:
        contexts = decodes.context_lens
        if _KEPT not in decodes.plans:  # once a step for all layers
            decodes.plans[_KEPT] = self._parts_of(contexts, q_latent.shape[1], 1)
        q, parts = torch.cat((q_latent, q_rope), dim=2)[:, None], decodes.plans[_KEPT]
        attended, _ = self._attend(
            q, cache[:, :, None], decodes.block_tables, contexts, RANK, *parts, softmax_scale=scale, causal=False
        )
        return attended[:, 0]


def find_latent_library(device: torch.device) -> FlashMla | None:
    """None where the device has none, or it is not installed."""
    if "sm_90" not in chip_of(device).kinds or find_spec(PACKAGE) is None:
        return None
    try:
        return FlashMla()
    except (ImportError, AttributeError, OSError) as e:
        log.warning("latents are not attended to by %s: it does not load (%s)", PACKAGE, e)
        return None
