"""Paged grouped-query attention of one decoder layer: project, normalise, rotate, store, attend, project."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

from ...kernels.paged_batch import AttentionOptions, PagedBatch
from ...kernels.rms_norm import rms_norm
from ...kernels.rope_kv_write import rope_kv_write
from ..parallel import Group
from .spec import AttentionSpec
from .weights import LayerWeights


@dataclass(frozen=True, slots=True)
class StepMeta:
    """What every layer of one step shares. T tokens."""

    cos_sin: tuple[Tensor, ...]  # of each of ModelSpec.ropes [T, D] float32, of each token's position
    slots: Tensor  # [T] int64: where each token's KV goes
    paged: PagedBatch


def options_of(spec: AttentionSpec, weights: LayerWeights) -> AttentionOptions:
    """As the kernels take them: nothing is said where it is what they do anyway."""
    scale = None if spec.scale == spec.head_dim**-0.5 else spec.scale
    return AttentionOptions(scale, spec.softcap, spec.window, weights.sinks)


def project(
    spec: AttentionSpec,
    weights: LayerWeights,
    hidden: Tensor,
    eps: float,
    cache: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
) -> Tensor:
    """What is before attending: the KV of the T tokens is stored. Returns their queries, [T, N, D].

    hidden: [T, H]; cache: [num_blocks, 2, block_size, K, D]. spec, weights and cache: of this rank's heads alone.
    """
    qkv = linear(hidden, weights.qkv, weights.qkv_bias).view(hidden.shape[0], -1, spec.head_dim)
    q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q = rms_norm(q, weights.q_norm, eps)
        k = rms_norm(k, weights.k_norm, eps)
    return rope_kv_write(q, k, v, cos_sin, cache, slots)


def output(weights: LayerWeights, attended: Tensor, group: Group) -> Tensor:
    """attended: [T, N, D]. Returns [T, H], of all heads, the same on every rank."""
    return group.all_reduce(linear(attended.view(attended.shape[0], -1), weights.o, weights.o_bias))
