"""Embeddings of prompts: how a checkpoint's are made of its hidden states, and one that was made. No torch.

The hidden states after the last norm are pooled: the last token's, or the mean of all. Then they are normalised, and
cut where the client asks for fewer numbers.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ...proto import inference_pb2, worker_pb2
from ..common.errors import EmbeddingsNotServed, InternalError, InvalidRequest
from ..common.timings import SequenceTimings

Vector = NDArray[np.float32]  # [H]
MAX_SIZE = 1 << 20  # numbers of one embedding


class Pooling(Enum):
    LAST = "last"  # the last token's hidden state
    MEAN = "mean"  # of all tokens


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Embeddings of a checkpoint: how they are made, and which a client may ask for."""

    size: int  # numbers of one
    pooling: Pooling = Pooling.LAST
    normalised: bool = True
    may_be_cut: bool = False  # the model was trained so that the first numbers of one are one (Matryoshka)
    dimensions: tuple[int, ...] = ()  # to which they may be cut; empty: to any
    refusal: str = ""  # why they cannot be computed here; empty: they can

    def check(self, num: int | None = None) -> None:
        """Raise EmbeddingsNotServed where there are none, InvalidRequest where none has `num` numbers."""
        if self.refusal:
            raise EmbeddingsNotServed(f"this model has no embeddings here: {self.refusal}")
        if num is None or num == self.size:
            return
        if not self.may_be_cut:
            raise InvalidRequest(
                f"dimensions must be {self.size} or left out: the checkpoint does not say that its embeddings may be "
                "cut (is_matryoshka or matryoshka_dimensions in its config.json)",
                param="dimensions",
            )
        if self.dimensions and num not in self.dimensions:
            known = ", ".join(map(str, self.dimensions))
            raise InvalidRequest(f"dimensions must be one of {known}, got {num}", param="dimensions")
        if not 1 <= num <= self.size:
            raise InvalidRequest(f"dimensions must be in [1, {self.size}], got {num}", param="dimensions")

    def finished(self, total: NDArray[np.float64], num_tokens: int) -> Vector:
        """Embedding of a prompt. total: [H], the sum of the pooled hidden states."""
        pooled = total if self.pooling is Pooling.LAST else total / num_tokens
        return self._normed(pooled)

    def cut(self, vector: Vector, num: int | None) -> Vector:
        """First `num` numbers of an embedding, as an embedding; None: all."""
        return vector if num is None or num == len(vector) else self._normed(vector[:num].astype(np.float64))

    def _normed(self, vector: NDArray[np.float64]) -> Vector:
        if self.normalised:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype(np.float32)

    def to_proto(self) -> inference_pb2.EmbeddingSpec:
        return inference_pb2.EmbeddingSpec(
            size=self.size,
            pooling=self.pooling.value,
            normalised=self.normalised,
            may_be_cut=self.may_be_cut,
            dimensions=self.dimensions,
            refusal=self.refusal,
        )

    @classmethod
    def from_proto(cls, message: inference_pb2.EmbeddingSpec) -> "EmbeddingSpec":
        """Raises InternalError for what no worker of this version sends."""
        if message.pooling not in {each.value for each in Pooling} or not 1 <= message.size <= MAX_SIZE:
            raise InternalError(
                f"a worker has embeddings of {message.size} numbers, pooled by {message.pooling[:20]!r}"
            )
        return cls(
            message.size,
            Pooling(message.pooling),
            message.normalised,
            message.may_be_cut,
            tuple(message.dimensions),
            message.refusal[:1000],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Embedding of one prompt, as its worker computed it."""

    vector: Vector
    num_cached: int = 0  # tokens of the prompt that were found in the prefix cache
    num_stored: int = 0  # that were computed and added to it
    timings: SequenceTimings | None = None

    def to_proto(self, handle: int) -> worker_pb2.Embedding:
        timings = None if self.timings is None else self.timings.to_proto(0)
        return worker_pb2.Embedding(
            handle=handle,
            values=self.vector.tolist(),
            num_cached=self.num_cached,
            num_stored=self.num_stored,
            timings=timings,
        )

    @classmethod
    def from_proto(cls, message: worker_pb2.Embedding) -> "Embedding":
        """Raises InternalError for numbers that none has."""
        vector = np.array(message.values, dtype=np.float32)
        if not (0 < len(vector) <= MAX_SIZE and np.isfinite(vector).all()):
            raise InternalError(f"a worker sent an embedding of {len(vector)} numbers, or of some that are not finite")
        timings = SequenceTimings.from_proto(message.timings) if message.HasField("timings") else None
        return cls(vector, message.num_cached, message.num_stored, timings)
