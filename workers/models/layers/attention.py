"""Paged grouped-query attention of one decoder layer: [project, normalise], rotate, store, attend, [project]."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.attention.paged_batch import AttentionOptions, PagedBatch
from ....kernels.elementwise.rms_norm import rms_norm
from ....kernels.gemm.linear import linear
from ...parallel.groups import Group
from ..checkpoint.weights import LayerWeights
from ..families.spec import AttentionSpec
from .sparse import SparseDecodes, SparseStep
from .tail import TailStep


@dataclass(frozen=True, slots=True)
class StepMeta:
    """Data of a step that all its layers share. T tokens."""

    cos_sin: tuple[Tensor, ...]  # of each of ModelSpec.ropes [T, D] float32, of each token's position
    slots: Tensor  # [T] int64: where each token's KV goes, in the KV tail where there is one
    paged: PagedBatch
    sparse: SparseStep | SparseDecodes | None = (
        None  # None: all sequences attend to all of their context, in every layer
    )
    tail: TailStep | None = None  # None: all KV is in the cache


def options_of(spec: AttentionSpec, weights: LayerWeights) -> AttentionOptions:
    """Return the options as the kernels take them, without those that equal the kernels' defaults."""
    scale = None if spec.scale == spec.head_dim**-0.5 else spec.scale
    return AttentionOptions(scale, spec.softcap, spec.window, weights.sinks)


def project(
    spec: AttentionSpec, weights: LayerWeights, hidden: Tensor, eps: float, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, N, D], keys and values [T, K, D] of the T tokens, as they are before they are rotated; K is 0 where
    KV is another layer's.

    hidden: [T, H]. spec and weights: of this rank's heads alone.
    """
    qkv = linear(hidden, weights.qkv, weights.qkv_bias).view(hidden.shape[0], -1, spec.head_dim)
    num_kv_heads = spec.num_kv_heads if spec.kv_from is None else 0
    q, k, v = qkv.split((spec.num_heads, num_kv_heads, num_kv_heads), dim=1)
    if spec.v_norm:
        v = rms_norm(v, None, eps)
    if weights.q_norm is None:
        return q, k, v
    if weights.k_norm is None:
        return rms_norm(q, weights.q_norm, eps), k, v
    if spec.qk_norm == "whole":
        return *_normed_whole(q, k, weights.q_norm, weights.k_norm, eps, group), v
    return rms_norm(q, weights.q_norm, eps), rms_norm(k, weights.k_norm, eps), v


def _normed_whole(
    q: Tensor, k: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, group: Group
) -> tuple[Tensor, Tensor]:
    """RMSNorm of all heads of a token at once; q_norm [N D], k_norm [K D]. A rank has its own heads' part of the mean;
    where several have the same key heads, all are had equally often, which leaves the mean as it is."""
    flat = q.flatten(1), k.flatten(1)
    if group.size == 1:
        normed = rms_norm(flat[0], q_norm, eps), rms_norm(flat[1], k_norm, eps)
    else:
        own = torch.stack([x.float().square().mean(dim=1) for x in flat])  # [2, T]
        scales = (group.all_reduce(own) / group.size + eps).rsqrt()[:, :, None]
        # A weight of float32 is met in float32, as rms_norm does.
        scaled = [
            (x.float() * scale).to(w.dtype) * w for x, scale, w in zip(flat, scales, (q_norm, k_norm), strict=True)
        ]
        normed = scaled[0].to(q.dtype), scaled[1].to(q.dtype)
    return normed[0].view(q.shape), normed[1].view(k.shape)


def output(weights: LayerWeights, attended: Tensor, group: Group) -> Tensor:
    """attended: [T, N, D]. Returns [T, H], of all heads, the same on every rank."""
    return group.all_reduce(linear(attended.view(attended.shape[0], -1), weights.o, weights.o_bias))
