import pytest
import torch

from diptych.kernels.gemm.quantise_rows import quantise_rows_twin
from diptych.kernels.gemm.scaled_gemm import ScaledWeight, scaled_gemm_triton, scaled_gemm_twin
from diptych.kernels.gemm.split_k import workspace_of

from ...support.quantised import random_scaled
from .common import DEVICE, Launch, assert_near, dot_tolerance, meta, normal
from .quantise_rows import FP8, HOPPER


def launch(rows: int, dtype: torch.dtype, blocks: bool = False, n: int = 4096) -> None:
    k = 4096
    scales = (n // 128, k // 128) if blocks else (n,)
    weight = ScaledWeight(meta(n, k, dtype=dtype), meta(*scales, dtype=torch.float32))
    x_scales = meta(*((rows, k // 128) if blocks else (rows,)), dtype=torch.float32)
    scaled_gemm_triton(meta(rows, k, dtype=dtype), x_scales, weight, torch.bfloat16)


LAUNCHES = [
    Launch("fp8, 16 rows", lambda: launch(16, FP8), HOPPER, is_gated=False),
    Launch("fp8 of blocks, 16 rows", lambda: launch(16, FP8, True), HOPPER, is_gated=False),
    Launch("fp8 of blocks, 64 rows", lambda: launch(64, FP8, True), HOPPER, is_gated=False),
    Launch("fp8, 512 rows", lambda: launch(512, FP8), HOPPER, is_gated=False),
    Launch("fp8 of blocks, 512 rows", lambda: launch(512, FP8, True), HOPPER),
    Launch("AMD's fp8 of blocks, 512 rows", lambda: launch(512, torch.float8_e4m3fnuz, True), ("gfx942",)),
    Launch("int8, 16 rows", lambda: launch(16, torch.int8), is_gated=False),
    Launch("int8, 512 rows", lambda: launch(512, torch.int8)),
]


def weight_of(n: int, k: int, dtype: torch.dtype, blocks: bool) -> ScaledWeight:
    values, scales = random_scaled((n, k), dtype, blocks)
    return ScaledWeight(values.to(DEVICE), scales.to(DEVICE))


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "n", "k", "blocks", "has_bias"),
    [
        (1, 24, 96, False, True),
        (3, 70, 1300, False, False),
        (16, 150, 1100, True, False),
        (40, 24, 256, True, True),
        (130, 150, 300, True, False),
        (70, 33, 300, False, True),
    ],
)
def test_scaled_gemm(
    rows: int, n: int, k: int, blocks: bool, has_bias: bool, out_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    weight = weight_of(n, k, dtype, blocks)
    x, x_scales = quantise_rows_twin(normal(rows, k, dtype=torch.float32), dtype, blocks)
    wide = torch.zeros(rows, k + 16, dtype=dtype, device=DEVICE)
    wide[:, :k] = x
    bias = normal(n, dtype=out_dtype, seed=1) if has_bias else None
    found = scaled_gemm_triton(wide[:, :k], x_scales, weight, out_dtype, bias)
    expected = scaled_gemm_twin(x, x_scales, weight, out_dtype, bias)
    assert found.dtype == out_dtype
    assert_near(found / expected.abs().amax(), expected / expected.abs().amax(), dot_tolerance(dtype))


@pytest.mark.parametrize("rows", [5, 20])
def test_a_scale_of_the_whole_tensor(rows: int) -> None:
    weight = weight_of(40, 200, FP8, False)
    x, _ = quantise_rows_twin(normal(rows, 200, dtype=torch.float32), FP8)
    scale = torch.tensor([0.5], device=DEVICE)
    expected = scaled_gemm_twin(x, scale, weight, torch.float32)
    most = expected.abs().amax()
    assert_near(scaled_gemm_triton(x, scale, weight, torch.float32) / most, expected / most, dot_tolerance(FP8))


def test_splits_do_not_depend_on_the_rows_beside() -> None:
    weight = weight_of(60, 2048, FP8, True)
    x, x_scales = quantise_rows_twin(normal(9, 2048, dtype=torch.float32), FP8, True)
    first = scaled_gemm_triton(x, x_scales, weight, torch.float32)
    alone = scaled_gemm_triton(x[4:5], x_scales[4:5], weight, torch.float32)
    assert torch.equal(first[4:5], alone) and not workspace_of(x_scales, 16 * 64).counters.any()
