"""The kernels of a layer of decodes, one after another, as Llama 3.1 8B has them: norm, products, rotation with the KV
write, attention, gate. Beside it the same kernels, each of which starts while the one before ends.

Bytes: the weights, and keys and values of the contexts, once. Flops: of the products.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels.attention.decode_attention import decode_attention_triton, decode_attention_twin
from diptych.kernels.attention.decode_plan import DecodePlan, Decodes, decode_config, plan_decode
from diptych.kernels.common import dependent_launch
from diptych.kernels.common.tuning import chip_of
from diptych.kernels.elementwise.gate_mul import SILU, gate_mul_triton, gate_mul_twin
from diptych.kernels.elementwise.rms_norm import add_rms_norm_triton, add_rms_norm_twin
from diptych.kernels.gemm.linear import linear
from diptych.kernels.kv.rope_kv_write import rope_kv_write_triton, rope_kv_write_twin

from .common import DEVICE, HALF, Case, Random, sized

EPS = 1e-5
HEADS, KV_HEADS, DIM = sized((32, 8, 128), (4, 2, 16))
HIDDEN, INNER = sized((4096, 14336), (64, 96))
BLOCK_SIZE = 16
SHAPES = ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)


@dataclass(frozen=True)
class Kernels:
    """Kernels of a layer, or their twins."""

    norm: Callable[..., Tensor]
    product: Callable[[Tensor, Tensor], Tensor]
    rotate: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    gate: Callable[..., Tensor]


OURS = Kernels(add_rms_norm_triton, linear, rope_kv_write_triton, decode_attention_triton, gate_mul_triton)
TWINS = Kernels(add_rms_norm_twin, functional.linear, rope_kv_write_twin, decode_attention_twin, gate_mul_twin)


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [S, HIDDEN]: what the layer before gave, to be added to the residual
    residual: Tensor  # [S, HIDDEN]
    norms: tuple[Tensor, Tensor]  # [HIDDEN] each
    weights: tuple[Tensor, ...]  # of SHAPES
    cos_sin: Tensor  # [S, DIM] float32
    cache: Tensor  # [blocks, 2, BLOCK_SIZE, KV_HEADS, DIM]
    slots: Tensor  # [S] int64: each context's last
    decodes: Decodes
    plan: DecodePlan

    def layer(self, use: Kernels) -> tuple[Tensor, Tensor, Tensor]:
        """(result, residual, cache). The residual is a copy, so that each call computes the same."""
        residual, num_rows = self.residual.clone(), len(self.x)
        qkv_weight, out_weight, gate_up_weight, down_weight = self.weights
        qkv = use.product(use.norm(self.x, residual, self.norms[0], EPS), qkv_weight)
        q, k, v = qkv.view(num_rows, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q = use.rotate(q, k, v, self.cos_sin, self.cache, self.slots)
        attended = use.attend(q, self.cache, self.decodes, self.plan).view(num_rows, -1)
        normed = use.norm(use.product(attended, out_weight), residual, self.norms[1], EPS)
        return use.product(use.gate(use.product(normed, gate_up_weight), SILU), down_weight), residual, self.cache


def make(seed: int, num_seqs: int, context: int) -> Inputs:
    random = Random(seed)
    width = -(-context // BLOCK_SIZE)
    tables = random.order(num_seqs * width).int().view(num_seqs, width)
    cache = random.normal(num_seqs * width, 2, BLOCK_SIZE, KV_HEADS, DIM)
    ints = {"dtype": torch.int32, "device": DEVICE}
    decodes = Decodes(tables, torch.full((num_seqs,), context, **ints), torch.arange(num_seqs + 1, **ints), 1)
    angles = random.uniform(num_seqs, DIM // 2) * 6.28
    return Inputs(
        random.normal(num_seqs, HIDDEN),
        random.normal(num_seqs, HIDDEN),
        (1 + random.normal(HIDDEN) / 20, 1 + random.normal(HIDDEN) / 20),
        tuple(random.normal(n, k) / k**0.5 for n, k in SHAPES),
        torch.cat((angles.cos(), angles.sin()), dim=1),
        cache,
        tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE,
        decodes,
        plan_decode(decodes, KV_HEADS, decode_config(chip_of(DEVICE), cache)),
    )


def layer(x: Inputs, *, follows: bool) -> tuple[Tensor, Tensor, Tensor]:
    with patch.object(dependent_launch, "is_asked", lambda: follows):
        return x.layer(OURS)


def case(num_seqs: int, context: int) -> Case:
    weights, kv = sum(n * k for n, k in SHAPES), 2 * num_seqs * context * KV_HEADS * DIM
    return Case(
        "layer of decodes",
        f"{num_seqs} x {context}",
        lambda seed: make(seed, num_seqs, context),
        lambda x: layer(x, follows=False),
        lambda x, _: x.layer(TWINS),
        HALF.itemsize * (weights + kv),
        2.0 * num_seqs * weights,
        tolerance=2e-2,  # roundings of ten kernels
        peers={"dependent launch": lambda x: layer(x, follows=True)},
    )


def cases() -> Iterator[Case]:
    for num_seqs in sized((1, 16, 32), (1, 3)):
        yield case(num_seqs, sized(1024, 40))
