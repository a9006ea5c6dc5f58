"""The interface of a draft head. Knows neither sequences nor sampling.

    aux [T, A]  ── enter ──>  hidden [T, H] ─┐
    token ids [T] ───────────────────────────┴─ forward ──>  hidden [T, H] ── logits ──> [T, draft vocab]
                                                 ^                 │
                                                 └── a further step ┘

head_spec.py says which token and which hidden state belong together. A head is computed whole, by one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ....kernels.elementwise.rms_norm import rms_norm
from ...device.kv_cache import KVCache
from ..checkpoint.weights import LayerWeights
from ..head_specs.head_spec import HeadSpec
from ..layers.attention import StepMeta


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights of the whole target, which a head uses where it has none of its own. V: the target's vocabulary."""

    embed: Tensor  # [V, target's H], not scaled
    lm_head: Tensor  # [V, target's H]


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Weights of a head by their use, of both kinds. H: its hidden size; A: `HeadSpec.aux_size`; V: the target's
    vocabulary; D: the draft's."""

    layers: list[LayerWeights]
    first_kv_layer: int  # layer of the cache that is the first one's
    embed: Tensor  # [V, H]
    embed_norm: Tensor  # [H]
    hidden_norm: Tensor  # [H]
    norm: Tensor  # [H]
    lm_head: Tensor  # [D, H]
    fc: Tensor | None = None  # [H, A]; None: what the target leaves is a hidden state
    joined: Tensor | None = None  # [H, 2H]; None: the first layer reads an embedding and a hidden state side by side
    to_target: Tensor | None = None  # [D] int64; None: the vocabularies are the same
    aux_norms: tuple[Tensor, ...] = ()  # of the numbers that fc reads: one of [A], or one of each hidden state
    norms_residual: bool = False  # the residual begins as the normed hidden state
    norms_output: bool = False  # fed back is the hidden state after `norm`


def norm_aux(aux: Tensor, norms: Sequence[Tensor], eps: float) -> Tensor:
    """aux: [T, A]; norms: HeadParts.aux_norms. Returns [T, A]."""
    if not norms:
        return aux
    parts = aux.split([len(of) for of in norms], dim=1)
    return torch.cat([rms_norm(part.contiguous(), of, eps) for part, of in zip(parts, norms, strict=True)], dim=1)


class DraftHead(Protocol):
    """A loaded head. H is its own hidden size; A is `spec.aux_size`."""

    @property
    def spec(self) -> HeadSpec: ...

    @property
    def parts(self) -> HeadParts:
        """Weights, for who computes the head otherwise."""
        ...

    def enter(self, aux: Tensor) -> Tensor:
        """aux: [T, A], the target's hidden states that `spec.takes` names, in the order of `spec.hidden_layers`.
        Returns the hidden input of the first draft step, [T, H]."""
        ...

    def forward(self, token_ids: Tensor, hidden: Tensor, cache: KVCache, meta: StepMeta) -> Tensor:
        """token_ids: [T] int64, at each entry the token after that of its hidden state; hidden: [T, H], from `enter` or
        from `forward`. meta: of the entries' positions and slots; its cos_sin are of `spec.decoder.ropes`. Stores the
        entries' KV in the head's layers of `cache`; returns the hidden states that are fed back, [T, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H], rows that `forward` returned. Returns [R, draft vocab] float32."""
        ...

    def to_target(self, ids: Tensor) -> Tensor:
        """ids: [R] int64, of the draft vocabulary. Returns the target's ids of these tokens, [R] int64."""
        ...
