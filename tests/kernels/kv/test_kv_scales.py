"""Vectors of 8-bit and 4-bit numbers and their scales, against the numbers that they were made of."""

import pytest
import torch

from diptych.kernels.kv.kv_scales import LARGEST, TINY, dequantise, hadamard, largest_of, quantise, transform_size

# Of the largest magnitude.
ROUNDING = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.uint8: 1 / 15}


@pytest.mark.parametrize("dtype", LARGEST)
def test_numbers_come_back_within_a_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 20, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 4)[:, None, None]
    stored, scales = quantise(x, dtype)
    assert stored.dtype == dtype and scales.shape == (7, 3)
    found = dequantise(stored, scales)
    if dtype == torch.uint8:  # of which the transform is what is rounded
        assert stored.shape == (7, 3, 10)
        x, found = hadamard(x), hadamard(found)
    largest = x.abs().amax(-1, keepdim=True)
    assert bool(((found - x).abs() <= largest * ROUNDING[dtype] * (1.001 + 2**-7)).all())
    assert torch.equal(scales.bfloat16().float(), scales) and bool((scales * LARGEST[dtype] >= largest[..., 0]).all())
    assert bool((scales * LARGEST[dtype] <= largest[..., 0] * (1 + 2**-7)).all())


@pytest.mark.parametrize("dim", [2, 20, 80, 96, 128, 256])
def test_hadamard(dim: int) -> None:
    """Against its matrix; each half of a vector alone; twice, it is its size times what was given."""
    size = transform_size(dim)
    place = range(dim)
    matrix = torch.tensor(
        [[(-1) ** (i & j & size - 1).bit_count() * (i // size == j // size) for j in place] for i in place]
    )
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(x), x @ matrix.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x)) / size, x, rtol=1e-5, atol=1e-5)
    first, _ = hadamard(torch.cat((x[:, : dim // 2], torch.zeros(3, dim // 2)), dim=1)).chunk(2, dim=1)
    assert torch.equal(first, hadamard(x)[:, : dim // 2])


def test_codes_of_4_bits() -> None:
    """Byte i has number i in its low bits, and that in the same place of the other half; code c is 2 c - 15."""
    numbers = hadamard(torch.tensor([[15.0, -15.0, 1.0, -1.0, 7.0, 6.9, 0.0, -7.0]])) / 4
    stored, scales = quantise(numbers, torch.uint8)
    assert scales.item() == 1.0
    assert stored.tolist() == [[0xBF, 0xB0, 0x88, 0x47]]


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
