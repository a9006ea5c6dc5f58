from dataclasses import replace

import pytest
import torch

from diptych.kernels.gemm.packed_weight import Coding, PackedWeight, pack
from diptych.kernels.gemm.split_k import num_splits, workspace_of
from diptych.kernels.gemm.weight_only_gemm import weight_only_gemm_triton, weight_only_gemm_twin
from diptych.workers.models.rounding import e2m1

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


def launch_of(coding: Coding, rows: int, group: int, *, has_offsets: bool = False) -> None:
    weight = replace(
        of_meta(8 if coding == Coding.E4M3 else 4, group, False, False, 4096, 4096),
        coding=coding,
        table=meta(16, dtype=torch.float32) if coding == Coding.TABLE else None,
    )
    scales = weight.scales
    weight = replace(weight, codes=weight.codes.view(torch.uint8), offsets=scales if has_offsets else None)
    weight_only_gemm_triton(meta(rows, 4096), weight)


LAUNCHES = [
    Launch("int4, 16 rows", lambda: launch(16, 4, has_zeros=True)),
    Launch("int4, 16 rows, in order of activation", lambda: launch(16, 4, has_order=True), is_gated=False),
    Launch("int4, 32 rows", lambda: launch(32, 4), is_gated=False),
    Launch("int4, 64 rows", lambda: launch(64, 4), is_gated=False),
    Launch("int4, 512 rows", lambda: launch(512, 4), is_gated=False),
    Launch("int4, groups of 32, 512 rows", lambda: launch(512, 4, group=32), is_gated=False),
    Launch("int8, 16 rows", lambda: launch(16, 8, group=0)),
    Launch("int8, 512 rows", lambda: launch(512, 8), is_gated=False),
    Launch("mxfp4, 16 rows", lambda: launch_of(Coding.E2M1, 16, 32)),
    Launch("mxfp4, 512 rows", lambda: launch_of(Coding.E2M1, 512, 32), is_gated=False),
    Launch("nf4, 16 rows", lambda: launch_of(Coding.TABLE, 16, 64), is_gated=False),
    Launch("nf4, 512 rows", lambda: launch_of(Coding.TABLE, 512, 64), is_gated=False),
    Launch("e4m3 unpacked, 16 rows", lambda: launch_of(Coding.E4M3, 16, 128), is_gated=False),
    Launch("e4m3 unpacked, 512 rows", lambda: launch_of(Coding.E4M3, 512, 128), is_gated=False),
    Launch("int4 with offsets, 16 rows", lambda: launch_of(Coding.WHOLE, 16, 32, has_offsets=True), is_gated=False),
    Launch("int4 with offsets, 512 rows", lambda: launch_of(Coding.WHOLE, 512, 32, has_offsets=True), is_gated=False),
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
    x = normal(7, 2048, dtype=torch.float32)
    assert num_splits(1, 2048 // 128, torch.device(DEVICE)) > 1
    first = weight_only_gemm_triton(x, weight)
    assert not workspace_of(x, 16 * 64).counters.any()
    assert torch.equal(weight_only_gemm_triton(x, weight), first)
    # A row's result does not depend on the number of other rows.
    assert torch.equal(weight_only_gemm_triton(x[3:4], weight), first[3:4])


NF4 = torch.linspace(-1.0, 1.0, 16)


def of_numbers(coding: Coding, n: int, k: int, group: int, *, has_offsets: bool) -> PackedWeight:
    """group: 0 for one."""
    bits = 8 if coding == Coding.E4M3 else 4
    codes, scales, _ = random_codes(n, k, bits, group or -1)
    if coding == Coding.E4M3:
        codes = torch.where(codes & 127 == 127, 0, codes)
    offsets = torch.randn(scales.shape, generator=torch.Generator().manual_seed(4)).to(DEVICE) if has_offsets else None
    table = NF4.to(DEVICE) if coding == Coding.TABLE else None
    return pack(
        codes.to(DEVICE),
        scales.float().to(DEVICE),
        None,
        bits,
        group,
        offsets=offsets,
        coding=coding,
        table=table,
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("coding", "rows", "n", "k", "group", "has_offsets"),
    [
        (Coding.E2M1, 3, 40, 192, 32, False),
        (Coding.E2M1, 70, 33, 160, 16, False),
        (Coding.TABLE, 5, 24, 256, 64, False),
        (Coding.E4M3, 2, 24, 256, 128, False),
        (Coding.E4M3, 20, 40, 200, 0, False),
        (Coding.E4M3, 4, 24, 96, 40, False),
        (Coding.WHOLE, 6, 24, 320, 32, True),
        (Coding.WHOLE, 18, 24, 100, 0, True),
    ],
)
def test_floats_and_offsets(
    coding: Coding, rows: int, n: int, k: int, group: int, has_offsets: bool, dtype: torch.dtype
) -> None:
    weight = of_numbers(coding, n, k, group, has_offsets=has_offsets)
    x = normal(rows, k, dtype=dtype)
    found, expected = weight_only_gemm_triton(x, weight), weight_only_gemm_twin(x, weight)
    largest = expected.abs().amax()
    assert_near(found / largest, expected / largest)


@pytest.mark.parametrize("coding", [Coding.E2M1, Coding.E4M3, Coding.TABLE])
def test_each_code_has_its_number(coding: Coding) -> None:
    """One input a code: the products are the numbers."""
    bits = 8 if coding == Coding.E4M3 else 4
    codes = torch.arange(1 << bits, dtype=torch.uint8, device=DEVICE)
    codes = torch.where(codes & 127 == 127, 0, codes) if bits == 8 else codes
    table = NF4.to(DEVICE) if coding == Coding.TABLE else None
    ones = torch.ones(1, 1, device=DEVICE)
    weight = pack(codes[None], ones, None, bits, 0, coding=coding, table=table)
    found = weight_only_gemm_triton(torch.eye(len(codes), device=DEVICE), weight)[:, 0]
    match coding:
        case Coding.E4M3:
            expected = codes.view(torch.float8_e4m3fn).float()
        case Coding.TABLE:
            expected = NF4.to(DEVICE)
        case _:
            expected = e2m1.values(codes)
    assert torch.equal(found, expected)
