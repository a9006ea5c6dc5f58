"""Libraries that multiply fp8 in place of scaled_gemm.py's kernel. They have not run here on a GPU.

torch._scaled_mm     a scale for each row and each output (cuBLASLt, CUTLASS), on sm_89 and later
DeepGEMM             a scale for each 128 of a row and each 128 x 128 of a weight (deepseek-ai/DeepGEMM), on sm_90: on
                     sm_100 it takes scales for powers of two, which those here are not
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from ..common.tuning import INTERPRETER, chip_of
from .scaled_gemm import ScaledLibrary, ScaledWeight

PACKAGE = "deep_gemm"
_ALIGNED = 16  # numbers of fp8: what torch asks of both sizes of a weight
_DEEP_N, _DEEP_K = 64, 128  # what DeepGEMM's first versions ask that sizes of a weight are multiples of
# DeepGEMM compiles anew for other numbers of tiles, of 64 rows or more, and beyond each of these numbers of rows.
_TILE, _LIMITS = 64, (16, 32, 63, 127, 255, 511)

log = logging.getLogger("diptych.worker")


def _is_float8(x: Tensor, weight: ScaledWeight, out_dtype: torch.dtype) -> bool:
    """Return whether it is a product of rows, [M, K] contiguous, of bfloat16 results."""
    is_dense = weight.values.dim() == 2 and x.is_contiguous() and len(x) > 0
    return is_dense and x.dtype == weight.values.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16


class TorchProduct:
    """A ScaledLibrary."""

    name = "torch._scaled_mm"

    def takes(
        self, x: Tensor, x_scales: Tensor, weight: ScaledWeight, out_dtype: torch.dtype, bias: Tensor | None
    ) -> bool:
        has_scale_of_each = not weight.has_blocks and x_scales.shape == x.shape[:1]
        is_aligned = all(size % _ALIGNED == 0 for size in weight.shape)
        is_known = bias is None or (bias.dtype == out_dtype and bias.is_contiguous())
        return _is_float8(x, weight, out_dtype) and has_scale_of_each and is_aligned and is_known

    def multiply(self, x: Tensor, x_scales: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
        scales = x_scales[:, None], weight.scales[None]
        # Sums in float32 throughout (use_fast_accum is false), as precise as our kernel's or more.
        multiply: Callable[..., Tensor] = torch._scaled_mm  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        return multiply(x, weight.values.T, *scales, bias=bias, out_dtype=torch.bfloat16)

    def compiled_rows(self, most: int) -> Sequence[int]:
        return ()


class DeepGemm:
    """A ScaledLibrary. Raises what its import does, and AttributeError where it was built without these products."""

    name = "DeepGEMM"

    def __init__(self) -> None:
        self._multiply: Callable[..., None] = import_module(PACKAGE).fp8_gemm_nt

    def takes(
        self, x: Tensor, x_scales: Tensor, weight: ScaledWeight, out_dtype: torch.dtype, bias: Tensor | None
    ) -> bool:
        n, k = weight.shape[-2:]
        is_aligned = n % _DEEP_N == 0 and k % _DEEP_K == 0
        return _is_float8(x, weight, out_dtype) and weight.has_blocks and bias is None and is_aligned

    def multiply(self, x: Tensor, x_scales: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
        out = torch.empty(len(x), weight.shape[0], dtype=torch.bfloat16, device=x.device)
        self._multiply((x, x_scales), (weight.values, weight.scales), out)
        return out

    def compiled_rows(self, most: int) -> Sequence[int]:
        return [*(limit for limit in _LIMITS if limit < most), *range(_TILE, most + _TILE, _TILE)]


def find_libraries(device: torch.device) -> list[ScaledLibrary]:
    """Return those that are installed and know the device; none where it multiplies no fp8, or is not of NVIDIA."""
    chip = chip_of(device)
    if chip is INTERPRETER or not chip.has_fp8_products:
        return []
    found: list[ScaledLibrary] = [TorchProduct()]
    try:
        if "sm_90" in chip.kinds and find_spec(PACKAGE) is not None:
            found.append(DeepGemm())
    except Exception as e:  # noqa: BLE001 (its import looks for CUDA's compiler, and asserts that it is there)
        log.warning("fp8 is not multiplied by %s: it does not load (%s: %s)", PACKAGE, type(e).__name__, e)
    return found
