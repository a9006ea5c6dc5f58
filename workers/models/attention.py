"""Paged grouped-query attention of one decoder layer: project, normalise, rotate, store, attend, project."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

from ...kernels.paged_attention import paged_attention
from ...kernels.paged_batch import PagedBatch
from ...kernels.rms_norm import rms_norm
from ...kernels.rope_kv_write import rope_kv_write
from ..parallel import Group
from .spec import ModelSpec
from .weights import LayerWeights


@dataclass(frozen=True, slots=True)
class StepMeta:
    """What every layer of one step shares. T tokens."""

    cos_sin: Tensor  # [T, head_dim] float32, of each token's position
    slots: Tensor  # [T] int64: where each token's KV goes
    paged: PagedBatch


def attention(
    spec: ModelSpec, weights: LayerWeights, hidden: Tensor, cache: Tensor, meta: StepMeta, group: Group
) -> Tensor:
    """hidden: [T, H]; cache: [num_blocks, 2, block_size, K, D], gains the KV of the T tokens. Returns [T, H].

    spec, weights and cache: of this rank's heads alone; the result is of all heads, the same on every rank.
    """
    q = project(spec, weights, hidden, cache, meta.cos_sin, meta.slots)
    return output(weights, paged_attention(q, cache, meta.paged), group)


def project(
    spec: ModelSpec, weights: LayerWeights, hidden: Tensor, cache: Tensor, cos_sin: Tensor, slots: Tensor
) -> Tensor:
    """What is before attending: the KV of the T tokens is stored. Returns their queries, [T, N, D]."""
    qkv = linear(hidden, weights.qkv, weights.qkv_bias).view(hidden.shape[0], -1, spec.head_dim)
    q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q = rms_norm(q, weights.q_norm, spec.rms_norm_eps)
        k = rms_norm(k, weights.k_norm, spec.rms_norm_eps)
    return rope_kv_write(q, k, v, cos_sin, cache, slots)


def output(weights: LayerWeights, attended: Tensor, group: Group) -> Tensor:
    """attended: [T, N, D]. Returns [T, H]."""
    return group.all_reduce(linear(attended.view(attended.shape[0], -1), weights.o, weights.o_bias))
