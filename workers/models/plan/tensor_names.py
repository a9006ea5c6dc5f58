"""Tensors of a Hugging Face checkpoint that make up a decoder, by name and shape, and how ranks share them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import accumulate

from ..families.spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, TokenInputSpec

Shape = tuple[int, ...]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Of an MLP: gate, up, down.
MLP = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERT = ("w1", "w3", "w2")
NORMS = {
    "before": {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "both": {
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
# For a mixture beside an MLP.
NORMS_BESIDE = {
    "beside_out_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_out_norm": "post_feedforward_layernorm_2",
}
FUSED = {"Phi3ForCausalLM"}  # q, k and v in one tensor, gate and up in another
OTHER_PARTS = {  # that a decoder is one of, by their prefixes, which "model." may be before
    "Gemma3ForConditionalGeneration": ("vision_tower.", "multi_modal_projector."),
    "Gemma4ForConditionalGeneration": ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    "Gemma4UnifiedForConditionalGeneration": ("vision_embedder.", "embed_vision.", "embed_audio."),
}
BASE = ("embed_tokens.", "layers.", "norm.")  # prefixes in checkpoints of a decoder alone, without its head
# Prefixes of modules that predict one more token, beside a target, and of the weight by which they are known, which may
# be quantised.
MODULES = {"mtp.": "mtp.fc.", "mtp_layers.": "mtp_layers.0.input_proj."}
TEXT = {"language_model.": "", "model.language_model.": "model."}  # prefixes of the decoder, older and newer; its own


class Cut(Enum):
    """Part of a matrix [outputs, inputs], or of its bias [outputs], that a rank holds."""

    WHOLE = auto()
    HEADS = auto()  # outputs, by query head
    KV_HEADS = auto()  # outputs, by key-value head; neighbouring ranks hold the same one where there are too few
    HEAD_INPUTS = auto()  # inputs, by query head
    INNER = auto()  # outputs, of an MLP's inner dimension
    INNER_INPUTS = auto()  # inputs, of it
    VOCABULARY = auto()  # outputs, by token


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensor of a checkpoint, or a part of it, that is stacked with others into a field of LayerWeights.

    tensor as stored -> [at] -> transposed -> a rank's cut -> order of a head's rows -> + offset
    """

    name: str
    shape: Shape  # of the tensor, as stored
    cut: Cut = Cut.WHOLE
    num_kv_heads: int = 0  # that a Cut.KV_HEADS divides
    at: tuple[int | slice, ...] = ()  # of its first axes; a slice may have a step
    transposed: bool = False  # the two axes that are left then
    order: tuple[int, ...] = ()  # of the rows of each head, by their place as stored; (): as they are
    offset: float = 0.0  # added to every number, in float32
    expert: int | None = None  # the expert that it belongs to; pieces of one expert are adjacent
    is_wide: bool = False  # float32, whatever the dtype of the rest

    @property
    def own_shape(self) -> Shape:
        """Shape of the tensor's part, as it goes into the field of a worker of one rank."""
        own = [len(range(n)[of]) for n, of in zip(self.shape, self.at, strict=False) if isinstance(of, slice)]
        own += self.shape[len(self.at) :]
        return tuple(own[::-1] if self.transposed else own)


Pieces = tuple[Piece, ...]


def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, Pieces]:
    """Return the pieces stacked into each field of LayerWeights."""
    of, prefix = spec.layers[layer], f"model.layers.{layer}."
    fields = _norms(spec, of, prefix)
    if isinstance(of.attention, LatentSpec):
        fields |= _latent(spec, of.attention, f"{prefix}self_attn.")
    else:
        fields |= _attention(spec, of.attention, f"{prefix}self_attn.")
    if of.token_input is not None:
        fields |= _token_input(spec, of.token_input, prefix)
    if of.is_scaled:
        fields["scale"] = (Piece(f"{prefix}layer_scalar", (1,)),)
    if of.beside is not None:
        fields |= _mlp(spec, of.beside, f"{prefix}mlp.")
    if isinstance(of.feed_forward, MoeSpec):
        return fields | MIXTURES.get(spec.architecture, _moe)(spec, of.feed_forward, prefix)
    return fields | _mlp(spec, of.feed_forward, f"{prefix}mlp.")


def outer_tensors(spec: ModelSpec, *, has_own_head: bool = False) -> dict[str, Pieces]:
    """Names for the fields of DecoderWeights outside its layers. `has_own_head`: so has a head that is tied to the
    embeddings (formats.py)."""
    matrix = (spec.vocab_size, spec.hidden_size)
    fields: dict[str, Pieces] = {
        "embed": (Piece(EMBED, matrix, Cut.VOCABULARY),),
        "norm": (_norm(spec, "model.norm"),),
    }
    if (own := spec.token_input) is not None:
        wide = spec.num_layers * own.dim
        fields |= {
            "token_embed": (Piece("model.embed_tokens_per_layer.weight", (own.vocab_size, wide), Cut.VOCABULARY),),
            "token_mix": (Piece("model.per_layer_model_projection.weight", (wide, spec.hidden_size)),),
            "token_mix_norm": (replace(_norm(spec, "model.per_layer_projection_norm"), shape=(own.dim,)),),
        }
    if spec.tie_word_embeddings:
        return fields | {"lm_head": fields["embed"]} if has_own_head else fields
    return fields | {"lm_head": (Piece(HEAD, matrix, Cut.VOCABULARY),)}


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor of a checkpoint of `spec`: name -> shape."""
    fields = [outer_tensors(spec), *(layer_tensors(spec, i) for i in range(spec.num_layers))]
    return {piece.name: piece.shape for of in fields for pieces in of.values() for piece in pieces}


def spare_tensors(spec: ModelSpec, names: Iterable[str]) -> set[str]:
    """Return those of `names` that a checkpoint may hold and nothing here computes with: tables of angles, which older
    ones store; modules that predict one more token (DeepSeek-V3, 2.2), which are MODULES, or layers beyond the last,
    known by their eh_proj; and what would make KV of layers that read that of others."""
    held = set(names)
    spare = {name for name in held if name.endswith("rotary_emb.inv_freq")}
    for i, layer in enumerate(spec.layers):
        if isinstance(layer.attention, AttentionSpec) and layer.attention.kv_from is not None:
            unused = tuple(f"model.layers.{i}.self_attn.{of}." for of in ("k_proj", "v_proj", "k_norm", "v_norm"))
            spare |= {name for name in held if name.startswith(unused)}
    modules = {name.partition("eh_proj.")[0] for name in held if ".eh_proj." in name}
    for name in held:
        found = re.match(r"model\.layers\.(\d+)\.", name)
        if found and int(found[1]) >= spec.num_layers and found[0] in modules:
            spare.add(name)
    for prefix, known_by in MODULES.items():
        if any(name.startswith(known_by) for name in held):
            spare |= {name for name in held if name.startswith(prefix)}
    return spare


def own_name(spec: ModelSpec, stored: str) -> str | None:
    """Return this package's name of a checkpoint's tensor; None: it is of a part that is not served, and left out."""
    others = OTHER_PARTS.get(spec.architecture)
    if others is None:
        return f"model.{stored}" if stored.startswith(BASE) else stored
    if stored.removeprefix("model.").startswith(others):
        return None
    for prefix, own in TEXT.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def _norms(spec: ModelSpec, layer: LayerSpec, prefix: str) -> dict[str, Pieces]:
    names = NORMS[layer.norms] | ({} if layer.beside is None else NORMS_BESIDE)
    return {field: (_norm(spec, f"{prefix}{name}"),) for field, name in names.items()}


def _norm(spec: ModelSpec, name: str) -> Piece:
    return Piece(f"{name}.weight", (spec.hidden_size,), offset=spec.norm_offset, is_wide=spec.wide_norms)


def _attention(spec: ModelSpec, attention: AttentionSpec, prefix: str) -> dict[str, Pieces]:
    num_kv_heads, head_dim = attention.num_kv_heads, attention.head_dim
    has_kv, order = attention.kv_from is None, head_order(attention)
    value = "k_proj" if attention.keys_are_values else "v_proj"

    def stacked(of: str, *inputs: int) -> Pieces:
        """The weights or biases of all three; of queries alone, where there are no others."""
        pieces = [Piece(f"{prefix}q_proj.{of}", (attention.q_size, *inputs), Cut.HEADS, order=order)]
        for name, own_order in (("k_proj", order), (value, ())) if has_kv else ():
            shape = (attention.kv_size, *inputs)
            pieces.append(Piece(f"{prefix}{name}.{of}", shape, Cut.KV_HEADS, num_kv_heads, order=own_order))
        return fused(f"{prefix}qkv_proj.{of}", pieces) if spec.architecture in FUSED else tuple(pieces)

    fields: dict[str, Pieces] = {
        "qkv": stacked("weight", spec.hidden_size),
        "o": (Piece(f"{prefix}o_proj.weight", (spec.hidden_size, attention.q_size), Cut.HEAD_INPUTS),),
    }
    match attention.qk_norm:
        case "head":
            norm = replace(_norm(spec, f"{prefix}q_norm"), shape=(head_dim,), order=order)
            fields["q_norm"] = (norm,)
            if has_kv:
                fields["k_norm"] = (replace(norm, name=f"{prefix}k_norm.weight"),)
        case "whole":
            norm = replace(_norm(spec, f"{prefix}q_norm"), shape=(attention.q_size,), cut=Cut.HEADS, order=order)
            kv = replace(norm, name=f"{prefix}k_norm.weight", shape=(attention.kv_size,))
            kv = replace(kv, cut=Cut.KV_HEADS, num_kv_heads=num_kv_heads)
            fields |= {"q_norm": (norm,), "k_norm": (kv,)}
        case "none":
            pass
    if attention.qkv_bias:
        fields["qkv_bias"] = stacked("bias")
    if attention.o_bias:
        fields["o_bias"] = (Piece(f"{prefix}o_proj.bias", (spec.hidden_size,)),)
    if attention.sinks:
        fields["sinks"] = (Piece(f"{prefix}sinks", (attention.num_heads,), Cut.HEADS, is_wide=True),)
    return fields


def _latent(spec: ModelSpec, of: LatentSpec, prefix: str) -> dict[str, Pieces]:
    hidden, heads = spec.hidden_size, of.num_heads
    turned = range(of.rope_dim)
    if of.is_interleaved:
        turned = (*turned[::2], *turned[1::2])
    q_order = (*range(of.nope_dim), *(of.nope_dim + i for i in turned))
    kv_order = (*range(of.kv_rank), *(of.kv_rank + i for i in turned))
    q_b = Piece(f"{prefix}q_b_proj.weight", (heads * of.q_dim, of.q_rank), Cut.HEADS, order=q_order)
    q = Piece(f"{prefix}q_a_proj.weight", (of.q_rank, hidden))
    if not of.q_rank:
        q = replace(q_b, name=f"{prefix}q_proj.weight", shape=(heads * of.q_dim, hidden))
    kv = Piece(f"{prefix}kv_a_proj_with_mqa.weight", (of.kv_dim, hidden), order=kv_order)
    kv_b = (heads * (of.nope_dim + of.value_dim), of.kv_rank)
    fields: dict[str, Pieces] = {
        "qkv": (q, kv),
        "k_norm": (Piece(f"{prefix}kv_a_layernorm.weight", (of.kv_rank,)),),
        "kv_b": (Piece(f"{prefix}kv_b_proj.weight", kv_b, Cut.HEADS),),
        "o": (Piece(f"{prefix}o_proj.weight", (hidden, heads * of.value_dim), Cut.HEAD_INPUTS),),
    }
    if of.q_rank:
        fields["q_norm"] = (Piece(f"{prefix}q_a_layernorm.weight", (of.q_rank,)),)
        fields["q_b"] = (q_b,)
    if of.bias:
        biases = (replace(of, name=of.name.replace("weight", "bias"), shape=of.shape[:1]) for of in (q, kv))
        fields |= {"qkv_bias": tuple(biases), "o_bias": (Piece(f"{prefix}o_proj.bias", (hidden,)),)}
    return fields


def fused(name: str, pieces: Sequence[Piece]) -> Pieces:
    """Pieces that are below one another in one tensor of the checkpoint, as rows of it."""
    rows = [piece.shape[0] for piece in pieces]
    ends = list(accumulate(rows))
    shape = (ends[-1], *pieces[0].shape[1:])
    return tuple(
        replace(piece, name=name, shape=shape, at=(slice(end - n, end),))
        for piece, n, end in zip(pieces, rows, ends, strict=True)
    )


def head_order(attention: AttentionSpec) -> tuple[int, ...]:
    """Return the order of the rows of a query or key head. Kernels rotate whole heads, pairs being half a head apart:
    where a part of a head is rotated, its halves go to the beginnings of the head's, and the rest beside them, where
    its angles are 0."""
    dim, rotated = attention.head_dim, attention.rope.rotated(attention.head_dim)
    if rotated == dim:
        return ()
    half, middle = rotated // 2, (dim + rotated) // 2
    return (*range(half), *range(rotated, middle), *range(half, rotated), *range(middle, dim))


def _mlp(spec: ModelSpec, mlp: MlpSpec, prefix: str, expert: int | None = None) -> dict[str, Pieces]:
    names = MIXTRAL_EXPERT if expert is not None and spec.architecture == "MixtralForCausalLM" else MLP
    hidden, inner, (*gate_up, down) = spec.hidden_size, mlp.intermediate_size, names
    pieces = tuple(Piece(f"{prefix}{name}.weight", (inner, hidden), Cut.INNER, expert=expert) for name in gate_up)
    fields: dict[str, Pieces] = {
        "gate_up": fused(f"{prefix}gate_up_proj.weight", pieces) if spec.architecture in FUSED else pieces,
        "down": (Piece(f"{prefix}{down}.weight", (hidden, inner), Cut.INNER_INPUTS, expert=expert),),
    }
    if mlp.bias:
        fields["gate_up_bias"] = tuple(Piece(f"{prefix}{name}.bias", (inner,), Cut.INNER) for name in gate_up)
        fields["down_bias"] = (Piece(f"{prefix}{down}.bias", (hidden,)),)
    return fields


def _moe(spec: ModelSpec, moe: MoeSpec, prefix: str) -> dict[str, Pieces]:
    prefix += "block_sparse_moe." if spec.architecture == "MixtralForCausalLM" else "mlp."
    matrix = (moe.num_experts, spec.hidden_size)
    fields: dict[str, Pieces] = {"router": (Piece(f"{prefix}gate.weight", matrix, is_wide=True),)}
    if moe.routing.choice_bias:
        bias = f"{prefix}gate.e_score_correction_bias"
        fields["choice_bias"] = (Piece(bias, (moe.num_experts,), is_wide=True),)
    experts = [_mlp(spec, moe.expert, f"{prefix}experts.{e}.", e) for e in range(moe.num_experts)]
    fields |= {f"experts_{field}": tuple(p for of in experts for p in of[field]) for field in experts[0]}
    if moe.shared is not None:
        shared = _mlp(spec, moe.shared, f"{prefix}shared_experts.")
        fields |= {f"shared_{field}": pieces for field, pieces in shared.items()}
    return fields


def _token_input(spec: ModelSpec, own: TokenInputSpec, prefix: str) -> dict[str, Pieces]:
    """Everybody's: it is little, and between two norms there would be a sum of all ranks more."""
    return {
        "token_gate": (Piece(f"{prefix}per_layer_input_gate.weight", (own.dim, spec.hidden_size)),),
        "token_out": (Piece(f"{prefix}per_layer_projection.weight", (spec.hidden_size, own.dim)),),
        "token_out_norm": (_norm(spec, f"{prefix}post_per_layer_input_norm"),),
    }


def _gemma4_moe(spec: ModelSpec, moe: MoeSpec, prefix: str) -> dict[str, Pieces]:
    """A tensor has all experts' weights; of gate and up, those of one above those of the other."""
    num, hidden, inner = moe.num_experts, spec.hidden_size, moe.expert.intermediate_size
    gate_up, down = (num, 2 * inner, hidden), (num, hidden, inner)
    halves = [(e, slice(start, start + inner)) for e in range(num) for start in (0, inner)]
    return {
        "router": (Piece(f"{prefix}router.proj.weight", (num, hidden), is_wide=True),),
        "router_norm": (Piece(f"{prefix}router.scale", (hidden,)),),
        "expert_scales": (Piece(f"{prefix}router.per_expert_scale", (num,), is_wide=True),),
        "experts_gate_up": tuple(
            Piece(f"{prefix}experts.gate_up_proj", gate_up, Cut.INNER, at=half, expert=half[0]) for half in halves
        ),
        "experts_down": tuple(
            Piece(f"{prefix}experts.down_proj", down, Cut.INNER_INPUTS, at=(e,), expert=e) for e in range(num)
        ),
    }


def _gpt_oss_moe(spec: ModelSpec, moe: MoeSpec, prefix: str) -> dict[str, Pieces]:
    """A tensor has all experts' weights, inputs before outputs; of gate and up, one by one, in turn."""
    prefix += "mlp."
    experts, hidden, inner = range(moe.num_experts), spec.hidden_size, moe.expert.intermediate_size
    num, name, rows = len(experts), f"{prefix}experts.", slice(None)
    turns = [(e, slice(first, None, 2)) for e in experts for first in (0, 1)]

    def gate_up(e: int, turn: slice) -> Piece:
        shape = (num, hidden, 2 * inner)
        return Piece(f"{name}gate_up_proj", shape, Cut.INNER, at=(e, rows, turn), transposed=True, expert=e)

    def down(e: int) -> Piece:
        shape = (num, inner, hidden)
        return Piece(f"{name}down_proj", shape, Cut.INNER_INPUTS, at=(e,), transposed=True, expert=e)

    return {
        "router": (Piece(f"{prefix}router.weight", (num, hidden), is_wide=True),),
        "router_bias": (Piece(f"{prefix}router.bias", (num,), is_wide=True),),
        "experts_gate_up": tuple(gate_up(e, turn) for e, turn in turns),
        "experts_down": tuple(down(e) for e in experts),
        "experts_gate_up_bias": tuple(
            Piece(f"{name}gate_up_proj_bias", (num, 2 * inner), Cut.INNER, at=(e, turn), expert=e) for e, turn in turns
        ),
        "experts_down_bias": tuple(Piece(f"{name}down_proj_bias", (num, hidden), at=(e,), expert=e) for e in experts),
    }


# Of architectures whose mixtures go by other names than most.
MIXTURES = {
    "GptOssForCausalLM": _gpt_oss_moe,
    "Gemma4ForCausalLM": _gemma4_moe,
    "Gemma4ForConditionalGeneration": _gemma4_moe,
}
