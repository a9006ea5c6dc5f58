"""Layouts of checkpoints compared with their definition, written out code by code."""

import pytest
import torch

from diptych.kernels.gemm.packed_weight import PackedWeight, from_awq, from_gptq, pack
from diptych.kernels.gemm.weight_only_gemm import weight_only_gemm

from ...support.quantised import gptq_words, random_codes


def meant(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: list[int]) -> torch.Tensor:
    """codes: [N, K]; groups: of each column. Returns float32 [N, K]."""
    columns = [(codes[:, k].float() - zeros[g].float()) * scales[g].float() for k, g in enumerate(groups)]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "group"), [(96, 32), (64, -1), (40, -1), (160, 64)])
@pytest.mark.parametrize("zeros_are_one_less", [True, False])
def test_gptq(bits: int, k: int, group: int, zeros_are_one_less: bool) -> None:
    n = 16
    codes, scales, zeros = random_codes(n, k, bits, group)
    qweight, qzeros = gptq_words(codes.mT, bits, 0), gptq_words(zeros - int(zeros_are_one_less), bits, 1)
    weight = from_gptq(qweight, qzeros, scales, None, bits, group, zeros_are_one_less)
    groups = [0 if group == -1 else i // group for i in range(k)]
    torch.testing.assert_close(weight.unpacked(), meant(codes, scales, zeros, groups))


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_in_order_of_activation(bits: int) -> None:
    n, k, group = 8, 128, 32
    codes, scales, zeros = random_codes(n, k, bits, group)
    g_idx = (torch.arange(k) // group)[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
    weight = from_gptq(gptq_words(codes.mT, bits, 0), gptq_words(zeros - 1, bits, 1), scales, g_idx.int(), bits, group)
    assert weight.order is not None
    torch.testing.assert_close(weight.unpacked(), meant(codes, scales, zeros, g_idx.tolist()))
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(2))
    expected = x @ meant(codes, scales, zeros, g_idx.tolist()).mT
    torch.testing.assert_close(weight_only_gemm(x, weight), expected, rtol=1e-4, atol=1e-4)


def test_a_share_of_groups_in_order_of_activation_is_refused() -> None:
    codes, scales, zeros = random_codes(8, 64, 4, 32)
    g_idx = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ValueError, match="load it unsharded"):
        from_gptq(gptq_words(codes.mT, 4, 0), gptq_words(zeros, 4, 1), scales, g_idx, 4, 32)


def test_groups_that_do_not_belong_to_the_weight_are_refused() -> None:
    codes, scales, zeros = random_codes(8, 64, 4, 32)
    words = gptq_words(codes.mT, 4, 0), gptq_words(zeros, 4, 1)
    with pytest.raises(ValueError, match="in 1 groups"):
        from_gptq(*words, scales, None, 4, 64)
    with pytest.raises(ValueError, match="multiples of 32"):
        from_gptq(*words, scales, None, 4, 16)


def test_awq() -> None:
    n, k, group = 24, 96, 32
    codes, scales, zeros = random_codes(n, k, 4, group)

    def words(rows: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(rows.shape[0], rows.shape[1] // 8, dtype=torch.int64)
        for column in range(rows.shape[1]):
            nibble = [0, 2, 4, 6, 1, 3, 5, 7].index(column % 8)
            packed[:, column // 8] |= rows[:, column].long() << (4 * nibble)
        return packed.to(torch.int32)

    weight = from_awq(words(codes.mT), words(zeros), scales, group)
    torch.testing.assert_close(weight.unpacked(), meant(codes, scales, zeros, [i // group for i in range(k)]))


def test_zeros_in_the_middle_are_dropped() -> None:
    codes, scales, _ = random_codes(8, 64, 4, 32)
    weight = pack(codes, scales, torch.full((2, 8), 8), 4, 32)
    assert isinstance(weight, PackedWeight) and weight.zeros is None
