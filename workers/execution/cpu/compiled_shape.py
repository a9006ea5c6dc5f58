"""Shape of a model in the form of the compiled CPU kernels (for the models of compiled_limits.py). Knows no weights."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ....kernels.attention.paged_batch import AttentionOptions
from ....kernels.cpu.experts import ExpertSizes, Gate
from ....kernels.cpu.layer import AttentionKind, DecoderShape
from ....kernels.cpu.linear import Epilogue
from ....kernels.elementwise.gate_mul import ALPHA, LIMIT
from ...models.families.spec import Activation, AttentionSpec, MlpSpec, ModelSpec, MoeSpec
from ...models.layers.rope import Ropes
from ...models.plan.compiled_limits import mixtures_of
from ...models.plan.sharding import WHOLE, Share

GATES: dict[Activation, Epilogue] = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}
EXPERT_GATES: dict[Activation, Gate] = {
    **{activation: Gate(then) for activation, then in GATES.items()},
    "swiglu_clamped": Gate(Epilogue.CLAMPED_MUL, ALPHA, LIMIT),
}


@dataclass(frozen=True, slots=True)
class SparseShape:
    """`layers`: those that may attend sparsely, to `num_chosen` blocks."""

    layers: frozenset[int] = frozenset()
    num_chosen: int = 0


NOT_SPARSE = SparseShape()


def attentions_of(spec: ModelSpec) -> list[AttentionSpec]:
    """Attention of each layer, of a spec that the kernels compute."""
    return [layer.attention for layer in spec.layers if isinstance(layer.attention, AttentionSpec)]


def attention_ids(spec: ModelSpec, sparse: Collection[int] = ()) -> list[int]:
    """Index of each layer's attention in its DecoderShape's `attentions`. sparse: layers that attend sparsely."""
    kinds = _kinds(spec, sparse)
    return [list(dict.fromkeys(kinds)).index(kind) for kind in kinds]


def gate_of(mlp: MlpSpec) -> Epilogue:
    return GATES[mlp.activation]


def shape_of(
    spec: ModelSpec,
    cos_sin: Ropes,
    block_size: int,
    dtype: torch.dtype,
    share: Share = WHOLE,
    sparse: SparseShape = NOT_SPARSE,
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
        attentions=tuple(
            AttentionKind(cos_sin[rope], options, is_sparse)
            for rope, options, is_sparse in dict.fromkeys(_kinds(spec, sparse.layers))
        ),
        embed_scale=float(scale),
        logit_softcap=spec.logit_softcap,
        is_split=share.size > 1,
        leaves_halves=any(layer.norms != "before" for layer in spec.layers),
        experts=None if mixture is None else _expert_sizes(mixture, spec.hidden_size, dtype),
        num_experts=0 if mixture is None else mixture.num_experts,
        num_chosen=sparse.num_chosen,
    )


def _expert_sizes(of: MoeSpec, hidden_size: int, dtype: torch.dtype) -> ExpertSizes:
    return ExpertSizes(of.num_experts, of.routing.top_k, hidden_size, of.expert.intermediate_size, dtype)


def _kinds(spec: ModelSpec, sparse: Collection[int]) -> list[tuple[int, AttentionOptions, bool]]:
    """Rope and attention options of each layer, and whether it is one of `sparse`."""
    return [
        (rope, AttentionOptions(of.scale, of.softcap, of.window), i in sparse)
        for i, (rope, of) in enumerate(zip(spec.rope_ids, attentions_of(spec), strict=True))
    ]
