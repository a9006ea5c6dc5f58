"""ModelSpec: a decoder described by data, layer by layer. Knows no tensor and no other library.

registry.py makes it of a Hugging Face config.json; everything else (names of tensors, shares of ranks, layouts of KV,
what computes) follows from it, so that no file knows a family by its name.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped"]
# Positions of RMSNorms: before attention and feed-forward, after them (on their outputs), or both.
Norms = Literal["before", "after", "both"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding parameters, named as in transformers' `rope_parameters`."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor and the mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope, of each frequency
    long_factors: tuple[float, ...] = ()  # longrope, for contexts beyond original_max_position_embeddings
    # Two readings of transformers' `partial_rotary_factor`: of all numbers of a head the first ones, which alone are
    # rotated, or, of proportional, of all its frequencies the first ones, the others being 0.
    partial: float = 1.0
    turning: float = 1.0

    def rotated(self, dim: int) -> int:
        """Return how many numbers of a head of `dim` are rotated."""
        return int(dim * self.partial)

    def is_long(self, num_positions: int) -> bool:
        """Return whether contexts that may be so long have frequencies that shorter ones have not."""
        return self.rope_type == "longrope" and num_positions > self.original_max_position_embeddings


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023) of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float  # of the scores
    window: int = 0  # 0: all; otherwise a token attends to this many tokens, including itself
    softcap: float = 0.0  # 0: none; else scores become softcap * tanh(score / softcap)
    sinks: bool = False  # a score of each head that takes weight and gives no value
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "whole"] = "none"  # RMSNorm of each query and key head, or over all heads at once
    kv_from: int | None = None  # an earlier layer whose keys and values it reads instead of its own
    v_norm: bool = False  # RMSNorm of each value head, without a weight
    keys_are_values: bool = False  # values are what keys are before their norm and rope

    @property
    def rotation(self) -> tuple[RopeSpec, int]:
        return self.rope, self.head_dim

    @property
    def q_dim(self) -> int:
        """Size of a query head, under the name that LatentSpec has for it; so is value_dim."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, 2.1) of one layer. The cache holds kv_rank + rope_dim of a token."""

    num_heads: int
    q_rank: int  # 0: queries are projected at once
    kv_rank: int
    nope_dim: int  # of a query or key head, not rotated
    rope_dim: int  # of a query head, and of the one key that all heads share, rotated
    value_dim: int
    rope: RopeSpec
    scale: float
    bias: bool = False
    is_interleaved: bool = True  # as stored, the two numbers that one angle rotates are neighbours
    norm_eps: float = 1e-6  # of the norms of latents, whatever the model's other norms have

    @property
    def rotation(self) -> tuple[RopeSpec, int]:
        return self.rope, self.rope_dim

    @property
    def q_dim(self) -> int:
        """Size of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def kv_dim(self) -> int:
        """Size of what the cache holds of a token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(act(gate x) * up x) (Shazeer 2020)."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Routing of tokens to experts, in the terms of kernels/moe/moe_routing.py."""

    top_k: int
    sigmoid: bool = False  # else softmax
    renormalise: bool = True  # the weights of a token sum to `scale`
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_by_two: bool = False
    choice_bias: bool = False  # a learned bias used only for the choice (DeepSeek-V3, 2.1.2)
    router_bias: bool = False  # a learned bias of the router's product (gpt-oss)
    router_norm: bool = False  # the router reads the residual through a separate norm (Gemma 4)
    logit_scale: float = 1.0  # of the router's product
    expert_scales: bool = False  # a learned factor of each expert's weights, in the end (Gemma 4)


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts, each an MLP; `shared` adds its own to every token."""

    num_experts: int
    expert: MlpSpec
    routing: RoutingSpec
    shared: MlpSpec | None = None


@dataclass(frozen=True, slots=True)
class TokenInputSpec:
    """Input of a layer for each token beside the residual: `dim` numbers, from a table of its own and from the
    embeddings; see token_inputs.py."""

    dim: int
    vocab_size: int  # of the table
    activation: Activation


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: AttentionSpec | LatentSpec
    feed_forward: MlpSpec | MoeSpec
    norms: Norms = "before"
    beside: MlpSpec | None = None  # of a mixture: is added to it, both between norms of their own
    token_input: TokenInputSpec | None = None  # the same in all layers
    is_scaled: bool = False  # its output, the residual, is multiplied by a separate number

    @property
    def kv_from(self) -> int | None:
        """The earlier layer whose KV it reads, where it keeps none itself."""
        return self.attention.kv_from if isinstance(self.attention, AttentionSpec) else None

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """All kinds that it has."""
        of = self.feed_forward
        if isinstance(of, MlpSpec):
            return (of,)
        return tuple(mlp for mlp in (of.expert, of.shared, self.beside) if mlp is not None)


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of a layer's KV for one token: `num_vectors` (key and value, or one latent) of `dim` numbers of each of
    `num_heads` heads."""

    num_layers: int  # that keep any
    num_heads: int
    dim: int
    num_vectors: int = 2
    layer_shapes: tuple[tuple[int, int], ...] = ()  # (num_heads, dim) of each of them, where they are unlike

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(num_heads, dim) of each layer."""
        return self.layer_shapes or ((self.num_heads, self.dim),) * self.num_layers


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """embedding -> layers -> RMSNorm -> head."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    max_position_embeddings: int  # from config.json: the longest context by default
    longest_context: int  # that may be asked for: more where yarn stretches it
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none
    norm_offset: float = 0.0  # added to every norm's weight as stored (Gemma: 1)
    wide_norms: bool = False  # normed values meet the weight in float32; else they are rounded first

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> tuple[int, ...]:
        """Number of experts of each layer; empty where no layer has any."""
        each = tuple(of.num_experts if isinstance(of := layer.feed_forward, MoeSpec) else 0 for layer in self.layers)
        return each if any(each) else ()

    @property
    def token_input(self) -> TokenInputSpec | None:
        return self.layers[0].token_input

    @property
    def ropes(self) -> tuple[tuple[RopeSpec, int], ...]:
        """Each that some layer has, and how many numbers of a head it rotates."""
        return tuple(dict.fromkeys(layer.attention.rotation for layer in self.layers))

    @property
    def rope_ids(self) -> tuple[int, ...]:
        """Index of each layer's rope in `ropes`."""
        ropes = self.ropes
        return tuple(ropes.index(layer.attention.rotation) for layer in self.layers)

    @property
    def kv_ids(self) -> tuple[int, ...]:
        """Index, for each layer, of the KV that it reads, counted among the layers that keep KV: its own, or that of an
        earlier one. Layers that keep KV are stored, handed off and counted; a KVCache has no others."""
        ids: list[int] = []
        for layer in self.layers:
            source = layer.kv_from
            ids.append(max(ids, default=-1) + 1 if source is None else ids[source])
        return tuple(ids)

    @property
    def kv(self) -> KVShape:
        keeping = [layer.attention for layer in self.layers if layer.kv_from is None]
        shapes = [_kept(attention) for attention in keeping]
        num_vectors = 1 if isinstance(keeping[0], LatentSpec) else 2
        unlike = tuple(shapes) if len(set(shapes)) > 1 else ()
        return KVShape(len(shapes), *shapes[0], num_vectors, unlike)


def _kept(attention: AttentionSpec | LatentSpec) -> tuple[int, int]:
    """(heads, numbers of each) of which it keeps KV."""
    if isinstance(attention, LatentSpec):
        return 1, attention.kv_dim
    return attention.num_kv_heads, attention.head_dim
