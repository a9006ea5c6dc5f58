from dataclasses import replace

import pytest
import torch

from diptych.kernels.common.tuning import CHIPS
from diptych.kernels.elementwise.gate_mul import GELU, SILU, SILU_UP_FIRST, SWIGLU_CLAMPED
from diptych.kernels.gemm.linear import Weight
from diptych.kernels.gemm.packed_weight import Coding, PackedWeight, pack
from diptych.kernels.gemm.quantise_rows import quantise_rows_twin
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.kernels.moe import hopper_experts
from diptych.kernels.moe.expert_counts import count_experts_triton, count_experts_twin
from diptych.kernels.moe.grouped_gemm import grouped_product_triton, grouped_product_twin
from diptych.kernels.moe.moe_combine import moe_combine_triton, moe_combine_twin
from diptych.kernels.moe.moe_routing import Routing, moe_routing_triton, moe_routing_twin
from diptych.kernels.moe.moe_sort import ExpertOrder, moe_sort_triton, moe_sort_twin

from ...support.gpu.gluon_emulator import ORDERS, Emulated
from ...support.quantised import random_codes, random_scaled
from .common import DEVICE, DOT_DTYPES, DTYPES, Launch, assert_near, dot_tolerance, meta, normal
from .quantise_rows import FP8, HOPPER

NUM_EXPERTS = 64
V3 = Routing(8, sigmoid=True, scale=2.5, num_groups=8, top_groups=4, group_by_two=True)


def order_of_meta(rows: int, block_m: int) -> ExpertOrder:
    return moe_sort_triton(meta(rows, 8, dtype=torch.int32), NUM_EXPERTS, block_m)


def wide(n: int, k: int) -> Weight:
    return meta(NUM_EXPERTS, n, k)


def fp8_of_blocks(n: int, k: int, dtype: torch.dtype = FP8) -> Weight:
    scales = meta(NUM_EXPERTS, n // 128, k // 128, dtype=torch.float32)
    return ScaledWeight(meta(NUM_EXPERTS, n, k, dtype=dtype), scales)


def int4(n: int, k: int) -> Weight:
    scales = meta(NUM_EXPERTS, k // 128, n, dtype=torch.float16)
    return PackedWeight(meta(NUM_EXPERTS, n, k // 2, dtype=torch.uint8), scales, None, None, 4, 128, k)


def mxfp4(n: int, k: int) -> PackedWeight:
    scales = meta(NUM_EXPERTS, k // 32, n, dtype=torch.bfloat16)
    codes = meta(NUM_EXPERTS, n, k // 2, dtype=torch.uint8)
    return PackedWeight(codes, scales, None, None, 4, 32, k, None, Coding.E2M1)


def launch(rows: int, block_m: int, gate_up: Weight, down: Weight) -> None:
    order = order_of_meta(rows, block_m)
    for weight, num, gate in ((gate_up, rows, SILU), (down, rows * 8, None)):
        if isinstance(weight, ScaledWeight):
            x = meta(num, 2048, dtype=weight.values.dtype)
            scales = meta(num, 16, dtype=torch.float32)
            grouped_product_triton(x, weight, order, torch.bfloat16, scales, gate=gate)
        else:
            grouped_product_triton(meta(num, 2048), weight, order, torch.bfloat16, gate=gate)


def launch_of_float32(rows: int, block_m: int) -> None:
    weight, order = meta(NUM_EXPERTS, 512, 256, dtype=torch.float32), order_of_meta(rows, block_m)
    x = meta(rows, 256, dtype=torch.float32)
    bias = meta(NUM_EXPERTS, 512, dtype=torch.float32)
    grouped_product_triton(x, weight, order, torch.float32, None, bias, SWIGLU_CLAMPED)


def launch_of_gptoss() -> None:
    order, experts = order_of_meta(32, 16), NUM_EXPERTS
    grouped_product_triton(
        meta(32, 2048), wide(4096, 2048), order, torch.bfloat16, None, meta(experts, 4096), SWIGLU_CLAMPED
    )
    grouped_product_triton(meta(256, 2048), wide(2048, 2048), order, torch.bfloat16, None, meta(experts, 2048))


def launch_of_mxfp4(rows: int, block_m: int) -> None:
    order, biases = order_of_meta(rows, block_m), (meta(NUM_EXPERTS, 4096), meta(NUM_EXPERTS, 2048))
    x, gate_up = meta(rows, 2048), mxfp4(4096, 2048)
    grouped_product_triton(x, gate_up, order, torch.bfloat16, None, biases[0], SWIGLU_CLAMPED)
    act = meta(rows * 8, 2048)
    grouped_product_triton(act, mxfp4(2048, 2048), order, torch.bfloat16, None, biases[1])


def both(weight: object, rows: int, block_m: int) -> None:
    launch(rows, block_m, weight(4096, 2048), weight(2048, 2048))  # type: ignore[operator]


def launch_on_hopper(rows: int, stages: int, gates: tuple[int | None, ...]) -> None:
    order = order_of_meta(rows, hopper_experts.BLOCK_M)
    for gate in gates:
        x, weight = meta(rows * (8 if gate is None else 1), 2048), wide(4096 if gate == SILU else 2048, 2048)
        assert hopper_experts.takes(x, weight, order, gate, stages)
        hopper_experts.launch(x, weight, order, gate, meta(rows * 8, 2048), stages)


def combine_of_meta() -> None:
    pairs = meta(64, 8, dtype=torch.float32), meta(64, 8, dtype=torch.int32)
    moe_combine_triton(meta(512, 4096), *pairs, NUM_EXPERTS, 0, meta(64, 4096))


def sort_of_meta(rows: int, num_experts: int) -> None:
    moe_sort_triton(meta(rows, 8, dtype=torch.int32), num_experts, 16)


def count_of_meta() -> None:
    experts, slots = meta(64, 8, dtype=torch.int32), meta(64, dtype=torch.int64)
    count_experts_triton(experts, slots, meta(NUM_EXPERTS, dtype=torch.int64))


LAUNCHES = [
    Launch("count", count_of_meta),
    Launch("256 experts in groups", lambda: moe_routing_triton(meta(64, 256), V3, meta(256, dtype=torch.float32))),
    Launch("combine", combine_of_meta),
    Launch("256 experts, sorted", lambda: sort_of_meta(64, 256), is_gated=False),
    Launch("256 experts, many rows sorted", lambda: sort_of_meta(4096, 256), is_gated=False),
    Launch("16 bits, few rows", lambda: both(wide, 32, 16)),
    Launch("16 bits, few rows, biased and clamped", launch_of_gptoss),
    Launch("32 bits, few rows", lambda: launch_of_float32(32, 16), is_gated=False),
    Launch("32 bits, 64 rows a tile", lambda: launch_of_float32(512, 64), spilled_bytes=4, is_gated=False),
    Launch("32 bits, many rows", lambda: launch_of_float32(4096, 128)),
    Launch("16 bits, 64 rows a tile", lambda: both(wide, 512, 64), is_gated=False),
    Launch("16 bits, many rows", lambda: both(wide, 4096, 128), is_gated=False),
    Launch("first in Gluon, 4 stages", lambda: launch_on_hopper(4096, 4, (SILU,)), ("sm_90",)),
    Launch("second in Gluon, 4 stages", lambda: launch_on_hopper(4096, 4, (None,)), ("sm_90",), is_gated=False),
    Launch("in Gluon, 3 stages", lambda: launch_on_hopper(4096, 3, (SILU, None)), ("sm_90",), is_gated=False),
    Launch("fp8, few rows", lambda: both(fp8_of_blocks, 32, 16), HOPPER, is_gated=False),
    Launch("fp8, 64 rows a tile", lambda: both(fp8_of_blocks, 512, 64), HOPPER, is_gated=False),
    Launch("fp8, many rows", lambda: both(fp8_of_blocks, 4096, 128), HOPPER),
    Launch("int4, few rows", lambda: both(int4, 32, 16)),
    Launch("int4, 64 rows a tile", lambda: both(int4, 512, 64), is_gated=False),
    Launch("int4, many rows", lambda: both(int4, 4096, 128), is_gated=False),
    Launch("mxfp4, few rows", lambda: launch_of_mxfp4(32, 16), spilled_bytes=4),
    Launch("mxfp4, many rows", lambda: launch_of_mxfp4(4096, 128), is_gated=False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_experts", "routing", "has_bias"),
    [
        (8, Routing(2), False),
        (60, Routing(4, renormalise=False), False),
        (24, Routing(5, renormalise=False, scale=16.0, num_groups=3, top_groups=2), False),
        (40, Routing(6, sigmoid=True, scale=2.5, num_groups=8, top_groups=3, group_by_two=True), True),
    ],
)
def test_moe_routing(num_experts: int, routing: Routing, has_bias: bool, dtype: torch.dtype) -> None:
    logits = normal(7, num_experts + 3, dtype=dtype)[:, 1:-2]
    logits[2] = 1.0  # all equal
    bias = normal(num_experts, dtype=torch.float32, seed=1) / 10 if has_bias else None
    weights, experts = moe_routing_triton(logits, routing, bias)
    expected_weights, expected_experts = moe_routing_twin(logits, routing, bias)
    assert torch.equal(experts, expected_experts)
    assert_near(weights, expected_weights)


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits = normal(3, 12, dtype=torch.float32)
    logits[0, 5], logits[1] = torch.nan, torch.nan
    logits[2, 1:] = -torch.inf
    for routing in (Routing(3), Routing(3, sigmoid=True)):
        _, experts = moe_routing_triton(logits, routing)
        assert torch.equal(experts, moe_routing_twin(logits, routing)[1])
        assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 12 for row in experts.tolist())


def random_experts(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(4))
    return scores.topk(top_k).indices.int().to(DEVICE)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "first", "block_m"),
    [
        (1, 2, 8, 0, 16),
        (8, 4, 60, 0, 16),
        (32, 4, 9, 1, 16),
        (40, 4, 12, 0, 16),
        (70, 3, 6, 2, 16),
        (5, 1, 3, 7, 16),
        (1100, 4, 20, 0, 64),
    ],
)
def test_moe_sort(num_tokens: int, top_k: int, num_experts: int, first: int, block_m: int) -> None:
    experts = random_experts(num_tokens, top_k, num_experts + 3)
    experts[-1] = -1  # a row that is padding
    found = moe_sort_triton(experts, num_experts, block_m, first)
    expected = moe_sort_twin(experts.cpu(), num_experts, block_m, first)
    tiles = int(expected.num_tiles)
    assert int(found.num_tiles) == tiles <= found.max_tiles
    assert torch.equal(found.pairs.cpu(), expected.pairs) and torch.equal(found.starts.cpu(), expected.starts)
    assert torch.equal(found.tile_experts[:tiles].cpu(), expected.tile_experts[:tiles])
    assert torch.equal(found.tile_starts[:tiles].cpu(), expected.tile_starts[:tiles])


@pytest.mark.parametrize("dtype", DTYPES)
def test_moe_combine(dtype: torch.dtype) -> None:
    experts = random_experts(5, 3, 8)
    y, weights = normal(15, 1100, dtype=dtype), normal(5, 3, dtype=torch.float32, seed=1)
    is_elsewhere = (experts.view(-1) < 2) | (experts.view(-1) > 5)
    assert is_elsewhere.any()
    y[is_elsewhere] = torch.nan  # of another rank: not written
    shared = normal(5, 1103, dtype=dtype, seed=2)[:, 3:]
    for given in (None, shared):
        found = moe_combine_triton(y, weights, experts, 4, 2, given)
        assert_near(found, moe_combine_twin(y, weights, experts, 4, 2, given))


def weight_of(kind: str, num_experts: int, n: int, k: int, dtype: torch.dtype) -> Weight:
    if kind == "16 bits":
        return normal(num_experts, n, k, dtype=dtype, seed=n) / k**0.5
    if kind == "int4":
        parts = [random_codes(n, k, 4, 32, seed) for seed in range(num_experts)]
        codes, scales, zeros = (torch.stack(part).to(DEVICE) for part in zip(*parts, strict=True))
        return pack(codes, scales / k**0.5, zeros, 4, 32)
    if kind == "mxfp4":
        parts = [random_codes(n, k, 4, 32, seed) for seed in range(num_experts)]
        codes, scales, _ = (torch.stack(part).to(DEVICE) for part in zip(*parts, strict=True))
        return pack(codes, scales / k**0.5, None, 4, 32, coding=Coding.E2M1)
    to = torch.int8 if kind == "int8" else FP8
    values, scales = random_scaled((num_experts, n, k), to, kind == "fp8 of blocks", seed=n)
    return ScaledWeight(values.to(DEVICE), scales.to(DEVICE))


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("kind", ["16 bits", "fp8", "fp8 of blocks", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize(("num_tokens", "block_m"), [(3, 16), (40, 64)])
def test_grouped_products(num_tokens: int, block_m: int, kind: str, dtype: torch.dtype) -> None:
    num_experts, top_k, dim, inner = 3, 2, 160, 72
    experts = random_experts(num_tokens, top_k, num_experts + 1)
    order = moe_sort_twin(experts, num_experts, block_m)
    num_here = int(order.starts[-1])
    assert 0 < num_here < experts.numel()
    gate_up, down = weight_of(kind, num_experts, 2 * inner, dim, dtype), weight_of(kind, num_experts, dim, inner, dtype)
    for weight, k, gate in ((gate_up, dim, SILU), (down, inner, None)):
        x = normal(num_tokens if k == dim else num_tokens * top_k, k + 3, dtype=dtype, seed=5)[:, 2:-1]
        scales = None
        if isinstance(weight, ScaledWeight):
            x, scales = quantise_rows_twin(x, weight.values.dtype, weight.has_blocks)
        found = grouped_product_triton(x, weight, order, dtype, scales, gate=gate)
        expected = grouped_product_twin(x, weight, order, dtype, scales, gate=gate)
        written = torch.arange(num_here, device=DEVICE) if k == dim else order.pairs[:num_here].long()
        assert int(found.isnan().any(dim=1).sum()) == experts.numel() - num_here
        most = expected[written].abs().amax() if dot_tolerance(x.dtype) else 1.0
        assert_near(found[written] / most, expected[written] / most, dot_tolerance(x.dtype))


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(
    ("activation", "kind"),
    [(SWIGLU_CLAMPED, "16 bits"), (SILU_UP_FIRST, "16 bits"), (GELU, "16 bits"), (SILU, "mxfp4")],
)
def test_grouped_products_with_biases(activation: int, kind: str, dtype: torch.dtype) -> None:
    """As gpt-oss has them: large enough that the gate is clamped."""
    num_experts, dim, inner = 3, 40, 24
    order = moe_sort_twin(random_experts(20, 2, num_experts), num_experts, 16)
    gate_up, down = (weight_of(kind, num_experts, *of, dtype) for of in ((2 * inner, dim), (dim, inner)))
    biases = normal(num_experts, 2 * inner, dtype=dtype, seed=6), normal(num_experts, dim, dtype=dtype, seed=7)
    x = normal(20, dim, dtype=dtype, seed=5) * 6
    act = grouped_product_twin(x, gate_up, order, dtype, None, biases[0], activation)
    assert_near(grouped_product_triton(x, gate_up, order, dtype, None, biases[0], activation), act)
    found = grouped_product_triton(act, down, order, dtype, None, biases[1])
    assert_near(found, grouped_product_twin(act, down, order, dtype, None, biases[1]))


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 2, 8), (300, 3, 6)])
def test_count_experts(num_tokens: int, top_k: int, num_experts: int) -> None:
    experts = random_experts(num_tokens, top_k, num_experts)
    experts[-1, 0] = -1
    slots = torch.arange(num_tokens, device=DEVICE) - 2 * (num_tokens > 1)  # the first two are idle
    found, expected = (torch.full((num_experts,), 5, device=DEVICE) for _ in range(2))
    count_experts_triton(experts, slots, found)
    count_experts_twin(experts, slots, expected)
    assert torch.equal(found, expected)
    assert int(found.sum()) == 5 * num_experts + int((experts[slots >= 0] >= 0).sum())


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU it runs itself (tests/kernels/moe/test_hopper_experts.py)")
@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("when", ORDERS)
@pytest.mark.parametrize("gate", [SILU, None])
def test_products_in_gluon_whatever_the_order_of_copies_is(
    gate: int | None, when: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs take turns at all tiles; some are not full, some pairs not here."""
    from diptych.kernels.moe import hopper_kernels

    monkeypatch.setattr(hopper_experts, "chip_of", lambda _: replace(CHIPS["h200"], num_cores=2))
    emulated = Emulated(hopper_kernels.grouped_hopper_kernel, stages, when)
    monkeypatch.setattr(hopper_kernels, "grouped_hopper_kernel", emulated)
    order, half = moe_sort_twin(random_experts(150, 2, 5), 3, hopper_experts.BLOCK_M), torch.bfloat16
    num_here, k = int(order.starts[-1]), 64 * (stages + 1)
    weight = normal(3, 400, k, dtype=half) / k**0.5
    x = normal(150 if gate is not None else 300, k, dtype=half, seed=1)
    due = grouped_product_twin(x, weight, order, half, gate=gate)
    found = torch.full_like(due, torch.nan)
    assert hopper_experts.takes(x, weight, order, gate, stages) and num_here < 300
    hopper_experts.launch(x, weight, order, gate, found, stages)
    written = torch.arange(num_here) if gate is not None else order.pairs[:num_here].long()
    assert int(found.isnan().all(dim=1).sum()) == len(found) - num_here
    assert_near(found[written], due[written])
