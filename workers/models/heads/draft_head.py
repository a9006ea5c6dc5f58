"""The interface of a draft head. Knows neither sequences nor sampling.

    aux [T, A]  ── enter ──>  hidden [T, H] ─┐
    token ids [T] ───────────────────────────┴─ forward ──>  hidden [T, H] ── logits ──> [T, draft vocab]
                                                 ^                 │
                                                 └── a further step ┘

head_spec.py says which token and which hidden state belong together. A head is computed whole, by one rank.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...device.kv_cache import KVCache
from ..head_specs.head_spec import HeadSpec
from ..layers.attention import StepMeta


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights of the whole target, which a head uses where it has none of its own. V: the target's vocabulary."""

    embed: Tensor  # [V, target's H], not scaled
    lm_head: Tensor  # [V, target's H]


class DraftHead(Protocol):
    """A loaded head. H is its own hidden size; A is `spec.aux_size`."""

    @property
    def spec(self) -> HeadSpec: ...

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
