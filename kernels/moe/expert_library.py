"""Experts by FlashInfer's CUTLASS (flashinfer.fused_moe.cutlass_fused_moe), where it is installed. It has not run here
on a GPU.

It computes both products, the gate between them and the tokens' sums. It takes the weights as they are here but for
one thing: of each expert it has up before gate, as SILU_UP_FIRST of gate_mul.py has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from ..common.tuning import INTERPRETER, chip_of
from ..elementwise.gate_mul import SILU_UP_FIRST
from ..gemm.linear import Weight

PACKAGE = "flashinfer"
_KINDS = {"sm_90", "sm_100"}  # it has kernels for some others too: those are left to ours
_ALIGNED_BYTES = 16  # of which addresses and rows of what TMA reads are multiples
_MOST_COUNTS = 2**31 - 1  # tokens times experts, which it counts in int32

log = logging.getLogger("diptych.worker")


class ExpertLibrary(Protocol):
    """A library that computes experts in place of the kernels here."""

    @property
    def name(self) -> str: ...

    @property
    def is_of_scaled(self) -> bool:
        """Return whether it multiplies by weights in fp8 with scales of blocks; else by those of the tokens' dtype."""
        ...

    @property
    def has_up_first(self) -> bool:
        """Return whether it has up before gate."""
        ...

    def takes(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, activation: int
    ) -> bool:
        """Return whether it knows such inputs, which are moe_experts' without biases."""
        ...

    def compute(self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        """Compute what moe_experts does without shared experts, of what it takes: a new tensor."""
        ...


# Who computes experts, with the number of tokens up to which each does, ascending; None, and beyond: the kernels here.
ExpertLibraries = tuple[tuple[int, ExpertLibrary | None], ...]


class FlashInferExperts:
    """An ExpertLibrary. Raises what its import does, and AttributeError where it has no such function.

    Versions before 0.6.15 refuse `use_fused_finalize`: they add up tokens' sums by atomics, in any order.
    """

    name = "FlashInfer"
    is_of_scaled, has_up_first = False, True

    def __init__(self) -> None:
        self._compute: Callable[..., object] = import_module(f"{PACKAGE}.fused_moe").cutlass_fused_moe

    def takes(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, activation: int
    ) -> bool:
        if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or activation != SILU_UP_FIRST:
            return False
        num_experts, dim, inner = down.shape
        wide = x, gate_up, down
        return (
            all(of.dtype == torch.bfloat16 for of in wide)
            and weights.dtype == torch.float32
            and experts.dtype == torch.int32
            and gate_up.shape == (num_experts, 2 * inner, dim)
            and x.shape[1:] == (dim,)
            and weights.shape == experts.shape == (len(x), experts.shape[1])
            and all(size * x.element_size() % _ALIGNED_BYTES == 0 for size in (dim, inner))
            # It looks at addresses alone: it takes what is not contiguous for what is.
            and all(of.is_contiguous() for of in (*wide, weights, experts))
            and all(of.data_ptr() % _ALIGNED_BYTES == 0 for of in wide)
            and 0 < len(x) * num_experts <= _MOST_COUNTS
        )

    def compute(self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        out = torch.empty_like(x)
        # Of ranks it needs to know nothing: ids are those of the experts here, and it leaves out -1.
        self._compute(
            x,
            experts,
            weights,
            gate_up,
            down,
            x.dtype,
            quant_scales=None,
            output=out,
            enable_pdl=False,  # it starts after the end of the kernel before
            use_fused_finalize=False,  # sums in one order
        )
        return out


def find_expert_library(device: torch.device) -> FlashInferExperts | None:
    """Return it where it is installed and knows the device."""
    chip = chip_of(device)
    try:
        if chip is INTERPRETER or not _KINDS & set(chip.kinds) or find_spec(PACKAGE) is None:
            return None
        return FlashInferExperts()
    except Exception as e:  # noqa: BLE001 (its import looks for CUDA and for its own kernels, and fails in many ways)
        log.warning("experts are not computed by %s: it does not load (%s: %s)", PACKAGE, type(e).__name__, e)
        return None
