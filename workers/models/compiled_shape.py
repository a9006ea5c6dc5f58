"""What the compiled CPU kernels make of a ModelSpec, or why they do not compute it. Knows no weights."""

from collections.abc import Iterator

import torch

from ...kernels.cpu.experts import ExpertSizes
from ...kernels.cpu.layer import AttentionKind, DecoderShape
from ...kernels.cpu.linear import Then
from ...kernels.cpu.routing import MOST_EXPERTS
from ...kernels.paged_batch import AttentionOptions
from .rope import Ropes
from .sharding import WHOLE, Share
from .spec import Activation, AttentionSpec, MlpSpec, ModelSpec, MoeSpec

GATES: dict[Activation, Then] = {"silu": Then.SILU_MUL, "gelu_tanh": Then.GELU_MUL}


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
        elif attention.kv_from is not None:
            yield "layers that read another one's keys and values"
        elif attention.scale <= 0:
            yield "scores that are not scaled by a number above 0"
        elif attention.qk_norm == "whole" and num_ranks > 1:
            yield "a norm of all heads that are spread over ranks"
        elif attention.v_norm:
            yield "a norm of values"
        if layer.token_input is not None or layer.is_scaled:
            yield "layers with an input of each token or a scale of their own"
        if layer.beside is not None:
            yield "an MLP beside experts"
        if isinstance(mlp, MoeSpec):
            yield from _unknown_experts(mlp)
        elif mlp.activation not in GATES:
            yield f"the activation {mlp.activation}"
    if len(set(map(_sizes_of_mixture, mixtures_of(spec)))) > 1:
        yield "mixtures of other sizes from layer to layer"


def _unknown_experts(of: MoeSpec) -> Iterator[str]:
    if of.shared is not None:
        yield "experts that every token has"
    if of.expert.activation not in GATES:
        yield f"the activation {of.expert.activation}"
    if of.num_experts > MOST_EXPERTS:
        yield f"mixtures of more than {MOST_EXPERTS} experts"


def _sizes_of_mixture(of: MoeSpec) -> tuple[int, int, int]:
    return of.num_experts, of.routing.top_k, of.expert.intermediate_size


def mixtures_of(spec: ModelSpec) -> list[MoeSpec]:
    """Of the layers that have one."""
    return [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MoeSpec)]


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


def gate_of(mlp: MlpSpec) -> Then:
    return GATES[mlp.activation]


def shape_of(
    spec: ModelSpec, cos_sin: Ropes, block_size: int, dtype: torch.dtype, share: Share = WHOLE
) -> DecoderShape:
    """spec: of `share`, of one that the kernels compute. cos_sin: of each of its ropes."""
    attention = attentions_of(spec)[0]
    tokens = share.vocabulary(spec.vocab_size)
    dense = (layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MlpSpec))
    mixture = next(iter(mixtures_of(spec)), None)
    scale = torch.tensor(spec.embedding_scale, dtype=dtype)  # is rounded, as transformers does
    return DecoderShape(
        block_size=block_size,
        hidden_size=spec.hidden_size,
        inner_size=max((of.intermediate_size for of in dense), default=0),
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
        experts=None if mixture is None else _expert_sizes(mixture, spec.hidden_size, dtype),
        num_experts=0 if mixture is None else mixture.num_experts,
    )


def _expert_sizes(of: MoeSpec, hidden_size: int, dtype: torch.dtype) -> ExpertSizes:
    return ExpertSizes(of.num_experts, of.routing.top_k, hidden_size, of.expert.intermediate_size, dtype)


def _kinds(spec: ModelSpec) -> list[tuple[int, AttentionOptions]]:
    """Of each layer: its rope, and how it attends."""
    return [
        (rope, AttentionOptions(of.scale, of.softcap, of.window))
        for rope, of in zip(spec.rope_ids, attentions_of(spec), strict=True)
    ]
