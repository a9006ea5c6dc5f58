import pytest
import torch

from diptych.kernels.moe.expert_rows import (
    PaddedRows,
    gate_rows_triton,
    gate_rows_twin,
    num_padded_rows,
    pad_rows_triton,
    pad_rows_twin,
)
from diptych.kernels.moe.moe_combine import moe_combine_triton, moe_combine_twin
from diptych.kernels.moe.moe_sort import ExpertOrder, moe_sort_triton, moe_sort_twin

from .common import DEVICE, DOT_DTYPES, DTYPES, Launch, assert_near, meta, normal
from .moe import random_experts
from .quantise_rows import FP8, HOPPER, assert_near_codes

ALIGNMENT = 128


def order_of_meta(num_tokens: int) -> ExpertOrder:
    return moe_sort_triton(meta(num_tokens, 8, dtype=torch.int32), 256, ALIGNMENT)


def pad_of_meta() -> None:
    pad_rows_triton(meta(4096, 7168, dtype=FP8), meta(4096, 56, dtype=torch.float32), order_of_meta(4096), ALIGNMENT)


def gate_of_meta() -> None:
    num_rows = num_padded_rows(4096 * 8, 256, ALIGNMENT)
    gate_rows_triton(meta(num_rows, 4096), meta(4096 * 8, dtype=torch.int32), FP8)


def combine_of_meta() -> None:
    pairs, rows = (meta(64, 8, dtype=of) for of in (torch.float32, torch.int32)), meta(512, dtype=torch.int32)
    moe_combine_triton(meta(2048, 4096), *pairs, 256, 0, None, rows)


LAUNCHES = [
    Launch("padded", pad_of_meta, HOPPER),
    Launch("gated", gate_of_meta, HOPPER),
    Launch("combined", combine_of_meta, HOPPER, is_gated=False),
]


def padded(num_tokens: int, top_k: int, num_experts: int, k: int, alignment: int) -> tuple[PaddedRows, PaddedRows]:
    """By the kernel, and by its twin. Some pairs are of experts that are not here."""
    experts = random_experts(num_tokens, top_k, num_experts + 2) - 1
    order = moe_sort_twin(experts, num_experts, alignment)
    assert int(order.starts[-1]) < experts.numel()
    x = (normal(num_tokens, k, dtype=torch.float32) * 30).to(FP8)
    scales = normal(num_tokens, k // 128, dtype=torch.float32, seed=1)
    return pad_rows_triton(x, scales, order, alignment), pad_rows_twin(x, scales, order, alignment)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "k", "alignment"),
    [(1, 2, 5, 128, 16), (40, 3, 6, 384, 16), (7, 2, 32, 256, 128), (30, 1, 1, 128, 8), (3, 2, 4, 8320, 64)],
)
def test_pad_rows(num_tokens: int, top_k: int, num_experts: int, k: int, alignment: int) -> None:
    found, due = padded(num_tokens, top_k, num_experts, k, alignment)
    assert torch.equal(found.rows, due.rows) and torch.equal(found.ends, due.ends)
    here = due.rows[due.rows >= 0].long()
    assert len(here.unique()) == len(here) < due.rows.numel() and int(due.ends[-1]) <= len(found.values)
    assert torch.equal(found.values.view(torch.uint8)[here], due.values.view(torch.uint8)[here])
    assert torch.equal(found.scales[here], due.scales[here])
    assert found.scales.stride() == due.scales.stride() == (1, len(found.values))
    assert len(found.values) % alignment == 0


def test_rows_of_no_pair_are_not_written() -> None:
    found, due = padded(40, 3, 6, 384, 16)
    is_left = torch.ones(len(found.values), dtype=torch.bool, device=DEVICE)
    is_left[due.rows[due.rows >= 0].long()] = False
    assert is_left.any()
    assert bool((found.scales[is_left].isnan()).all())  # as new memory is, in these tests


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("dim", [128, 384, 1280])
def test_gate_rows(dim: int, dtype: torch.dtype) -> None:
    rows = torch.tensor([3, -1, 0, 9, 7, -1], dtype=torch.int32, device=DEVICE)
    gate_up = normal(12, 2 * dim, dtype=torch.float32)
    if DEVICE == "cpu":  # the interpreter rounds to fp8 inexactly: products are what fp8 can represent, scales 1
        gate_up[:, :dim] = 32.0
        gate_up[:, dim::128] = 16.0
        gate_up[:, dim:] = (gate_up[:, dim:].clamp(-14, 14) * 32).to(FP8).float() / 32
    gate_up = gate_up.to(dtype)
    gate_up[9, : dim + 128] = 0  # of zeros alone
    gate_up[[1, 2, 4, 5, 6, 8, 10, 11]] = torch.nan  # of no pair
    found, scales = gate_rows_triton(gate_up, rows, FP8)
    due, due_scales = gate_rows_twin(gate_up, rows, FP8)
    here = rows[rows >= 0].long()
    torch.testing.assert_close(scales[here], due_scales[here])
    assert_near_codes(found[here], due[here])
    assert not scales[9, 0] and scales.stride() == due_scales.stride() == (1, 12)
    assert bool(scales[[1, 11]].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_rows_that_are_anywhere(dtype: torch.dtype) -> None:
    rows = torch.tensor([4, 0, -1, 7, 6, -1, 2, 5], dtype=torch.int32, device=DEVICE)
    y, weights = normal(9, 1100, dtype=dtype), normal(4, 2, dtype=torch.float32, seed=1)
    y[[1, 3, 8]] = torch.nan
    experts = torch.full((4, 2), -1, dtype=torch.int32, device=DEVICE)  # not looked at
    shared = normal(4, 1103, dtype=dtype, seed=2)[:, 3:]
    for given in (None, shared):
        found = moe_combine_triton(y, weights, experts, 2, 0, given, rows)
        assert_near(found, moe_combine_twin(y, weights, experts, 2, 0, given, rows))
    assert not found[1].isnan().any()
