"""Facts of a request, the route chosen by them, its worker requests, the tokens that they make with their details, and
the actions that a RequestState returns. Data only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ...workers.common.errors import Unavailable
from ...workers.common.request import FinishReason
from ...workers.common.timings import SequenceTimings
from ..common.prediction import Level
from ..common.worker_stats import NO_DRAFTS, Drafts
from .fleet import FleetWorker
from .token_source import TokenLogprob

NUM_TIMED = 2  # first tokens of a request whose timings are kept


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts of a request that the policy needs."""

    num_tokens: int  # prompt and output so far: their KV is needed
    max_new_tokens: int
    cached_tokens: Mapping[str, int]  # by worker: number of leading tokens in its prefix cache
    excluded: frozenset[str] = frozenset()  # workers that failed this request: chosen only where no other is left
    failed_pairs: frozenset[tuple[str, str]] = frozenset()  # source and sink of failed hand-offs of this request
    may_hand_off: bool = True
    may_split: bool = False  # its prompt may be computed by two workers
    sample: int = 0  # a number that differs from request to request
    group: str = ""  # name of the group of requests for one prompt; empty: none
    group_route: "Route | None" = None  # route of the first request of the group
    level: Level | None = None  # its own; None: the cluster's

    def num_blocks(self, worker: FleetWorker) -> int:
        """Number of blocks of that worker's size, with room for the next token."""
        return -(-(self.num_tokens + 1) // worker.block_size)

    def held_tokens(self, worker: str) -> int:
        """Number of leading tokens that need not be computed there. At least one must: its logits are needed."""
        cached = self.cached_tokens.get(worker, 0) if self.cached_tokens else 0
        return cached if cached < self.num_tokens else self.num_tokens - 1

    def uncached_tokens(self, worker: str) -> int:
        """Number of tokens to compute there."""
        return self.num_tokens - self.held_tokens(worker)


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """Worker whose prefix cache holds the beginning of the prompt."""

    holder: str  # incarnation
    num_tokens: int  # leading tokens, in whole blocks of the holder


@dataclass(frozen=True, slots=True)
class Route:
    """Incarnations of the chosen workers. `prefill`: None where one worker does all. `prefix`: for the worker that
    computes the prompt, or its beginning. `move_at`: the token of the prompt at which the request moves to `decode`, a
    whole number of blocks of `prefill`; None: after its first token."""

    prefill: str | None
    decode: str
    prefix: PrefixSource | None = None
    move_at: int | None = None


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


class CountedTokens(NamedTuple):
    """Numbers of tokens of the prompt, as one worker counts."""

    num_cached: int  # found in its prefix cache, or pulled from another worker
    num_stored: int  # computed and added to its prefix cache
    num_pulled: int = 0  # of num_cached


class WorkerToken(NamedTuple):
    """Token as a worker sent it."""

    position: int  # in the request's output, counted from 0
    token_id: int
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None
    cached: CountedTokens | None = None  # only with the first token of a worker request
    timings: SequenceTimings | None = None  # only with the first token of a worker request
    drafts: Drafts | None = None  # verified since an earlier token had some
    worker: str = ""  # incarnation


@dataclass(slots=True)
class TokenNotes:
    """Details that came with the accepted tokens of a request, from whichever worker. Those of a repeated token do not
    count; a worker that is lost takes those with it that it had not sent."""

    num_cached: int = 0  # prompt tokens that no worker computed on the route of the first token
    num_stored: int = 0  # that its workers computed and added to their prefix caches
    timings: list[SequenceTimings | None] = field(default_factory=list[SequenceTimings | None])  # of the first tokens
    drafts: Drafts = NO_DRAFTS  # of all attempts
    worker: str = ""  # incarnation, of the last token
    origins: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])  # see TokenDelta

    def add(self, token: WorkerToken, num_prompt: int) -> None:
        """Take the details of a token. `num_prompt`: tokens of the prompt."""
        if token.position == 0 and token.cached is not None:
            self.num_cached = min(token.cached.num_cached, num_prompt)
            self.num_stored = min(token.cached.num_stored, num_prompt - self.num_cached)
        if token.position < NUM_TIMED:
            self.timings.append(token.timings)
        if token.worker != self.worker:
            self.worker = token.worker
            self.origins.append((token.position, token.worker))
        if token.drafts is not None:
            self.drafts = self.drafts.plus(token.drafts)


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


@dataclass(frozen=True, slots=True)
class AwaitLostWorkers:
    """Call `fail` with the error, unless a worker that was lost answers again in time: then ChooseRoute."""

    error: Unavailable


Action = (
    ChooseRoute | ChooseSink | AwaitLostWorkers | Submit | OfferSequence | OfferPrefix | FirstToken | Abort | Forget
)
Actions = Sequence[Action]
