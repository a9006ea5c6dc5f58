"""DeepGEMM without its kernels: signature and checks of fp8_gemm_nt as released (2.6.1, sm_90), computed plainly."""

import importlib.machinery
from types import ModuleType

import torch
from torch import Tensor

from diptych.kernels.gemm.scaled_gemm import ScaledWeight, scaled_gemm_twin

BLOCK = 128
TMA_BYTES = 16  # of which addresses and rows of what TMA copies are multiples


def fp8_gemm_nt(  # noqa: PLR0917 (as released)
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """d = a b^T. a: [M, K] e4m3 and [M, ceil(K / 128)] float32; b: [N, K] and [ceil(N / 128), ceil(K / 128)]; d: [M, N]
    bfloat16."""
    assert c is recipe is recipe_a is recipe_b is None and compiled_dims == "nk" and not disable_ue8m0_cast
    (x, x_scales), (weight, scales) = a, b
    (m, k), n = x.shape, len(weight)
    assert weight.shape == (n, k) and d.shape == (m, n) and m > 0
    assert x.dtype == weight.dtype == torch.float8_e4m3fn and d.dtype == torch.bfloat16
    assert x_scales.dtype == scales.dtype == torch.float32
    assert x_scales.shape == (m, -(-k // BLOCK)) and scales.shape == (-(-n // BLOCK), -(-k // BLOCK))
    assert scales.is_contiguous() or scales.mT.is_contiguous()
    for of in (x, weight, d):
        assert of.stride(1) == 1 and of.stride(0) * of.element_size() % TMA_BYTES == 0
        assert of.data_ptr() % TMA_BYTES == 0
    d.copy_(scaled_gemm_twin(x, x_scales, ScaledWeight(weight, scales), d.dtype))


def make_deep_gemm() -> ModuleType:
    """Make the module, for `sys.modules`."""
    module = ModuleType("deep_gemm")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    module.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]
    return module
