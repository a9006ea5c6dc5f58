"""Worker requests, the tokens that they make, and the actions that a RequestState returns. Data only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ...workers.common.request import FinishReason
from ...workers.common.timings import SequenceTimings
from .token_source import TokenLogprob


class Part(Enum):
    ALONE = "alone"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class WorkerRequest:
    handle: int
    worker: str  # incarnation
    part: Part
    has_token: bool = False
    offers: list[str] = field(default_factory=list[str])  # hand-off ids under which it was to migrate


class WorkerToken(NamedTuple):
    position: int  # in the request's output, from 0
    token_id: int
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None
    num_cached: int | None = None
    timings: SequenceTimings | None = None  # with its worker request's first


@dataclass(frozen=True, slots=True)
class ChooseRoute:
    """A route is needed: answer with `begin`, or `fail` when there is none."""


@dataclass(frozen=True, slots=True)
class ChooseSink:
    """A decode worker is needed for an offer that stands at `source`: answer with `begin_sink`."""

    source: str


@dataclass(frozen=True, slots=True)
class PrefixPull:
    """The KV of the leading tokens is offered by `worker`."""

    worker: str
    handoff_id: str


@dataclass(frozen=True, slots=True)
class Submit:
    """`handoff_id`: where the worker request is a source or a sink; `source`: the worker that a sink pulls from."""

    worker_request: WorkerRequest
    output_token_ids: tuple[int, ...]
    handoff_id: str | None = None
    source: str | None = None
    prefix: PrefixPull | None = None


@dataclass(frozen=True, slots=True)
class OfferSequence:
    """Hand off the running worker request."""

    worker_request: WorkerRequest
    handoff_id: str


@dataclass(frozen=True, slots=True)
class OfferPrefix:
    """Have `worker` offer its KV of the request's first `num_tokens` tokens, of its prompt and its output so far."""

    worker: str
    handoff_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The worker request's first token is here. A PREFILL worker request computes nothing from here on."""

    worker_request: WorkerRequest


@dataclass(frozen=True, slots=True)
class Abort:
    worker_request: WorkerRequest


@dataclass(frozen=True, slots=True)
class Forget:
    worker_request: WorkerRequest


Action = ChooseRoute | ChooseSink | Submit | OfferSequence | OfferPrefix | FirstToken | Abort | Forget
Actions = Sequence[Action]
