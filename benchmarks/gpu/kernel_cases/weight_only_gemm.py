"""int4 weights beside bf16 ones: the layers of an 8 B model.

Bytes: codes, scales and zeros, rows and results once. Flops: 2 M N K.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from diptych.kernels.gemm.packed_weight import PackedWeight, pack
from diptych.kernels.gemm.weight_only_gemm import weight_only_gemm_triton, weight_only_gemm_twin

from .common import HALF, Case, Goal, Random, sized

GROUP = 128
PEER = "bf16 linear"


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [rows, K]
    weight: PackedWeight
    dense: Tensor  # [N, K]


def make(seed: int, rows: int, n: int, k: int) -> Inputs:
    random = Random(seed)
    codes = random.whole(0, 16, n, k, dtype=torch.uint8)
    scales, zeros = random.uniform(k // GROUP, n).half() / 64, random.whole(1, 16, k // GROUP, n)
    weight = pack(codes, scales, zeros, 4, GROUP)
    return Inputs(random.normal(rows, k), weight, random.normal(n, k))


def case(rows: int, n: int, k: int) -> Case:
    groups = k // GROUP * n * 4  # bytes of scales and zeros
    return Case(
        "int4 GEMM",
        f"{rows} x {k} x {n}",
        lambda seed: make(seed, rows, n, k),
        lambda x: weight_only_gemm_triton(x.x, x.weight),
        lambda x, _: weight_only_gemm_twin(x.x, x.weight),
        n * k / 2 + groups + HALF.itemsize * rows * (n + k),
        2.0 * rows * n * k,
        peers={PEER: lambda x: linear(x.x, x.dense)},
        unlike=(PEER,),
        goals=(Goal(PEER, 1.8, 2.5),) if rows <= 16 else (),
    )


def cases() -> Iterator[Case]:
    for n, k in sized(((4096, 4096), (28672, 4096), (4096, 14336)), ((40, 256),)):
        for rows in sized((1, 16, 64, 512, 4096), (1, 20)):
            yield case(rows, n, k)
