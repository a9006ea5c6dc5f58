"""Decodes over latents on sm_90 by decode_hopper.py's kernel, where Triton has Gluon and the environment names it."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..attention.decode_plan import DecodePlan, Decodes
from ..common.tuning import chip_of
from ..common.untried import is_wanted
from .decode import mla_decode_triton

RANK, ROPE = 512, 64
LEAST_HEADS = 64  # a tile of rows
ALIGNED = 16  # addresses, in bytes, and strides, in numbers: copies of 16 bytes

log = logging.getLogger("diptych.worker")


class HopperLatents:
    """A LatentLibrary and a LatentLaunch. Raises ImportError or AttributeError where Triton has no such Gluon."""

    name = "a kernel in Gluon"

    def __init__(self, registers: int | None = None) -> None:
        """registers: of a thread that multiplies; None: what decode_hopper.py says."""
        module = import_module(".decode_hopper", __package__)
        self._kernel: Any = module._mla_decode_hopper_kernel
        self._launching = {"REGISTERS": registers or module.REGISTERS, "num_warps": module.NUM_WARPS}
        self.spilled = 0  # registers of a thread, the most of those that were launched

    def takes(self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, decodes: Decodes) -> bool:
        (_, num_heads, rank), rope = q_latent.shape, q_rope.shape[2]
        return (
            knows(num_heads, rank, rope, cache.dtype)
            and all(t.data_ptr() % ALIGNED == 0 for t in (q_latent, q_rope, cache))
            and all(stride % ALIGNED == 0 for t in (q_latent, q_rope, cache) for stride in t.stride()[:2])
        )

    def attend(
        self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, decodes: Decodes, plan: DecodePlan, scale: float
    ) -> Tensor:
        return mla_decode_triton(q_latent, q_rope, cache, decodes, plan, scale, self)

    def launch(self, grid: tuple[int, int], arguments: tuple[Any, ...], constants: dict[str, int]) -> None:
        compiled = self._kernel[grid](*arguments, **constants, **self._launching)
        self.spilled = max(self.spilled, getattr(compiled, "n_spills", None) or 0)


def knows(num_heads: int, rank: int, rope: int, dtype: torch.dtype) -> bool:
    return num_heads >= LEAST_HEADS and (rank, rope) == (RANK, ROPE) and dtype == torch.bfloat16


def find_latents(device: torch.device) -> HopperLatents | None:
    """None where nobody wants it, the device is another, or Triton has no Gluon."""
    if not is_wanted("hopper-latents") or "sm_90" not in chip_of(device).kinds:
        return None
    try:
        return HopperLatents()
    except (ImportError, AttributeError) as e:
        log.warning("latents are not attended to by %s: it does not load (%s)", HopperLatents.name, e)
        return None
