"""fp8 products, and the quantisation of what they take, beside torch's."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from diptych.kernels.quantise_rows import quantise_rows
from diptych.kernels.scaled_gemm import ScaledWeight, scaled_gemm, static_workspace

from .common import Case, random

FP8 = torch.float8_e4m3fn


def by_torch(x: Tensor, x_scales: Tensor, weight: ScaledWeight) -> Callable[[], Tensor]:
    scales = weight.scales[None]
    return lambda: torch._scaled_mm(
        x, weight.values.mT, x_scales[:, None], scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def cases() -> Iterator[Case]:
    workspace = static_workspace(torch.device("cuda"))
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336)):
        dense = random(n, k)
        by_channel = ScaledWeight(*quantise_rows(dense, FP8))
        blocks = torch.rand(-(-n // 128), -(-k // 128), device="cuda") / 100
        by_block = ScaledWeight(by_channel.values, blocks)
        for rows in (1, 16, 64, 512, 4096):
            x = random(rows, k)
            for name, weight in (("fp8 GEMM, channels", by_channel), ("fp8 GEMM, blocks", by_block)):
                values, scales = quantise_rows(x, FP8, weight.has_blocks)
                against = {"bf16 linear": lambda x=x, w=dense: linear(x, w)}
                if not weight.has_blocks:
                    against["_scaled_mm"] = by_torch(values, scales, weight)
                yield Case(
                    name,
                    f"{rows} x {k} x {n}",
                    lambda v=values, s=scales, w=weight: scaled_gemm(v, s, w, torch.bfloat16, None, workspace),
                    n * k + rows * (k + 2 * n),
                    2.0 * rows * n * k,
                    against,
                )
    x = random(8192, 4096)
    for blocks in (False, True):
        name = "quantise rows, blocks" if blocks else "quantise rows"
        yield Case(name, "8192 x 4096", lambda b=blocks: quantise_rows(x, FP8, b), 3 * x.numel(), 0)
