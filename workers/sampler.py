"""Logits to tokens."""

from collections.abc import Sequence as SequenceOf

from torch import Tensor

from .sequence import SampledToken, Sequence


class Sampler:
    def sample(self, logits: Tensor, sequences: SequenceOf[Sequence]) -> list[SampledToken]:
        """logits: [R, vocab] float32, one row a sequence. Returns one token a row."""
        tokens = logits.argmax(dim=-1).tolist()
        return [SampledToken(sequence, token) for sequence, token in zip(sequences, tokens, strict=True)]
