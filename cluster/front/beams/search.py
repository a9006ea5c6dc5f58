"""Beam search: the most likely answers to a prompt, `width` of them. Pure: knows no request.

    running: one beam without tokens ──extend (the most likely next tokens of each)──> the `width` best that go on
                                          └── those of the best that end ──> ended
    is_over: `max_tokens` made | no beam that runs can become better than the `width` best that have ended

Scores, and what ends, are as in transformers with `early_stopping="never"`: a score is the sum of the log-probabilities
of a beam's tokens, divided by their number to the power of the length penalty; a beam ends where its end token is among
the `width` best continuations.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...routing.token_source import TokenLogprob


@dataclass(frozen=True, slots=True)
class Beam:
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to token_ids, where they are kept
    total: float = 0.0  # log-probability of all (nats)
    has_ended: bool = False  # by its last token


class BeamSearch:
    def __init__(
        self,
        width: int,
        max_tokens: int,
        end_ids: Collection[int],
        length_penalty: float,
        min_tokens: int = 0,
        num_top: int | None = None,
    ) -> None:
        """`end_ids`: tokens that end an answer, from `min_tokens` on. `num_top`: alternatives of each token that are
        kept with its log-probability; None: neither is."""
        assert width > 0 and max_tokens > 0
        self.running = [Beam()]
        self._width = width
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        self._length_penalty = length_penalty
        self._min_tokens = min_tokens
        self._num_top = num_top
        self._ended: list[Beam] = []  # the best, best first
        self._num_tokens = 0  # of each running beam

    @property
    def num_next(self) -> int:
        """Number of next tokens of each running beam that `extend` needs: as many may go on beside those that end."""
        return self._width + len(self._end_ids)

    @property
    def is_over(self) -> bool:
        return not self.running

    def extend(self, next_tokens: Sequence[Sequence[tuple[int, float]]]) -> None:
        """next_tokens: of each running beam its `num_next` most likely next tokens, (token id, logprob), best first."""
        self._num_tokens += 1
        may_end = self._num_tokens >= self._min_tokens
        found = [
            (beam.total + logprob, beam, token_id, logprob, top)
            for beam, top in zip(self.running, next_tokens, strict=True)
            for token_id, logprob in top
            if may_end or token_id not in self._end_ids
        ]
        found.sort(key=lambda each: -each[0])  # stable: of equals the better beam's comes first
        self.running = []
        for place, (total, beam, token_id, logprob, top) in enumerate(found):
            has_ended = token_id in self._end_ids
            kept = self._ended if has_ended else self.running
            if place < self._width if has_ended else len(kept) < self._width:
                logprobs = beam.logprobs
                if self._num_top is not None:
                    logprobs = (*logprobs, TokenLogprob(token_id, logprob, tuple(top[: self._num_top])))
                kept.append(Beam((*beam.token_ids, token_id), logprobs, total, has_ended))
        is_last = self._num_tokens == self._max_tokens
        if is_last:
            self._ended += self.running
        self._ended = sorted(self._ended, key=self._score, reverse=True)[: self._width]
        if is_last or (len(self._ended) == self._width and self._best_possible() <= self._score(self._ended[-1])):
            self.running = []

    def best(self) -> list[Beam]:
        """The best that have ended, best first, at most `width`."""
        return self._ended

    def _score(self, beam: Beam) -> float:
        return beam.total / len(beam.token_ids) ** self._length_penalty

    def _best_possible(self) -> float:
        """Bound on the score of whatever the running beams become: they lose probability with each token."""
        length = self._max_tokens if self._length_penalty > 0 else self._num_tokens
        return max(beam.total for beam in self.running) / length**self._length_penalty
