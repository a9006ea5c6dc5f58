"""Passes of a draft head over the paged cache: what whoever drafts asks for, and how torch computes it.

store    the KV of entries, of which nothing is drafted
first    entries up to the last token of each sequence, from what the target left   ->  logits of its next token
further  an entry of the token that was drafted, and of the hidden state that the pass before returned
greedy   all passes of drafts of the likeliest tokens at once, where that is an option
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...device.kv_cache import KVCache
from ..layers.rope import Ropes
from ..layers.step import Step
from .draft_head import DraftHead


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Results of a pass over S sequences; valid until the next pass."""

    hidden: Tensor  # [S, H], which is fed back
    logits: Tensor  # [S, draft vocab] float32


@dataclass(frozen=True, slots=True)
class GreedyDrafts:
    """Drafted tokens of S sequences, of the target's vocabulary."""

    token_ids: list[list[int]]  # by pass, each of the sequences that it was of
    chances: list[list[float]]


class HostPasses(Protocol):
    """Computes a head's passes on the host. Steps are of its entries; `first` is of each sequence's last one, too."""

    def store(self, step: Step, aux: Tensor) -> None:
        """aux: [T, A], what the target left of the tokens of the entries."""
        ...

    def first(self, step: Step, aux: Tensor) -> PassOutput: ...

    def further(self, step: Step, hidden: Tensor) -> PassOutput:
        """hidden: [S, H], of each sequence, as the pass before returned it."""
        ...

    def greedy(self, step: Step, aux: Tensor, num_active: Sequence[int]) -> GreedyDrafts | None:
        """num_active: of each pass, how many of the sequences it drafts for, the first ones: all, and then never more.
        None: not an option."""
        ...


class TorchPasses:
    """HostPasses of any head."""

    def __init__(self, head: DraftHead, cache: KVCache, cos_sin: Ropes) -> None:
        """cos_sin: of the head's ropes."""
        self._head, self._cache, self._cos_sin = head, cache, cos_sin
        self._block_size = cache.layout.block_size

    def store(self, step: Step, aux: Tensor) -> None:
        self._forward(step, self._head.enter(aux))

    def first(self, step: Step, aux: Tensor) -> PassOutput:
        hidden = self._forward(step, self._head.enter(aux))
        return self._output(hidden[torch.from_numpy(step.sampled).to(hidden.device).long()])

    def further(self, step: Step, hidden: Tensor) -> PassOutput:
        return self._output(self._forward(step, hidden))

    def greedy(self, step: Step, aux: Tensor, num_active: Sequence[int]) -> GreedyDrafts | None:
        return None

    def _forward(self, step: Step, hidden: Tensor) -> Tensor:
        """hidden: [T, H], the head's input. Returns its output, [T, H]."""
        token_ids = torch.from_numpy(step.token_ids).to(hidden.device).long()
        return self._head.forward(token_ids, hidden, self._cache, step.meta(self._cos_sin, self._block_size))

    def _output(self, hidden: Tensor) -> PassOutput:
        return PassOutput(hidden, self._head.logits(hidden))
