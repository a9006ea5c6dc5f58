"""The seam between the front door and the router: token deltas come up, requests and aborts go down.

The front door owns everything above it (text, ids, seeds, stop strings, n completions, usage), the router everything
below (workers, routes, resumption). Neither knows the other's insides.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from ..workers.request import Request
from ..workers.runner import ModelInfo
from ..workers.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (nats) of one sampled token and of the most likely ones, (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one completion, as the router got them from a worker."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # parallel to token_ids; empty unless asked for
    finish_reason: FinishReason | None = None  # set on the last delta
    num_cached_tokens: int = 0  # prompt tokens found in a prefix cache; set on the first delta


@dataclass(frozen=True, slots=True)
class Health:
    """`ready`: a request sent now would be computed. A mixed worker counts in `num_mixed_workers` alone."""

    ready: bool
    num_prefill_workers: int = 0
    num_decode_workers: int = 0
    num_mixed_workers: int = 0
    num_requests: int = 0  # in flight at this router


class TokenSource(Protocol):
    """Computes requests; the Router is one."""

    def model(self) -> ModelInfo:
        """The served model. Raises Unavailable before the first worker is known."""
        ...

    def admit(self, num_sequences: int) -> None:
        """Raise Overloaded where that many sequences more would be too many; reserves nothing."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[TokenDelta, None]:
        """The completion's tokens, ending after the delta with a finish reason. Closing the generator (`aclose`) aborts
        the request. Raises DiptychErrors."""
        ...

    def health(self) -> Health: ...

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        ...
