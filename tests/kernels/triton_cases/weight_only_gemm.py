import pytest
import torch

from diptych.kernels.gemm.packed_weight import PackedWeight, pack
from diptych.kernels.gemm.split_k import num_splits
from diptych.kernels.gemm.weight_only_gemm import static_workspace, weight_only_gemm_triton, weight_only_gemm_twin

from ...support.quantised import random_codes
from .common import DEVICE, DOT_DTYPES, Launch, assert_near, meta, normal


def of_meta(bits: int, group: int, has_zeros: bool, has_order: bool, n: int, k: int) -> PackedWeight:
    groups = k // group if group else 1
    return PackedWeight(
        meta(n, k * bits // 8, dtype=torch.uint8 if bits == 4 else torch.int8),
        meta(groups, n, dtype=torch.float16),
        meta(groups, n, dtype=torch.int16) if has_zeros else None,
        meta(k, dtype=torch.int32) if has_order else None,
        bits,
        group,
        k,
    )


def launch(rows: int, bits: int, group: int = 128, has_zeros: bool = False, has_order: bool = False) -> None:
    weight_only_gemm_triton(meta(rows, 4096), of_meta(bits, group, has_zeros, has_order, 4096, 4096))


LAUNCHES = [
    Launch("int4, 16 rows", lambda: launch(16, 4, has_zeros=True)),
    Launch("int4, 16 rows, in order of activation", lambda: launch(16, 4, has_order=True), is_gated=False),
    Launch("int4, 32 rows", lambda: launch(32, 4), is_gated=False),
    Launch("int4, 64 rows", lambda: launch(64, 4), is_gated=False),
    Launch("int4, 512 rows", lambda: launch(512, 4), is_gated=False),
    Launch("int4, groups of 32, 512 rows", lambda: launch(512, 4, group=32), is_gated=False),
    Launch("int8, 16 rows", lambda: launch(16, 8, group=0)),
    Launch("int8, 512 rows", lambda: launch(512, 8), is_gated=False),
]


def weight_of(n: int, k: int, bits: int, group: int, has_zeros: bool, has_order: bool) -> PackedWeight:
    codes, scales, zeros = random_codes(n, k, bits, group)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(3)).int().to(DEVICE) if has_order else None
    return pack(
        codes.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE) if has_zeros else None, bits, max(group, 0), order
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k", "bits", "group", "has_zeros", "has_order"),
    [
        (1, 24, 96, 4, 32, True, False),
        (3, 70, 160, 4, -1, False, False),
        (16, 33, 1100, 4, -1, True, False),
        (17, 24, 256, 4, 128, True, True),
        (5, 24, 256, 4, 64, False, True),
        (2, 20, 70, 8, -1, True, False),
        (4, 40, 512, 8, 32, False, False),
        (130, 150, 192, 4, 64, True, False),
    ],
)
def test_weight_only_gemm(
    rows: int, n: int, k: int, bits: int, group: int, has_zeros: bool, has_order: bool, dtype: torch.dtype
) -> None:
    weight = weight_of(n, k, bits, group, has_zeros, has_order)
    x = normal(rows, k + 8, dtype=dtype)[:, 3:-5]
    bias = normal(n, dtype=dtype, seed=1) if has_zeros else None
    found = weight_only_gemm_triton(x, weight, bias)
    expected = weight_only_gemm_twin(x, weight, bias)
    largest = expected.abs().amax()
    assert_near(found / largest, expected / largest)


def test_splits_leave_their_workspace_as_it_was_and_give_the_same_again() -> None:
    weight = weight_of(48, 2048, 4, 128, True, False)
    x, workspace = normal(7, 2048, dtype=torch.float32), static_workspace(torch.device(DEVICE))
    assert num_splits(1, 2048 // 128, torch.device(DEVICE)) > 1
    first = weight_only_gemm_triton(x, weight, None, workspace)
    assert not workspace.counters.any()
    assert torch.equal(weight_only_gemm_triton(x, weight, None, workspace), first)
    # A row's result does not depend on the number of other rows.
    assert torch.equal(weight_only_gemm_triton(x[3:4], weight, None, workspace), first[3:4])
