"""HeadSpec: a draft head described by data. Knows no tensor.

A head drafts the tokens after those that the target has computed, from the target's own hidden states. Its entry at
position i has the embedding of token i + 1 and the target's hidden state of token i, is rotated as position i, and
predicts token i + 2. So vLLM sets them: `EagleProposer.propose` in vllm/v1/spec_decode/eagle.py shifts the token ids by
one and keeps the target's positions. Trainers may count from 1 (speculators does): rotary attention sees only
differences of positions. A further draft step adds the entry i + 1, of the token just drafted and of the hidden state
that the head itself returned for entry i.
"""

from dataclasses import dataclass
from enum import Enum, auto

from ..families.spec import KVShape, ModelSpec


class HiddenState(Enum):
    """Kind of the target's hidden states that a head is given."""

    AFTER_LAYERS = auto()  # the residual after each of HeadSpec.hidden_layers layers, not normed
    FINAL = auto()  # the residual after the last layer, before the final norm
    FINAL_NORMED = auto()  # after the final norm: what the target's own head is given


@dataclass(frozen=True, slots=True)
class HeadSpec:
    method: str  # "eagle3" or "mtp"
    decoder: ModelSpec  # its own layers: their KV, their ropes, the target's vocabulary, the head's hidden size
    draft_vocab_size: int
    target_hidden_size: int
    takes: HiddenState
    hidden_layers: tuple[int, ...] = ()  # after how many of the target's layers; 0: its embeddings

    @property
    def kv(self) -> KVShape:
        """KV that its layers keep of each entry."""
        return self.decoder.kv

    @property
    def aux_size(self) -> int:
        """Numbers of one token that `enter` is given."""
        return max(len(self.hidden_layers), 1) * self.target_hidden_size
