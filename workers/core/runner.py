"""Interface between an engine and what computes: ModelRunner (models) and FakeRunner (tests) are Runners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...proto import inference_pb2
from ..common.errors import ConfigError
from ..common.request import Request, SamplingParams
from ..kv.layout import KVLayout
from ..kv.memory import KVMemory
from .draft import GuardedProposer
from .embedding import EmbeddingSpec
from .sequence import NEVER, Batch, IsHere, SampledToken


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_experts: tuple[int, ...] = ()  # of each layer; empty: no layer has any
    embedding: EmbeddingSpec | None = None  # None: it has none
    sparse_budget: int = 0  # tokens that a decode attends to at most, where it does not to all: see decoding.py
    sparse_by_default: bool = True  # of requests that do not say, too

    def sparse_from(self, request: Request) -> int:
        """Return Sequence.sparse_from of a request's sequence."""
        asked = request.sparse_attention
        is_wanted = self.sparse_by_default if asked is None else asked
        return self.sparse_budget if self.sparse_budget and is_wanted else NEVER

    def check_same(self, other: "ModelInfo") -> None:
        """Raise ConfigError where `other`, a worker's, differs in more than context length (bounded by each worker's
        memory) and dtype (KV is converted). Weights are not compared."""
        rows = [
            f"{f.name}: {getattr(other, f.name)}, served: {getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in ("max_context_tokens", "dtype") and getattr(other, f.name) != getattr(self, f.name)
        ]
        if rows:
            raise ConfigError(
                "the worker's model differs from the cluster's (" + "; ".join(rows) + "): start it with the same model"
            )

    @classmethod
    def from_proto(cls, message: inference_pb2.ModelInfo) -> "ModelInfo":
        """Read what a message has of it."""
        return cls(
            name=message.name,
            architecture=message.architecture,
            vocab_size=message.vocab_size,
            max_context_tokens=message.max_context_tokens,
            eos_token_ids=tuple(message.eos_token_ids),
            dtype=message.dtype,
            embedding=EmbeddingSpec.from_proto(message.embedding) if message.HasField("embedding") else None,
        )

    def to_proto(self, version: str) -> inference_pb2.ModelInfo:
        return inference_pb2.ModelInfo(
            name=self.name,
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            max_context_tokens=self.max_context_tokens,
            eos_token_ids=self.eos_token_ids,
            dtype=self.dtype,
            version=version,
            embedding=None if self.embedding is None else self.embedding.to_proto(),
        )


@dataclass(frozen=True, slots=True)
class LayerWatch:
    """Callback that learns, while a step runs, how many layers hold the KV of all of the step's tokens."""

    ends: Sequence[int]  # layers, ascending; the last is all of them
    reached: Callable[[int], object]  # called once with each of `ends`, in order, on the engine's thread


class InFlightStep(Protocol):
    """A step that was launched and whose tokens were not taken yet."""

    def sample(self, is_here: IsHere) -> None:
        """Sample what waited for the tokens of the step before, which are recorded: rows that follow a grammar. It is
        known then which of these have a run (Matcher.has_run). What has left may get any token. Called before anything
        is launched after this step; only the first call does something, and `tokens` does it where it was not called.
        Raises what `launch` may."""
        ...

    def tokens(self) -> list[SampledToken]:
        """Wait until it is computed: one sampled token for each entry that `samples`, in order; of a DraftEntry, what
        its `settle` returns. Once; raises whatever went wrong."""
        ...

    def abandon(self) -> None:
        """Drop its tokens: returns once nothing of it runs, and raises nothing."""
        ...


class Runner(Protocol):
    """Owns weights and KV memory. `max_context_tokens` never exceeds what the KV memory can hold."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def memory(self) -> KVMemory: ...

    @property
    def proposer(self) -> GuardedProposer | None:
        """The proposer that drafts with a model, in the same KV memory; None: no model does."""
        ...

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> InFlightStep:
        """Compute the new tokens of a batch that is not empty into the cache, and sample; returns at once where it can.

        When `watch` is told, the KV of those layers is in memory that transports may read, of every rank. A batch that
        has `previous_entries` is launched while the batch before it, and no other, is under way. Batches are computed
        in the order of their launch.
        """
        ...

    @property
    def has_borrowed_cores(self) -> bool:
        """True where the last step was computed on cores of other workers too: the next may take longer."""
        ...

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        """Return whether a sequence with this sampling may be in a batch with `previous_entries`, which is launched
        before the sequence's last token is known. One that follows a grammar is sampled once that is: see
        InFlightStep.sample."""
        ...

    def expert_tokens(self) -> npt.NDArray[np.int64] | None:
        """[layers, experts]: number of tokens sent to each since the start; None: the model has no experts. A step
        that is under way may be counted in part."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of all layers and ranks, (from, to), before what is launched later is computed. A step that is
        under way may write the slots of a source after those that the copy is for. Only a source is in two pairs."""
        ...

    def check(self) -> None:
        """Check the ranks; called when there is nothing to compute, at once and then from time to time. Raises
        RankLost where nothing could be computed any more."""
        ...

    def close(self) -> None: ...
