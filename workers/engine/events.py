"""Events of a step. Plain data: the engine's thread makes it, the worker's event loop sends it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...proto import worker_pb2
from ..common.errors import DiptychError
from ..common.prompt_logprobs import PromptLogprobs
from ..common.request import FinishReason
from ..common.timings import SequenceTimings
from ..core.embedding import Embedding
from ..handoff.types import HandoffEvent


@dataclass(slots=True)  # one a token: a frozen one takes three times as long to make
class TokenEvent:
    key: str
    token_id: int
    position: int  # in the request's output, from 0
    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    num_cached: int | None = None  # with the first token of a sequence on this worker
    timings: SequenceTimings | None = None  # the same for a sink
    num_drafted: int = 0
    num_accepted: int = 0
    num_stored: int = 0  # with num_cached: tokens of the prompt that were computed and added to the prefix cache
    num_pulled: int = 0  # of num_cached, pulled from another worker


@dataclass(frozen=True, slots=True)
class TokenNote:
    """Details that only some tokens have."""

    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    num_cached: int | None = None
    timings: SequenceTimings | None = None
    num_drafted: int = 0  # tokens drafted for the sequence and verified since its last note that had some
    num_accepted: int = 0  # of them
    num_stored: int = 0
    num_pulled: int = 0


@dataclass(slots=True)
class StepTokens:
    """Tokens of a step as columns, because a step has one for every running sequence. Iterates as TokenEvents."""

    keys: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])
    notes: dict[int, TokenNote] = field(default_factory=dict[int, TokenNote])  # by entry

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def has_finish(self) -> bool:
        """True if it has the last token of an answer."""
        return any(note.finish is not None for note in self.notes.values())

    def __iter__(self) -> Iterator[TokenEvent]:
        none = TokenNote()
        for i, (key, token_id, position) in enumerate(zip(self.keys, self.token_ids, self.positions, strict=True)):
            note = self.notes.get(i, none)
            yield TokenEvent(
                key,
                token_id,
                position,
                note.finish,
                note.logprob,
                note.top,
                note.num_cached,
                note.timings,
                note.num_drafted,
                note.num_accepted,
                note.num_stored,
                note.num_pulled,
            )


@dataclass(frozen=True, slots=True)
class FailureEvent:
    key: str
    error: DiptychError


PromptLogprobsEvents = list[tuple[str, PromptLogprobs]]  # by key of the sequence
EmbeddingEvents = list[tuple[str, Embedding]]  # the same; each ends its sequence


@dataclass(slots=True)
class StepOutput:
    step: int
    ran: bool = False  # a batch was computed
    prompt_logprobs: PromptLogprobsEvents = field(default_factory=PromptLogprobsEvents)  # before the tokens
    tokens: StepTokens = field(default_factory=StepTokens)
    embeddings: EmbeddingEvents = field(default_factory=EmbeddingEvents)
    failures: list[FailureEvent] = field(default_factory=list[FailureEvent])
    handoffs: list[HandoffEvent] = field(default_factory=list[HandoffEvent])
    stored: list[bytes] = field(default_factory=list[bytes])
    removed: list[bytes] = field(default_factory=list[bytes])
    load: worker_pb2.LoadReport | None = None

    def __bool__(self) -> bool:
        return bool(
            self.tokens
            or self.prompt_logprobs
            or self.embeddings
            or self.failures
            or self.handoffs
            or self.stored
            or self.removed
            or self.load
        )
