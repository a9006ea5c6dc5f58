"""Vectors of 8-bit numbers and their scales, against the numbers that they were made of."""

import pytest
import torch

from diptych.kernels.kv.kv_scales import LARGEST, TINY, dequantise, largest_of, quantise

ROUNDING = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}  # of the largest magnitude


@pytest.mark.parametrize("dtype", LARGEST)
def test_numbers_come_back_within_a_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 20, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 4)[:, None, None]
    stored, scales = quantise(x, dtype)
    assert stored.dtype == dtype and scales.shape == (7, 3)
    largest = x.abs().amax(-1, keepdim=True)
    assert bool(((dequantise(stored, scales) - x).abs() <= largest * ROUNDING[dtype] * (1.001 + 2**-7)).all())
    assert torch.equal(scales.bfloat16().float(), scales) and bool((scales * LARGEST[dtype] >= largest[..., 0]).all())
    assert bool((scales * LARGEST[dtype] <= largest[..., 0] * (1 + 2**-7)).all())


def test_what_is_too_small_is_zero() -> None:
    stored, scales = quantise(torch.tensor([[0.0, 0.0], [TINY / 2, 0.0], [TINY * 2, 0.0]]), torch.int8)
    assert stored.tolist()[:2] == [[0, 0], [0, 0]] and stored[2, 0] >= 126 and stored[2, 1] == 0
    assert scales.tolist()[:2] == [0.0, 0.0] and scales[2] > 0


def test_a_cache_has_scales_where_its_numbers_need_them() -> None:
    shape = (3, 2, 4, 2, 8)
    assert largest_of(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:-1])) == 127.0
    assert largest_of(torch.zeros(shape), None) == 0.0
    with pytest.raises(AssertionError):
        largest_of(torch.zeros(shape, dtype=torch.int8), None)
    with pytest.raises(AssertionError):
        largest_of(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape))
