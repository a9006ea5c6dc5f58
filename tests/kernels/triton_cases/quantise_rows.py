import pytest
import torch

from diptych.kernels.gemm.quantise_rows import (
    limit_of,
    quantise_rows_by,
    quantise_rows_by_triton,
    quantise_rows_triton,
    quantise_rows_twin,
)

from .common import DEVICE, DTYPES, Launch, meta, normal

FP8 = torch.float8_e4m3fn
HOPPER = ("sm_90", "sm_100")  # and later; older chips have no fp8 of this kind, and AMD's is different


def launch(dtype: torch.dtype, blocks: bool = False) -> None:
    quantise_rows_triton(meta(64, 4096), dtype, blocks)


def launch_given() -> None:
    quantise_rows_by_triton(meta(64, 4096), meta(1, dtype=torch.float32), FP8)


LAUNCHES = [
    Launch("fp8", lambda: launch(FP8), HOPPER, is_gated=False),
    Launch("fp8 of blocks", lambda: launch(FP8, True), HOPPER),
    Launch("AMD's fp8 of blocks", lambda: launch(torch.float8_e4m3fnuz, True), ("gfx942",)),
    Launch("int8", lambda: launch(torch.int8), is_gated=False),
    Launch("fp8, given", launch_given, HOPPER, is_gated=False),
]


def assert_near_codes(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for places where a division that was rounded otherwise fell on the other side of a half."""
    # Bits of floats of a sign count as their values do.
    apart = (found.view(torch.int8).int() - expected.view(torch.int8).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01


def rows_of(rows: int, k: int, to: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """[rows, k], strided; for the interpreter, whose rounding to fp8 is inexact: values that fp8 can represent."""
    wide = normal(rows, k + 9, dtype=dtype) * 3
    if to == FP8 and DEVICE == "cpu":
        wide = (wide * 30).to(FP8).to(dtype)
        wide[:, 4::128] = 448.0  # so that scales of rows and of blocks are 1
    return wide[:, 4:-5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", [FP8, torch.int8])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(1, 128), (3, 200), (2, 2200)])
def test_quantise_rows(rows: int, k: int, blocks: bool, to: torch.dtype, dtype: torch.dtype) -> None:
    x = rows_of(rows, k, to, dtype) / 8
    x[-1, :128] = 0
    values, scales = quantise_rows_triton(x, to, blocks)
    expected_values, expected_scales = quantise_rows_twin(x, to, blocks)
    torch.testing.assert_close(scales, expected_scales)
    assert values.dtype == to and values.is_contiguous()
    assert_near_codes(values, expected_values)


@pytest.mark.parametrize("to", [FP8, torch.int8])
def test_a_given_scale_cuts_what_is_beyond_it(to: torch.dtype) -> None:
    x, scale = rows_of(3, 77, to, torch.float32), torch.tensor([0.0625], device=DEVICE)
    x[1, 7] = 500.0
    found = quantise_rows_by_triton(x, scale, to)
    assert_near_codes(found, quantise_rows_by(x.cpu(), scale.cpu(), to).to(DEVICE))
    is_beyond = x / scale > limit_of(to)
    assert is_beyond.any() and bool((found.float()[is_beyond] == limit_of(to)).all())
