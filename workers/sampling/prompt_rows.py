"""Rows of a step that give the log-probabilities that prompts are asked for. No torch.

The row of the token at position p - 1 tells that of the token at p. So no such row is sampled: what a prompt's last
token tells is of the first token of the output.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.sequence import ScheduledSequence, Sequence


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Positions [first, end) of a prompt."""

    sequence: Sequence
    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Q rows of a step."""

    spans: SequenceOf[PromptSpan]
    rows: NDArray[np.int32]  # [Q], ascending, in the order of `spans`
    targets: NDArray[np.int64]  # [Q], the tokens at those positions

    @classmethod
    def of(cls, entries: SequenceOf[ScheduledSequence]) -> "PromptRows":
        """Prompt rows of a step whose rows are these entries' new tokens, in order."""
        spans: list[PromptSpan] = []
        rows: list[NDArray[np.int32]] = []
        targets: list[int] = []
        first_row = 0
        for entry in entries:
            sequence, start = entry.sequence, entry.start
            first = max(sequence.next_prompt_logprob, start + 1)
            end = min(start + entry.num_new + 1, sequence.num_prompt)
            if first < end:
                spans.append(PromptSpan(sequence, first, end))
                rows.append(np.arange(first - 1 - start, end - 1 - start, dtype=np.int32) + np.int32(first_row))
                targets += sequence.token_ids[first:end]
            first_row += entry.num_new
        joined = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
        return cls(spans, joined, np.array(targets, dtype=np.int64))

    @property
    def num_top(self) -> int:
        """The most alternatives that any of them is asked for."""
        return max((span.sequence.request.sampling.prompt_logprobs or 0 for span in self.spans), default=0)
