"""The interface between the front door and the router: tokens go up, requests and aborts go down.

The front door owns text, ids, seeds, stop strings, the completions of a call and usage. The router owns workers, routes
and resumption. This file knows neither HTTP nor gRPC.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...workers.common.prompt_logprobs import PromptLogprobs
from ...workers.common.request import FinishReason, Request
from ...workers.core.embedding import Vector
from ...workers.core.runner import ModelInfo
from ..common.admission import RouterOutlook
from ..common.timings import RequestTimings
from ..common.worker_stats import NO_DRAFTS, Drafts


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (nats) of one sampled token and of the most likely ones, (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # not frozen: there is one per token, and a frozen one takes three times as long to create
class TokenDelta:
    """New tokens of one completion, as the router got them from a worker."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to token_ids; empty unless asked for
    finish_reason: FinishReason | None = None  # set on the last delta
    num_cached_tokens: int = 0  # prompt tokens found in a prefix cache; set on the first delta
    elapsed_s: float = field(default=0.0, compare=False)  # seconds since the router got the request
    timings: RequestTimings | None = field(default=None, compare=False)  # with the first two tokens and the last delta
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # all that were asked for, in order; set on the first delta
    drafts: Drafts = NO_DRAFTS  # verified for the completion so far
    embedding: Vector | None = None  # of a request that embeds: in its only delta, which has no tokens
    # Incarnations of the workers that made the completion's tokens so far, with the position of each one's first token;
    # the list of a request grows.
    origins: Sequence[tuple[int, str]] = field(default=(), compare=False)
    num_stored_tokens: int = 0  # prompt tokens that were computed and added to a prefix cache; set on the first delta


@dataclass(frozen=True, slots=True)
class Health:
    """State of a router. `ready`: a request sent now would be computed, perhaps by a worker that is
    started for it. A mixed worker counts as mixed only."""

    ready: bool
    num_prefill_workers: int = 0
    num_decode_workers: int = 0
    num_mixed_workers: int = 0
    num_requests: int = 0  # in flight at this router
    decode_tokens: Mapping[str, int] = field(default_factory=dict[str, int])  # by worker, since its start
    may_be_empty: bool = False  # all workers may leave while there are no requests


class TokenStreams(Protocol):
    """Streams of the tokens of requests."""

    def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """Tokens of the request, ending after the delta with a finish reason. Closing the generator (`aclose`) aborts
        the request. Raises DiptychErrors."""
        ...


class TokenSource(TokenStreams, Protocol):
    """Source of the tokens of requests. The Router is one."""

    def model(self) -> ModelInfo:
        """Served model. Raises Unavailable before the first worker is known."""
        ...

    def admit(self, num_sequences: int) -> None:
        """Raise Overloaded where that many sequences more would be too many; reserves nothing."""
        ...

    def health(self) -> Health: ...

    def outlook(self) -> RouterOutlook:
        """Load, and what is predicted for the least request now."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        ...
