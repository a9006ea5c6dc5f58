"""Embeddings that an engine's steps compute: sums of pooled hidden states, until all of a prompt are there."""

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from ..common.errors import EmbeddingsNotServed, InvalidRequest
from ..common.request import Request
from ..common.timings import SequenceTimings
from ..core.embedding import Embedding, EmbeddingSpec, Pooling
from ..core.sequence import Sequence

Pooled = SequenceOf[tuple[Sequence, NDArray[np.float64]]]


class Embeddings:
    """`spec`: of the model; None: it has none."""

    def __init__(self, spec: EmbeddingSpec | None) -> None:
        self._spec = spec

    def check(self, request: Request, *, is_plain: bool) -> None:
        """Raise InvalidRequest where one is asked for and cannot be computed. is_plain: the request has no hand-off and
        no grammar."""
        if not request.embeds:
            return
        if not is_plain:
            raise InvalidRequest("an embedding is asked for with a hand-off or a grammar: it has neither")
        if self._spec is None:
            raise EmbeddingsNotServed("this model has no embeddings")
        self._spec.check()

    def begin(self, sequence: Sequence) -> None:
        """Let a new sequence be pooled, if its embedding is asked for. A mean needs the hidden states of tokens that
        are cached, too."""
        if sequence.request.embeds:
            assert self._spec is not None
            sequence.pooling = self._spec.pooling
            sequence.recomputes = sequence.pooling is Pooling.MEAN

    def add(self, pooled: Pooled) -> None:
        """Add what a step computed; call it before that counts as computed. A preempted mean begins anew."""
        for sequence, total in pooled:
            before = sequence.pooled if sequence.num_computed else None
            sequence.pooled = total if before is None else before + total

    def finished(self, sequence: Sequence, timings: SequenceTimings | None) -> tuple[str, Embedding]:
        """Key and embedding of a prompt that is computed."""
        assert self._spec is not None and sequence.pooled is not None
        vector = self._spec.finished(sequence.pooled, sequence.num_prompt)
        return sequence.key, Embedding(vector, sequence.num_cached, sequence.num_stored, timings)
