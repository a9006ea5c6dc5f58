"""A mixture's layer from the router's logits to the sums: 128 experts, 8 chosen, as Qwen3-30B-A3B's.

Bytes: the weights of the experts that some token has chosen, the tokens and the sums. Flops: three products a pair.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.kernels.elementwise.gate_mul import SILU
from diptych.kernels.gemm.linear import Weight
from diptych.kernels.gemm.packed_weight import pack
from diptych.kernels.gemm.quantise_rows import quantise_rows_triton, quantise_rows_twin
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.kernels.moe.grouped_gemm import block_m_of, grouped_product_triton, grouped_product_twin
from diptych.kernels.moe.moe_combine import moe_combine_triton, moe_combine_twin
from diptych.kernels.moe.moe_routing import Routing, moe_routing_triton
from diptych.kernels.moe.moe_sort import moe_sort_triton, moe_sort_twin

from .common import DEVICE, HALF, Case, Goal, Random, sized

NUM_EXPERTS, DIM, INNER = sized((128, 2048, 768), (4, 128, 128))
ROUTING = Routing(sized(8, 2))


def random_weight(random: Random, kind: str, n: int, k: int) -> Weight:
    if kind == "int4":
        codes = random.whole(0, 16, NUM_EXPERTS, n, k, dtype=torch.uint8)
        return pack(codes, random.uniform(NUM_EXPERTS, k // 128, n).half() / 64, None, 4, 128)
    dense = random.normal(NUM_EXPERTS, n, k)
    if kind == "16 bits":
        return dense / k**0.5
    return ScaledWeight(dense.to(torch.float8_e4m3fn), random.uniform(NUM_EXPERTS, n // 128, k // 128) / k**0.5)


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [T, D]
    logits: Tensor  # [T, E]
    gate_up: Weight
    down: Weight

    def factor(self, weight: Weight, x: Tensor, is_triton: bool) -> tuple[Tensor, Tensor | None]:
        if not isinstance(weight, ScaledWeight):
            return x, None
        return (quantise_rows_triton if is_triton else quantise_rows_twin)(x, weight.values.dtype, weight.has_blocks)

    def layer(self, is_triton: bool) -> Tensor:
        """Compute a mixture as kernels/moe/moe.py does, by the kernels or by their twins; the kernel chooses the
        experts for both."""
        weights, experts = moe_routing_triton(self.logits, ROUTING)
        block_m = block_m_of(experts.numel(), NUM_EXPERTS, DEVICE)
        order = (moe_sort_triton if is_triton else moe_sort_twin)(experts, NUM_EXPERTS, block_m)
        rows, scales = self.factor(self.gate_up, self.x, is_triton)
        product = grouped_product_triton if is_triton else grouped_product_twin
        act = product(rows, self.gate_up, order, HALF, scales, gate=SILU)
        rows, scales = self.factor(self.down, act, is_triton)
        y = product(rows, self.down, order, HALF, scales)
        return (moe_combine_triton if is_triton else moe_combine_twin)(y, weights, experts, NUM_EXPERTS)


def expected_touched(rows: int) -> float:
    """Experts that tokens choose on average, each token at random."""
    return NUM_EXPERTS * (1 - (1 - ROUTING.top_k / NUM_EXPERTS) ** rows)


def case(kind: str, rows: int) -> Case:
    def make(seed: int) -> Inputs:
        random = Random(seed)
        weights = (random_weight(random, kind, 2 * INNER, DIM), random_weight(random, kind, DIM, INNER))
        return Inputs(random.normal(rows, DIM), random.normal(rows, NUM_EXPERTS, dtype=torch.float32), *weights)

    bytes_of_number = {"16 bits": HALF.itemsize, "fp8": 1.0, "int4": 0.5 + 2 / 128}[kind]
    goals: tuple[Goal, ...] = ()
    if kind == "16 bits":
        goals = (Goal("copy", 0.60, 0.80),) if rows <= 64 else (Goal("TFLOP/s", 400.0, 600.0),) if rows > 4096 else ()
    return Case(
        f"MoE, {kind}",
        f"{rows} tokens",
        make,
        lambda x: x.layer(is_triton=True),
        lambda x, _: x.layer(is_triton=False),
        expected_touched(rows) * 3 * INNER * DIM * bytes_of_number + 2 * HALF.itemsize * rows * DIM,
        2.0 * rows * ROUTING.top_k * 3 * INNER * DIM,
        # Rows are quantised in between. (The interpreter rounds to float8 as it should not.)
        tolerance=1e-2 if kind != "fp8" else sized(3e-2, 0.2),
        goals=goals,
    )


def cases() -> Iterator[Case]:
    for kind in ("16 bits", "fp8", "int4"):
        for rows in sized((1, 16, 64, 512, 8192), (5,)):
            yield case(kind, rows)
