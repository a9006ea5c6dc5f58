"""Penalties of the tokens that a sequence has already.

Each token is counted once, when it is new: a long context costs a step no more than its different tokens do.
"""

from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.sequence import DraftedRow, SampledRow, Sequence

Ints = NDArray[np.int64]


class TokenCounts:
    """Different tokens of a text that grows, from its token `first` on, and how often each is there."""

    def __init__(self, first: int) -> None:
        self._num_read = first
        self._places: dict[int, int] = {}  # of each token in the two columns
        self._ids, self._counts = array("q"), array("q")

    def catch_up(self, token_ids: SequenceOf[int]) -> None:
        """Count what the text has gained."""
        assert self._num_read <= len(token_ids), "a sequence has lost tokens"
        for token_id, num in Counter(token_ids[self._num_read :]).items():
            place = self._places.setdefault(token_id, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += num
        self._num_read = len(token_ids)

    def columns(self, following: SequenceOf[int] = ()) -> tuple[Ints, Ints]:
        """Tokens, each once, and their counts, as they are if a few tokens follow."""
        ids, counts = np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.int64)
        added = Counter(following)
        for token_id in added.keys() & self._places.keys():
            counts[self._places[token_id]] += added.pop(token_id)
        new = np.array([*added.items()], dtype=np.int64).reshape(-1, 2)
        return np.concatenate((ids, new[:, 0])), np.concatenate((counts, new[:, 1]))


class Penalties:
    """Counts of the sequences that are penalised, each as long as its sequence lives."""

    def __init__(self) -> None:
        self._whole: WeakKeyDictionary[Sequence, TokenCounts] = WeakKeyDictionary()
        self._output: WeakKeyDictionary[Sequence, TokenCounts] = WeakKeyDictionary()

    def apply(self, logits: Tensor, rows: SequenceOf[SampledRow]) -> None:
        """Repetition penalty over prompt and output; presence and frequency penalties over output. logits:
        [R, vocab] float32, one row a sequence, changed in place."""
        for number, row in enumerate(rows):
            sampling = row.request.sampling
            if sampling.repetition_penalty != 1.0:
                seen = torch.from_numpy(_columns_of(row, self._whole, 0)[0]).to(logits.device)
                values, penalty = logits[number, seen], sampling.repetition_penalty
                logits[number, seen] = torch.where(values > 0, values / penalty, values * penalty)
            if row.num_output and (sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0):
                ids, counts = _columns_of(row, self._output, row.num_prompt)
                amounts = sampling.presence_penalty + sampling.frequency_penalty * counts
                logits[number, torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(amounts).to(logits)


def _columns_of(row: SampledRow, known: WeakKeyDictionary[Sequence, TokenCounts], first: int) -> tuple[Ints, Ints]:
    sequence = row.sequence
    counts = known.get(sequence)
    if counts is None:
        counts = known[sequence] = TokenCounts(first)
    counts.catch_up(sequence.token_ids)
    return counts.columns(row.drafted if isinstance(row, DraftedRow) else ())
