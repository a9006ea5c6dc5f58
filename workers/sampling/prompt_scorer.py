"""Logits of a step's prompt rows to log-probabilities, a piece of the rows at a time: not all of them fit memory."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention.paged_batch import sent
from ..common.prompt_logprobs import PromptLogprobs
from ..core.sequence import Sequence
from .prompt_rows import PromptRows

PIECE_BYTES = 64 << 20  # of logits

LogsumexpTopK = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]  # see kernels/sampling/logsumexp.py


def pieces_of(rows: NDArray[np.int32], vocab_size: int) -> Iterator[NDArray[np.int32]]:
    """The rows, in order, as many at a time as all ranks take."""
    num = max(PIECE_BYTES // (4 * vocab_size), 1)
    for first in range(0, len(rows), num):
        yield rows[first : first + num]


class PromptScorer:
    """Scores the prompt rows of one step."""

    def __init__(self, rows: PromptRows, logsumexp_top_k: LogsumexpTopK) -> None:
        self._rows, self._logsumexp_top_k = rows, logsumexp_top_k
        self._num_added = 0
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, logits: Tensor) -> None:
        """logits: [r, vocab] float32, raw, of the next r rows."""
        targets = sent(self._rows.targets[self._num_added : self._num_added + len(logits)], logits.device).long()
        self._num_added += len(logits)
        num_top = min(self._rows.num_top, logits.shape[1])
        totals, top_ids, top_logits = self._logsumexp_top_k(logits, num_top)
        own = logits.gather(1, targets[:, None])
        ranks = (logits > own).sum(dim=1, dtype=torch.int32) + 1
        totals = totals[:, None]
        self._parts.append(((own - totals)[:, 0], ranks, top_ids.int(), top_logits - totals))

    def results(self) -> list[tuple[Sequence, PromptLogprobs]]:
        """Return the log-probabilities of the prompts, once all rows were added."""
        spans = self._rows.spans
        if not spans:
            return []
        assert self._num_added == len(self._rows.rows)
        logprobs, ranks, top_ids, top_logprobs = (
            torch.cat(column).cpu().numpy() for column in zip(*self._parts, strict=True)
        )
        found: list[tuple[Sequence, PromptLogprobs]] = []
        start = 0
        for span in spans:
            of = slice(start, start := start + span.end - span.first)
            num_top = span.sequence.request.sampling.prompt_logprobs
            columns = PromptLogprobs(
                span.first, logprobs[of], ranks[of], top_ids[of, :num_top], top_logprobs[of, :num_top]
            )
            found.append((span.sequence, columns))
        return found
