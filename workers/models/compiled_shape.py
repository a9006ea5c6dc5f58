"""What the compiled CPU kernels make of a ModelSpec, or why they do not compute it. Knows no weights."""

from collections.abc import Iterator

import torch

from ...kernels.cpu.layer import AttentionKind, DecoderShape
from ...kernels.cpu.linear import Then
from ...kernels.paged_batch import AttentionOptions
from .rope import Ropes
from .sharding import WHOLE, Share
from .spec import AttentionSpec, MlpSpec, ModelSpec

GATES = {"silu": Then.SILU_MUL, "gelu_tanh": Then.GELU_MUL}


def why_not(spec: ModelSpec, num_ranks: int = 1) -> str | None:
    """What of it the kernels do not compute, for a log's line; None: they compute it all."""
    return next(_unknown(spec, num_ranks), None)


def _unknown(spec: ModelSpec, num_ranks: int) -> Iterator[str]:
    for layer in dict.fromkeys(spec.layers):
        attention, mlp = layer.attention, layer.feed_forward
        if not isinstance(attention, AttentionSpec):
            yield "latent attention"
        elif _sizes(attention) != _sizes(spec.layers[0].attention):
            yield "heads of other sizes from layer to layer"
        elif attention.scale <= 0:
            yield "scores that are not scaled by a number above 0"
        elif attention.qk_norm == "whole" and num_ranks > 1:
            yield "a norm of all heads that are spread over ranks"
        if not isinstance(mlp, MlpSpec):
            yield "a mixture of experts"
        elif mlp.activation not in GATES:
            yield f"the activation {mlp.activation}"


def _sizes(attention: object) -> tuple[int, int, int] | None:
    if not isinstance(attention, AttentionSpec):
        return None
    return attention.num_heads, attention.num_kv_heads, attention.head_dim


def attentions_of(spec: ModelSpec) -> list[AttentionSpec]:
    """Of each layer; of a spec that the kernels compute."""
    return [layer.attention for layer in spec.layers if isinstance(layer.attention, AttentionSpec)]


def attention_ids(spec: ModelSpec) -> list[int]:
    """Of each layer, which of its DecoderShape's `attentions` it has."""
    kinds = _kinds(spec)
    return [list(dict.fromkeys(kinds)).index(kind) for kind in kinds]


def gate_of(mlp: object) -> Then:
    assert isinstance(mlp, MlpSpec)
    return GATES[mlp.activation]


def shape_of(
    spec: ModelSpec, cos_sin: Ropes, block_size: int, dtype: torch.dtype, share: Share = WHOLE
) -> DecoderShape:
    """spec: of `share`, of one that the kernels compute. cos_sin: of each of its ropes."""
    attention = attentions_of(spec)[0]
    tokens = share.vocabulary(spec.vocab_size)
    scale = torch.tensor(spec.embedding_scale, dtype=dtype)  # is rounded, as transformers does
    return DecoderShape(
        block_size=block_size,
        hidden_size=spec.hidden_size,
        inner_size=max(of.feed_forward.intermediate_size for of in spec.layers if isinstance(of.feed_forward, MlpSpec)),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        vocab_size=tokens.stop - tokens.start,
        first_token=tokens.start,
        eps=spec.rms_norm_eps,
        dtype=dtype,
        attentions=tuple(AttentionKind(cos_sin[rope], options) for rope, options in dict.fromkeys(_kinds(spec))),
        embed_scale=float(scale),
        logit_softcap=spec.logit_softcap,
        is_split=share.size > 1,
        leaves_halves=any(layer.norms != "before" for layer in spec.layers),
    )


def _kinds(spec: ModelSpec) -> list[tuple[int, AttentionOptions]]:
    """Of each layer: its rope, and how it attends."""
    return [
        (rope, AttentionOptions(of.scale, of.softcap, of.window))
        for rope, of in zip(spec.rope_ids, attentions_of(spec), strict=True)
    ]
