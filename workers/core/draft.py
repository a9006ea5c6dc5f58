"""Draft: tokens that are expected to follow those of a sequence; Proposer, ModelProposer: whoever expects them.

A draft costs rows of a step, and never changes an answer: the step samples the target's own token at each row, and a
drafted token is accepted while it equals that (Leviathan et al. 2023, with drafts that are deterministic).
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from ..kv.layout import KVLayout
from .block_manager import BlockManager
from .draft_kv import DraftKV
from .prefix_cache import PrefixCache
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """`token_ids`, in order; `chances`: of each, the estimated probability that it is accepted if all before it are."""

    token_ids: list[int]
    chances: list[float]

    def __bool__(self) -> bool:
        return bool(self.token_ids)


NO_DRAFT = Draft([], [])


class Proposer(Protocol):
    """Keeps what it needs of each sequence by `Sequence.key`, and builds it from whatever tokens it sees first: a
    sequence may come from another worker. Tokens of a sequence are only ever added."""

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        """Draft of at most `max_tokens` (>= 1) tokens; empty where nothing is expected."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that has left this worker; one that was never seen, too."""
        ...


@dataclass(frozen=True, slots=True)
class ModelDrafts:
    """Drafts of several sequences, in order. `pass_s`: seconds of each pass that computed about as much as is usual;
    `beside_s`: of what the draft took beside its passes, however many these are."""

    drafts: list[Draft]
    pass_s: list[float]
    beside_s: float = 0.0


class ModelProposer(Protocol):
    """Computes drafts with a model: a pass for each token, of all sequences at once. Called between steps, on the
    thread of the engine."""

    @property
    def num_anew(self) -> int:
        """Number of tokens whose KV in the draft was computed later than in the target: it was not handed off, or not
        computed when they were decoded."""
        ...

    def attach(self, kv: DraftKV | None) -> None:
        """Take the account of which KV of the draft is there; None: the draft has no layers of its own. Once, before
        anything else."""
        ...

    def may_draft(self, sequence: Sequence) -> bool:
        """Return whether all is there that a draft of this sequence needs, or can be computed."""
        ...

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        """Draft so many tokens (>= 1) for each of these sequences, which each have one token that is not computed, and
        blocks for the draft."""
        ...

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """Note how many tokens of the last draft were accepted, before they are added to the sequence."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that has left this worker; one that was never seen, too."""
        ...


class GuardedProposer(ModelProposer, Protocol):
    """A ModelProposer that raises only where the target cannot compute either."""

    @property
    def num_failures(self) -> int:
        """Number of its calls in which an exception was raised: their sequences got no drafts."""
        ...

    @property
    def is_off(self) -> bool:
        """Return whether it failed so often that it drafts no more."""
        ...


def draft_kv_of(
    layout: KVLayout, proposer: ModelProposer | None, manager: BlockManager, cache: PrefixCache
) -> DraftKV | None:
    """Make the account of a draft's KV, and give it to whoever drafts; None: the layout has no layers of a draft."""
    kv = DraftKV(manager, layout.block_size) if layout.num_draft_layers else None
    if kv is not None:
        cache.on_replace = kv.replaced
    if proposer is not None:
        proposer.attach(kv)
    return kv
