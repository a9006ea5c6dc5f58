"""Log-probabilities of a prompt's tokens as columns: computed by steps, sent over the wire. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...proto import worker_pb2
from .errors import InternalError
from .request import MAX_LOGPROBS

MAX_POSITIONS = 4096  # in one message: with the most alternatives, 700 KB


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of N consecutive tokens of a prompt, each given those before it, and of the K most likely
    tokens in its place. Natural logarithms; of the raw logits, before any sampling parameter."""

    first: int  # position in the prompt, at least 1: the first token has none
    logprobs: NDArray[np.float32]  # [N]
    ranks: NDArray[np.int32]  # [N], from 1: how many tokens were likelier, and 1
    top_ids: NDArray[np.int32]  # [N, K], best first
    top_logprobs: NDArray[np.float32]  # [N, K]

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.first + len(self.logprobs)

    def between(self, first: int, end: int) -> "PromptLogprobs":
        """The part of positions [first, end), which must be here."""
        rows = slice(first - self.first, end - self.first)
        return PromptLogprobs(first, self.logprobs[rows], self.ranks[rows], self.top_ids[rows], self.top_logprobs[rows])

    def pieces(self, num: int = MAX_POSITIONS) -> Iterator["PromptLogprobs"]:
        """Split it into parts of a limited number of positions."""
        for first in range(self.first, self.end, num):
            yield self.between(first, min(first + num, self.end))

    @classmethod
    def joined(cls, parts: Sequence["PromptLogprobs"]) -> "PromptLogprobs":
        """Join at least one part; each begins where the previous one ends."""
        columns = zip(*((p.logprobs, p.ranks, p.top_ids, p.top_logprobs) for p in parts), strict=True)
        logprobs, ranks, top_ids, top_logprobs = columns
        return cls(
            parts[0].first,
            np.concatenate(logprobs),
            np.concatenate(ranks),
            np.concatenate(top_ids),
            np.concatenate(top_logprobs),
        )

    def to_proto(self, handle: int) -> worker_pb2.PromptLogprobs:
        return worker_pb2.PromptLogprobs(
            handle=handle,
            first=self.first,
            logprobs=self.logprobs.tolist(),
            ranks=self.ranks.tolist(),
            top_token_ids=self.top_ids.ravel().tolist(),
            top_logprobs=self.top_logprobs.ravel().tolist(),
        )

    @classmethod
    def from_proto(cls, message: worker_pb2.PromptLogprobs, vocab_size: int) -> "PromptLogprobs":
        """Raises InternalError for columns that do not fit together."""
        num, num_tops = len(message.logprobs), len(message.top_token_ids)
        is_whole = 0 < num == len(message.ranks) and num_tops == len(message.top_logprobs) and num_tops % num == 0
        if not (is_whole and num <= MAX_POSITIONS and num_tops <= num * MAX_LOGPROBS and message.first > 0):
            raise InternalError(f"a message has inconsistent prompt log-probabilities of {num} tokens")
        top_ids = np.array(message.top_token_ids, dtype=np.int64)
        if num_tops and top_ids.max() >= vocab_size:
            raise InternalError(f"a message has token {top_ids.max()}, outside the vocabulary of {vocab_size}")
        return cls(
            message.first,
            np.array(message.logprobs, dtype=np.float32),
            np.minimum(np.array(message.ranks, dtype=np.int64), vocab_size).astype(np.int32),
            top_ids.astype(np.int32).reshape(num, -1),
            np.array(message.top_logprobs, dtype=np.float32).reshape(num, -1),
        )
