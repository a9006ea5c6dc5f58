"""Products of 16 bits and few rows beside torch's (cuBLAS), of the shapes of 8 B: what a step of decodes reads.

Bytes: weights, rows and results once. Flops: 2 M N K.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels.gemm.few_rows import FEW_ROWS
from diptych.kernels.gemm.linear import linear

from .common import HALF, Case, Goal, Random, sized


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [rows, K]
    weight: Tensor  # [N, K]


def make(seed: int, rows: int, n: int, k: int) -> Inputs:
    random = Random(seed)
    return Inputs(random.normal(rows, k), random.normal(n, k))


def case(rows: int, n: int, k: int) -> Case:
    return Case(
        "linear",
        f"{rows} x {k} x {n}",
        lambda seed: make(seed, rows, n, k),
        lambda x: linear(x.x, x.weight),
        lambda x, _: functional.linear(x.x.float(), x.weight.float()).to(torch.float32),
        HALF.itemsize * (n * k + rows * (k + n)),
        2.0 * rows * n * k,
        peers={"torch linear": lambda x: functional.linear(x.x, x.weight)},
        goals=() if rows > FEW_ROWS else (Goal("copy", 0.75, 0.9), Goal("torch linear", 0.95, 1.2)),
    )


def cases() -> Iterator[Case]:
    for n, k in sized(((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)), ((40, 256),)):
        for rows in sized((1, 16, 32), (1, 20)):
            yield case(rows, n, k)
