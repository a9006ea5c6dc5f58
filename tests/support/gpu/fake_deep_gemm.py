"""DeepGEMM without its kernels: signatures and checks of fp8_gemm_nt and m_grouped_fp8_gemm_nt_contiguous as released
(2.6.1, sm_90), computed plainly."""

import importlib.machinery
from types import ModuleType

import torch
from torch import Tensor

from diptych.kernels.gemm.scaled_gemm import ScaledWeight, scaled_gemm_twin

BLOCK = 128
ALIGNMENT = 128  # of the first row of each group
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


def m_grouped_fp8_gemm_nt_contiguous(  # noqa: PLR0917 (as released)
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    grouped_layout: Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    """Multiply the rows of each group by its weight. a: [M, K] e4m3 and [M, ceil(K / 128)] float32; b: [G, N, K] and
    [G, ceil(N / 128), ceil(K / 128)]; d: [M, N] bfloat16; grouped_layout: [G] int32 where use_psum_layout, the only one
    here: a group's end, from which the next multiple of the alignment on is the next group's. Tiles are written whole:
    NaN stands for what is computed of rows behind a group's end."""
    assert recipe is recipe_a is recipe_b is None and compiled_dims == "nk" and not disable_ue8m0_cast
    assert use_psum_layout and ensure_zero_padding  # the latter is sm_100's
    assert expected_m_for_psum_layout is None or expected_m_for_psum_layout > 0
    (x, x_scales), (weight, scales) = a, b
    (m, k), (num_groups, n, _) = x.shape, weight.shape
    assert weight.shape == (num_groups, n, k) and d.shape == (m, n) and m > 0 and n % 8 == 0
    assert x.dtype == weight.dtype == torch.float8_e4m3fn and d.dtype == torch.bfloat16
    assert x_scales.dtype == scales.dtype == torch.float32
    assert x_scales.shape == (m, -(-k // BLOCK)) and scales.shape == (num_groups, -(-n // BLOCK), -(-k // BLOCK))
    assert scales.stride(0) == scales.shape[1] * scales.shape[2] and 1 in scales.stride()[1:]
    assert weight.stride(0) == n * k and weight.stride(2) == 1
    assert grouped_layout.dtype == torch.int32 and grouped_layout.shape == (num_groups,)
    assert grouped_layout.is_contiguous()
    for of in (x, weight, d):
        assert of.stride(-1) == 1 and of.stride(-2) * of.element_size() % TMA_BYTES == 0
        assert of.data_ptr() % TMA_BYTES == 0
    start = 0
    for group, end in enumerate(grouped_layout.tolist()):
        assert start <= end <= m
        found = scaled_gemm_twin(x[start:end], x_scales[start:end], ScaledWeight(weight, scales)[group], d.dtype)
        d[start:end] = found
        start, first = -(-end // ALIGNMENT) * ALIGNMENT, end
        assert start <= m
        d[first:start] = torch.nan


def make_deep_gemm() -> ModuleType:
    """Make the module, for `sys.modules`."""
    module = ModuleType("deep_gemm")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    module.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]
    module.m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous  # type: ignore[attr-defined]
    module.get_mk_alignment_for_contiguous_layout = lambda: ALIGNMENT  # type: ignore[attr-defined]
    return module
