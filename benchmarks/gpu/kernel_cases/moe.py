"""A mixture's layer from the router's logits to the sums: 128 experts, 8 chosen, as Qwen3-30B-A3B's. And its products
of many tokens one by one, with DeepSeek-V2-Lite's beside them, by the plain kernel and in Gluon (hopper_experts.py).
The layer's peer is FlashInfer where it is installed (expert_library.py), in fp8 DeepGEMM (scaled_expert_library.py),
with the same routing.

Bytes: the weights of the experts that some token has chosen, the tokens and the sums (of a product its result). Flops:
three products a pair.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.kernels.common.tuning import chip_of
from diptych.kernels.elementwise.gate_mul import SILU
from diptych.kernels.gemm.linear import Weight
from diptych.kernels.gemm.packed_weight import pack
from diptych.kernels.gemm.quantise_rows import quantise_rows_triton, quantise_rows_twin
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.kernels.moe import hopper_experts
from diptych.kernels.moe.expert_library import find_expert_library
from diptych.kernels.moe.grouped_gemm import block_m_of, grouped_product_triton, grouped_product_twin
from diptych.kernels.moe.moe_combine import moe_combine_triton, moe_combine_twin
from diptych.kernels.moe.moe_routing import Routing, moe_routing_triton
from diptych.kernels.moe.moe_sort import ExpertOrder, moe_sort_triton, moe_sort_twin
from diptych.kernels.moe.scaled_expert_library import find_scaled_expert_library

from .common import DEVICE, HALF, IS_INTERPRETED, IS_TINY, Case, Goal, Random, sized

NUM_EXPERTS, DIM, INNER = sized((128, 2048, 768), (4, 128, 128))
ROUTING = Routing(sized(8, 2))
LIBRARY = None if IS_TINY else find_expert_library(DEVICE)
SCALED_LIBRARY = None if IS_TINY else find_scaled_expert_library(DEVICE)
PEER = "FlashInfer, which compiles"  # as kernel_bench/runner.py has the names of those that do
SCALED_PEER = "DeepGEMM, which compiles"


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
    up_gate: Tensor | None = None  # gate_up as the library has it, where it is a peer

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

    def by_library(self) -> Tensor:
        assert LIBRARY is not None and self.up_gate is not None
        return LIBRARY.compute(self.x, *moe_routing_triton(self.logits, ROUTING), self.up_gate, self.down)

    def by_scaled_library(self) -> Tensor:
        assert SCALED_LIBRARY is not None
        return SCALED_LIBRARY.compute(self.x, *moe_routing_triton(self.logits, ROUTING), self.gate_up, self.down)


def expected_touched(rows: int) -> float:
    """Experts that tokens choose on average, each token at random."""
    return NUM_EXPERTS * (1 - (1 - ROUTING.top_k / NUM_EXPERTS) ** rows)


def case(kind: str, rows: int) -> Case:
    has_peer = kind == "16 bits" and LIBRARY is not None

    def make(seed: int) -> Inputs:
        random = Random(seed)
        gate_up, down = random_weight(random, kind, 2 * INNER, DIM), random_weight(random, kind, DIM, INNER)
        up_gate = gate_up.roll(INNER, 1) if has_peer and isinstance(gate_up, Tensor) else None
        x, logits = random.normal(rows, DIM), random.normal(rows, NUM_EXPERTS, dtype=torch.float32)
        return Inputs(x, logits, gate_up, down, up_gate)

    peers: dict[str, Callable[[Inputs], object]] = {PEER: Inputs.by_library} if has_peer else {}
    if kind == "fp8" and SCALED_LIBRARY is not None:
        peers[SCALED_PEER] = Inputs.by_scaled_library
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
        peers=peers,
        goals=goals,
    )


@dataclass(frozen=True)
class Mixture:
    name: str
    num_experts: int
    top_k: int
    dim: int
    inner: int

    def product(self, is_first: bool) -> tuple[int, int, int | None]:
        """(rows of the weight, k, gate)"""
        return (2 * self.inner, self.dim, SILU) if is_first else (self.dim, self.inner, None)


# The smallest have experts with a tile and a half of rows, and as much of K as the stages in Gluon.
MIXTURES = sized(
    (Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768), Mixture("DeepSeek-V2-Lite", 64, 6, 2048, 1408)),
    (Mixture("a small mixture", 2, 1, 256, 256),),
)
GLUON_STAGES = (4, 3)


@dataclass(frozen=True)
class Factors:
    """Factors of one product, of random tokens."""

    x: Tensor  # [T, k] of the first product, [P, k] of the second
    weight: Tensor
    order: ExpertOrder
    gate: int | None

    def plain(self) -> Tensor:
        return grouped_product_triton(self.x, self.weight, self.order, HALF, gate=self.gate)

    def in_gluon(self, stages: int) -> Tensor:
        assert hopper_experts.takes(self.x, self.weight, self.order, self.gate, stages)
        columns = self.weight.shape[1] // (1 if self.gate is None else 2)
        out = torch.empty(self.order.pairs.numel(), columns, dtype=HALF, device=DEVICE)
        hopper_experts.launch(self.x, self.weight, self.order, self.gate, out, stages)
        return out


def is_hopper() -> bool:
    return torch.cuda.is_available() and "sm_90" in chip_of(DEVICE).kinds and not IS_INTERPRETED


def gluon(stages: int) -> str:
    return f"in Gluon, {stages} stages"


def in_gluon(stages: int) -> Callable[[Factors], Tensor]:
    return lambda x: x.in_gluon(stages)


def factors(mixture: Mixture, rows: int, is_first: bool, seed: int) -> Factors:
    random = Random(seed)
    of_weight, k, gate = mixture.product(is_first)
    logits = random.normal(rows, mixture.num_experts, dtype=torch.float32)
    experts = logits.topk(mixture.top_k).indices.int().contiguous()
    order = moe_sort_triton(experts, mixture.num_experts, hopper_experts.BLOCK_M)
    weight = random.normal(mixture.num_experts, of_weight, k) / k**0.5
    return Factors(random.normal(rows if is_first else experts.numel(), k), weight, order, gate)


def product_case(mixture: Mixture, rows: int, is_first: bool, run_stages: int = 0) -> Case:
    """run_stages: the case's own kernel is that in Gluon, with so many; 0: the plain one, which has that as a peer."""
    of_weight, k, _ = mixture.product(is_first)
    pairs = rows * mixture.top_k
    columns = mixture.inner if is_first else mixture.dim
    peers: dict[str, Callable[[Factors], object]] = {}
    if not IS_TINY and is_hopper():
        peers = {gluon(stages): in_gluon(stages) for stages in GLUON_STAGES}
    return Case(
        f"experts' {'first' if is_first else 'second'} product"
        + (f", Gluon, {run_stages} stages" if run_stages else ""),
        f"{mixture.name}, {rows} tokens",
        lambda seed: factors(mixture, rows, is_first, seed),
        in_gluon(run_stages) if run_stages else Factors.plain,
        lambda x, _: grouped_product_twin(x.x, x.weight, x.order, HALF, gate=x.gate),
        HALF.itemsize * (mixture.num_experts * of_weight * k + (rows if is_first else pairs) * k + pairs * columns),
        2.0 * pairs * of_weight * k,
        peers=peers,
    )


def products() -> Iterator[Case]:
    for mixture in MIXTURES:
        for rows in sized((2048, 8192), (200,)):
            for is_first in (True, False):
                yield product_case(mixture, rows, is_first)
                for stages in GLUON_STAGES if IS_TINY and is_hopper() else ():
                    yield product_case(mixture, rows, is_first, stages)


def cases() -> Iterator[Case]:
    yield from products()
    for kind in ("16 bits", "fp8", "int4"):
        for rows in sized((1, 16, 64, 512, 8192), (5,)):
            yield case(kind, rows)
