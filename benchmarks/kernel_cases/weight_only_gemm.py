"""int4 weights beside bf16 ones: the layers of an 8 B model."""

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

from diptych.kernels.packed_weight import PackedWeight, pack
from diptych.kernels.weight_only_gemm import static_workspace, weight_only_gemm

from .common import Case, random

GROUP = 128


def random_weight(n: int, k: int) -> PackedWeight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.rand(k // GROUP, n, device="cuda").half() / 64
    return pack(codes, scales, torch.randint(1, 16, (k // GROUP, n), device="cuda"), 4, GROUP)


def cases() -> Iterator[Case]:
    workspace = static_workspace(torch.device("cuda"))
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336)):
        weight, dense = random_weight(n, k), random(n, k)
        for rows in (1, 16, 64, 512, 4096):
            x = random(rows, k)
            yield Case(
                "int4 GEMM",
                f"{rows} x {k} x {n}",
                lambda x=x, w=weight: weight_only_gemm(x, w, None, workspace),
                weight.codes.nbytes + 2 * weight.scales.nbytes + 2 * rows * (n + k),
                2.0 * rows * n * k,
                {"bf16 linear": lambda x=x, w=dense: linear(x, w)},
            )
