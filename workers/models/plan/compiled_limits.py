"""Limits of the compiled CPU kernels: what a worker does by them and what a plan counts follow from it. No torch."""

from collections.abc import Iterator

from ....kernels.cpu.limits import LARGEST_HEAD_DIM, MOST_EXPERTS
from ...kv.dtypes import stored_size
from ...kv.layout import GROUP
from ..families.spec import Activation, AttentionSpec, ModelSpec, MoeSpec

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
EXPERT_ACTIVATIONS: tuple[Activation, ...] = (*ACTIVATIONS, "swiglu_clamped")


def why_torch(
    spec: ModelSpec, block_size: int, num_ranks: int = 1, *, kv_dtype: str = "auto", whole_experts: bool = False
) -> str | None:
    """Return why torch computes a worker, at full size where its weights are to be quantised, though the kernels are
    built; None: they compute it. block_size, kv_dtype: of its KV cache; whole_experts: ranks have some, whole."""
    if whole_experts:
        return "the compiled kernels do not know experts that ranks hold whole"
    if (unknown := why_not(spec, num_ranks)) is not None:
        return f"the compiled kernels do not compute {unknown}"
    head_dim = spec.kv.dim
    if block_size % GROUP:
        return f"block_size {block_size} is not a multiple of {GROUP}"
    if (size := stored_size(kv_dtype, head_dim)) % GROUP:
        return f"head_dim {head_dim} is not a multiple of {GROUP * head_dim // size}"
    return f"head_dim {head_dim} is above {LARGEST_HEAD_DIM}" if head_dim > LARGEST_HEAD_DIM else None


def why_not(spec: ModelSpec, num_ranks: int = 1) -> str | None:
    """Return what of the model the kernels do not compute, as text for the log; None: they compute it all."""
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
        elif mlp.activation not in ACTIVATIONS:
            yield f"the activation {mlp.activation}"
    if len(set(map(_sizes_of_mixture, mixtures_of(spec)))) > 1:
        yield "mixtures of other sizes from layer to layer"


def _unknown_experts(of: MoeSpec) -> Iterator[str]:
    if of.shared is not None:
        yield "experts that every token has"
    if of.expert.activation not in EXPERT_ACTIVATIONS:
        yield f"the activation {of.expert.activation}"
    if of.num_experts > MOST_EXPERTS:
        yield f"mixtures of more than {MOST_EXPERTS} experts"


def _sizes_of_mixture(of: MoeSpec) -> tuple[int, int, int]:
    return of.num_experts, of.routing.top_k, of.expert.intermediate_size


def mixtures_of(spec: ModelSpec) -> list[MoeSpec]:
    """Mixtures of the layers that have one."""
    return [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MoeSpec)]


def _sizes(attention: object) -> tuple[int, int, int] | None:
    if not isinstance(attention, AttentionSpec):
        return None
    return attention.num_heads, attention.num_kv_heads, attention.head_dim
