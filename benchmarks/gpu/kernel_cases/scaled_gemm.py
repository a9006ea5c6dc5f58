"""fp8 products beside torch's, and the quantisation of what they take.

Bytes: weights, rows and results once. Flops: 2 M N K. Their share of the limit is held against the bf16 rate.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from diptych.kernels.gemm.quantise_rows import quantise_rows_triton, quantise_rows_twin
from diptych.kernels.gemm.scaled_gemm import ScaledLibrary, ScaledWeight, scaled_gemm_triton, scaled_gemm_twin
from diptych.kernels.gemm.scaled_library import DeepGemm, find_libraries

from .common import DEVICE, HALF, IS_TINY, MOVES, Case, Goal, Random, sized

FP8 = torch.float8_e4m3fn
BLOCK = 128  # of scales
LIBRARIES = find_libraries(DEVICE)


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [rows, K] fp8
    x_scales: Tensor
    weight: ScaledWeight
    dense: Tensor  # [N, K], and rows, in 16 bits
    rows: Tensor


def make(seed: int, rows: int, n: int, k: int, blocks: bool) -> Inputs:
    random = Random(seed)
    dense, x = random.normal(n, k), random.normal(rows, k)
    weight = ScaledWeight(*quantise_rows_twin(dense, FP8))
    if blocks:
        weight = ScaledWeight(weight.values, random.uniform(-(-n // BLOCK), -(-k // BLOCK)) / 100)
    return Inputs(*quantise_rows_twin(x, FP8, blocks), weight, dense, x)


def run(x: Inputs) -> Tensor:
    return scaled_gemm_triton(x.x, x.x_scales, x.weight, HALF)


def by_torch(x: Inputs) -> Tensor:
    scales = x.weight.scales[None]
    return torch._scaled_mm(x.x, x.weight.values.mT, x.x_scales[:, None], scales, out_dtype=HALF, use_fast_accum=True)


def by(library: ScaledLibrary) -> Callable[[Inputs], Tensor]:
    def run(x: Inputs) -> Tensor:
        assert library.takes(x.x, x.x_scales, x.weight, HALF, None)
        return library.multiply(x.x, x.x_scales, x.weight, None)

    return run


def product_case(rows: int, n: int, k: int, blocks: bool) -> Case:
    peers: dict[str, Callable[[Inputs], object]] = {"bf16 linear": lambda x: linear(x.rows, x.dense)}
    goals: tuple[Goal, ...] = ()
    if not IS_TINY:
        peers |= {of.name: by(of) for of in LIBRARIES if isinstance(of, DeepGemm) == blocks}
    if not blocks and not IS_TINY:
        peers["_scaled_mm"] = by_torch
        goals = (Goal("_scaled_mm", 0.7, 0.95),)
    return Case(
        "fp8 GEMM, blocks" if blocks else "fp8 GEMM, channels",
        f"{rows} x {k} x {n}",
        lambda seed: make(seed, rows, n, k, blocks),
        run,
        lambda x, _: scaled_gemm_twin(x.x, x.x_scales, x.weight, HALF),
        n * k + rows * (k + HALF.itemsize * n),
        2.0 * rows * n * k,
        peers=peers,
        unlike=("bf16 linear",),
        goals=goals,
    )


def quantise_case(rows: int, k: int, blocks: bool) -> Case:
    return Case(
        "quantise rows, blocks" if blocks else "quantise rows",
        f"{rows} x {k}",
        lambda seed: Random(seed).normal(rows, k),
        lambda x: quantise_rows_triton(x, FP8, blocks),
        lambda x, _: quantise_rows_twin(x, FP8, blocks),
        (HALF.itemsize + 1) * rows * k,
        tolerance=sized(1e-2, 0.1),  # a code may be its neighbour; the interpreter rounds to float8 as it should not
        goals=MOVES,
    )


def cases() -> Iterator[Case]:
    for n, k in sized(((4096, 4096), (28672, 4096), (4096, 14336)), ((40, 256),)):
        for rows in sized((1, 16, 64, 512, 4096), (1, 20)):
            for blocks in (False, True):
                yield product_case(rows, n, k, blocks)
    for blocks in (False, True):
        yield quantise_case(*sized((8192, 4096), (3, 300)), blocks)
