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
    PREFIX = "prefix"  # the beginning of the prompt, no token
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """Part of a request that one worker computes."""

    handle: int
    worker: str  # incarnation
    part: Part
    has_token: bool = False
    offers: list[str] = field(default_factory=list[str])  # hand-off ids of its migrations


class WorkerToken(NamedTuple):
    """Token as a worker sent it."""

    position: int  # in the request's output, counted from 0
    token_id: int
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None
    num_cached: int | None = None
    timings: SequenceTimings | None = None  # only with the first token of a worker request


@dataclass(frozen=True, slots=True)
class ChooseRoute:
    """Choose a route, then call `begin`, or `fail` where there is none."""


@dataclass(frozen=True, slots=True)
class ChooseSink:
    """Choose a decode worker for the offer that `source` still holds, then call `begin_sink`."""

    source: str


@dataclass(frozen=True, slots=True)
class PrefixPull:
    """Offer of the KV of the leading tokens, at `worker`."""

    worker: str
    handoff_id: str
    num_computing: int = 0  # tokens that it computes meanwhile; 0: they are cached there


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit a worker request. `handoff_id`: of a source or a sink; `source`: worker that a sink pulls from; `move_at`:
    of a PREFIX, its number of tokens."""

    worker_request: WorkerRequest
    output_token_ids: tuple[int, ...]
    handoff_id: str | None = None
    source: str | None = None
    prefix: PrefixPull | None = None
    move_at: int | None = None


@dataclass(frozen=True, slots=True)
class OfferSequence:
    """Hand off the running worker request."""

    worker_request: WorkerRequest
    handoff_id: str


@dataclass(frozen=True, slots=True)
class OfferPrefix:
    """Tell `worker` to offer its KV of the first `num_tokens` tokens of prompt and output."""

    worker: str
    handoff_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Note the first token of a worker request, or that a PREFIX is computed. A PREFILL or PREFIX one computes nothing
    after it."""

    worker_request: WorkerRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Close a worker request that still runs: its worker must stop."""

    worker_request: WorkerRequest


@dataclass(frozen=True, slots=True)
class Forget:
    """Close a worker request that has ended at its worker."""

    worker_request: WorkerRequest


Action = ChooseRoute | ChooseSink | Submit | OfferSequence | OfferPrefix | FirstToken | Abort | Forget
Actions = Sequence[Action]
