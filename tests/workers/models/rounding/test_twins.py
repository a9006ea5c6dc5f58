"""Numbers of few bits: what is nearest, and what is left of a weight."""

import pytest
import torch
from torch import Tensor

from diptych.workers.models.rounding import e2m1, float8, mxfp4


def weight(n: int, k: int, seed: int = 0) -> Tensor:
    """Rows of unlike sizes; one is 0."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(n, k, generator=generator) * torch.logspace(-6, 3, n)[:, None]
    made[1] = 0
    return made


def test_four_bits_are_the_nearest_ones_and_ties_go_to_the_even_mantissa() -> None:
    numbers = torch.cat((torch.linspace(-7, 7, 2801), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])))
    found = e2m1.values(e2m1.nearest(numbers))
    distance = (numbers[:, None].abs() - e2m1.VALUES).abs()
    assert torch.equal((numbers.abs() - found.abs()).abs(), distance.amin(dim=1))
    assert (found * numbers >= 0).all()
    assert found[-7:].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert e2m1.pack(torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)).tolist() == [[0x21, 0xF3]]


def test_mxfp4_leaves_what_it_can_hold_and_rounds_the_rest() -> None:
    source = weight(6, 96)
    codes, scales = mxfp4.quantise(source)
    left = mxfp4.dequantise(codes, scales)
    assert torch.equal(mxfp4.dequantise(*mxfp4.quantise(left)), left)
    assert torch.equal(torch.ldexp(torch.ones_like(scales), mxfp4.exponents_of(scales).int() - 127), scales)
    assert not left[1].any()
    assert (left - source).square().sum() < 0.02 * source.square().sum()


@pytest.mark.parametrize("largest", [6.0, 6.9, 7.9])
def test_the_power_of_two_is_the_better_one(largest: float) -> None:
    """What the specification's would cut off at 6 keeps its size where that costs the others less."""
    group = torch.tensor([[largest] * 31 + [0.4]])
    left = mxfp4.dequantise(*mxfp4.quantise(group))
    by_both = [(e2m1.values(e2m1.nearest(group / scale)) * scale - group).square().sum() for scale in (1.0, 2.0)]
    assert (left - group).square().sum() == min(by_both)


def test_rows_need_not_fill_groups() -> None:
    source = weight(3, 40)
    left = mxfp4.dequantise(*mxfp4.quantise(source))
    assert left.shape == source.shape
    assert torch.equal(left[:, :32], mxfp4.dequantise(*mxfp4.quantise(source[:, :32])))


def test_fp8_uses_its_whole_range() -> None:
    source = weight(6, 64)
    numbers, scales = float8.quantise(source)
    assert numbers.float().abs().amax(dim=1)[[0, 2, 3, 4, 5]].tolist() == [448.0] * 5
    left = float8.dequantise(numbers, scales)
    assert not left[1].any()
    assert (left - source).abs().amax(dim=1).le(source.abs().amax(dim=1) / 27).all()  # 3 bits: half of 1 / 16 of 448


@pytest.mark.parametrize("kind", [float8, mxfp4])
def test_a_part_of_longer_rows_takes_their_scales(kind: type) -> None:
    source = weight(4, 128)
    numbers, scales = kind.quantise(source)
    own = scales if kind is float8 else scales[:, 2:]
    part, _ = kind.quantise(source[:, 64:], own)
    assert torch.equal(part.view(torch.uint8), numbers[:, 64:].contiguous().view(torch.uint8))
