"""Packed weights compared with their definition, written out code by code."""

import pytest
import torch

from diptych.kernels.gemm.packed_weight import PackedWeight, compact, pack, zeros_of
from diptych.kernels.gemm.weight_only_gemm import weight_only_gemm

from ...support.quantised import random_codes


def meant(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: list[int]) -> torch.Tensor:
    """codes: [N, K]; groups: of each column. Returns float32 [N, K]."""
    columns = [(codes[:, k].float() - zeros[g].float()) * scales[g].float() for k, g in enumerate(groups)]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "group"), [(96, 32), (64, -1), (40, -1), (160, 64), (48, 16)])
def test_codes_scales_and_zeros(bits: int, k: int, group: int) -> None:
    codes, scales, zeros = random_codes(16, k, bits, group)
    weight = pack(codes, scales, zeros, bits, max(group, 0))
    groups = [0 if group == -1 else i // group for i in range(k)]
    assert weight.shape == (16, k)
    torch.testing.assert_close(weight.unpacked(), meant(codes, scales, zeros, groups))


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_in_the_order_of_groups(bits: int) -> None:
    n, k, group = 8, 128, 32
    codes, scales, zeros = random_codes(n, k, bits, group)
    groups = (torch.arange(k) // group)[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
    order = groups.argsort(stable=True)
    weight = pack(codes[:, order], scales, zeros, bits, group, order.int())
    torch.testing.assert_close(weight.unpacked(), meant(codes, scales, zeros, groups.tolist()))
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(2))
    expected = x @ meant(codes, scales, zeros, groups.tolist()).mT
    torch.testing.assert_close(weight_only_gemm(x, weight), expected, rtol=1e-4, atol=1e-4)


def test_zeros_in_the_middle_are_dropped() -> None:
    codes, scales, _ = random_codes(8, 64, 4, 32)
    weight = pack(codes, scales, torch.full((2, 8), 8), 4, 32)
    assert isinstance(weight, PackedWeight) and weight.zeros is None


def test_one_expert_of_several() -> None:
    parts = [random_codes(8, 64, 4, 32, seed) for seed in range(3)]
    codes, scales, zeros = (torch.stack(part) for part in zip(*parts, strict=True))
    weight = pack(codes, scales, zeros, 4, 32)
    for expert, part in enumerate(parts):
        torch.testing.assert_close(weight[expert].unpacked(), pack(*part, 4, 32).unpacked())


def test_offsets_that_are_zero_points_become_whole_numbers() -> None:
    _, scales, zeros = random_codes(8, 64, 4, 32)
    wide, middles = scales.float(), zeros.to(torch.int16) - 8
    found = zeros_of(wide, -middles * wide, 4)
    assert found is not None and torch.equal(found, middles)
    assert zeros_of(wide, (0.5 - middles) * wide, 4) is None
    assert zeros_of(wide, -20 * wide, 4) is None, "codes of 4 bits and 20 are more than kernels unpack"
    assert zeros_of(wide * 0, wide, 4) is None, "a weight that is its offset"


def test_scales_are_compact_where_that_changes_none() -> None:
    powers = 2.0 ** torch.arange(-20, 20)
    assert compact(powers).dtype == torch.bfloat16
    assert compact(torch.rand(9).half().float()).dtype == torch.float16
    assert compact(torch.tensor([1.0 + 2**-20])).dtype == torch.float32
