"""Whole numbers: rounded as the formats at load are, and packed as compressed-tensors packs them."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from diptych.workers.models.rounding import int4, int8
from diptych.workers.quantize.grids import Grid, pack


def test_numbers_are_those_of_the_formats_at_load() -> None:
    weight = torch.randn(12, 256, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    for grid, kind in ((Grid(4, 128, torch.float32), int4), (Grid(8, 0, torch.float32), int8)):
        found, expected = grid.nearest(weight), kind.quantise(weight)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(grid.meaning(*found), kind.dequantise(*expected))


def test_numbers_are_nearest_by_the_scales_that_are_stored() -> None:
    """Scales of bfloat16 are rounded first: no number is nearer to what it stands for than the one that was chosen."""
    grid = Grid(8, 32, torch.bfloat16)
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    numbers, scales = grid.nearest(weight)
    error = (grid.meaning(numbers, scales) - weight).abs()
    assert scales.dtype == torch.bfloat16
    for step in (-1, 1):
        other = (numbers.int() + step).clamp(-127, 127).to(torch.int8)
        assert (error <= (grid.meaning(other, scales) - weight).abs() + 1e-7).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_the_library(bits: int) -> None:
    half = 1 << (bits - 1)
    numbers = torch.randint(-half, half, (5, 40), generator=torch.Generator().manual_seed(bits)).to(torch.int8)
    assert torch.equal(unpack_from_int32(pack(numbers, bits), bits, numbers.shape), numbers)
