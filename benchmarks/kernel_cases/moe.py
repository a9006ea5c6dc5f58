"""A mixture's layer from the router's logits to the sums: 128 experts, 8 chosen, as Qwen3-30B-A3B's."""

from collections.abc import Iterator

import torch

from diptych.kernels.grouped_gemm import ExpertWeight
from diptych.kernels.moe import moe_experts
from diptych.kernels.moe_routing import Routing, moe_routing
from diptych.kernels.packed_weight import pack
from diptych.kernels.scaled_gemm import ScaledWeight

from .common import Case, random

NUM_EXPERTS, TOP_K, DIM, INNER = 128, 8, 2048, 768


def random_weight(kind: str, n: int, k: int) -> tuple[ExpertWeight, float]:
    """(weight, bytes of one expert)."""
    if kind == "int4":
        codes = torch.randint(0, 16, (NUM_EXPERTS, n, k), dtype=torch.uint8, device="cuda")
        return pack(codes, torch.rand(NUM_EXPERTS, k // 128, n, device="cuda").half() / 64, None, 4, 128), n * k / 2
    dense = random(NUM_EXPERTS, n, k)
    if kind == "bf16":
        return dense / k**0.5, 2.0 * n * k
    scales = torch.rand(NUM_EXPERTS, n // 128, k // 128, device="cuda") / k**0.5
    return ScaledWeight(dense.to(torch.float8_e4m3fn), scales), 1.0 * n * k


def cases() -> Iterator[Case]:
    routing = Routing(TOP_K)
    for kind in ("bf16", "fp8", "int4"):
        gate_up, gate_up_bytes = random_weight(kind, 2 * INNER, DIM)
        down, down_bytes = random_weight(kind, DIM, INNER)
        for rows in (1, 16, 64, 512, 8192):
            x, logits = random(rows, DIM), random(rows, NUM_EXPERTS, dtype=torch.float32)
            touched = moe_routing(logits, routing)[1].unique().numel()

            def run(x=x, logits=logits, gate_up=gate_up, down=down) -> object:
                return moe_experts(x, *moe_routing(logits, routing), gate_up, down)

            yield Case(
                f"MoE, {kind}",
                f"{rows} tokens",
                run,
                touched * (gate_up_bytes + down_bytes) + 4 * rows * DIM,
                2.0 * rows * TOP_K * 3 * INNER * DIM,
            )
