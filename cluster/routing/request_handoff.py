"""Hand-off between two worker requests of a request, until the sink's first token has its place. Pure bookkeeping.

    PREFILL -> DECODE    the source makes one token, and is sealed by it
    running -> DECODE    (live: a migration) the source makes tokens until it says that it is sealed, or until the
                         sink's first token shows that it was. Before that it runs on; the sink may fail without harm

The sink's tokens come by another stream: they are held here until all of the source's tokens have come.
"""

from dataclasses import dataclass, field

from ...workers.common.errors import DiptychError, InternalError
from .actions import CountedTokens, Part, PrefixPull, Submit, WorkerRequest, WorkerToken


class Gap(Exception):
    """Raised for a token that came before the one at `expected`."""

    def __init__(self, position: int, expected: int) -> None:
        super().__init__(position, expected)
        self.error = InternalError(f"a worker sent the token at position {position} where {expected} was next")


@dataclass(slots=True, eq=False)
class PromptSplit:
    """Prompt whose first `move_at` tokens `source` computes for another worker, which does everything after them."""

    id: str
    source: WorkerRequest
    sink: WorkerRequest  # the last
    output_token_ids: tuple[int, ...]  # of the request so far
    move_at: int
    may_send_another_sink: bool = True
    sink_error: DiptychError | None = None  # of the last sink, until another is chosen
    source_counts: CountedTokens | None = None  # of its part of the prompt; None: it has not said that it is computed

    def submit_source(self, prefix: PrefixPull | None) -> Submit:
        return Submit(self.source, (), self.id, prefix=prefix, move_at=self.move_at)

    def submit_sink(self, sink: WorkerRequest) -> Submit:
        return Submit(sink, self.output_token_ids, prefix=PrefixPull(self.source.worker, self.id, self.move_at))

    def count(self, sink: CountedTokens) -> CountedTokens:
        """Count as cached what neither worker computed, and as stored what either computed and added to its prefix
        cache. Where the sink did not pull, what the source computed was of no use."""
        source = self.source_counts or CountedTokens(0, 0)
        if not sink.num_pulled:
            return sink
        num_cached = source.num_cached + max(sink.num_cached - self.move_at, 0)
        return CountedTokens(num_cached, source.num_stored + sink.num_stored)


@dataclass(slots=True, eq=False)
class RequestHandoff:
    id: str
    source: WorkerRequest
    sink: WorkerRequest | None  # None: it failed
    output_token_ids: tuple[int, ...]  # of the request when the offer was made; sent to every sink
    end: int | None = None  # position after the source's last token; None: it continues
    is_sealed: bool = False  # all tokens of the source have come
    may_send_another_sink: bool = True
    sink_error: DiptychError | None = None  # error of the last sink
    _early: list[WorkerToken] = field(default_factory=list[WorkerToken])  # tokens of the sink that are held

    @property
    def is_live(self) -> bool:
        return self.source.part is not Part.PREFILL

    @property
    def runs_on(self) -> bool:
        """Return whether the source goes on without a sink."""
        return self.is_live and not self.is_sealed and not self._early

    def was_offered(self, worker_request: WorkerRequest, handoff_id: str) -> bool:
        """Return whether it is the source of this migration, and was offered under that id."""
        return self.is_live and worker_request is self.source and handoff_id in worker_request.offers

    def submit_sink(self, sink: WorkerRequest) -> Submit:
        return Submit(sink, self.output_token_ids, self.id, self.source.worker)

    def check_source(self, token: WorkerToken) -> None:
        """Raises Gap for a token that the source cannot make."""
        if self.end is not None and token.position >= self.end:
            raise Gap(token.position, self.end)

    def hold(self, token: WorkerToken, num_tokens: int, max_tokens: int) -> None:
        """Hold a sink's token; `num_tokens`: tokens of the request so far. Drops a repeated token. Raises Gap."""
        if self._early:
            expected = self._early[0].position + len(self._early)
        elif self.end is not None:
            expected = self.end
        else:
            expected = max(token.position, num_tokens)
        if token.position > expected or token.position >= max_tokens:
            raise Gap(token.position, expected)
        if token.position == expected:
            self._early.append(token)

    def seal(self, num_tokens: int) -> None:
        """Note that all of the source's tokens have come: `num_tokens`. Raises Gap where the sink began after them."""
        self.is_sealed, self.end = True, num_tokens
        if self._early and self._early[0].position > num_tokens:
            raise Gap(self._early[0].position, num_tokens)

    def is_joined(self, num_tokens: int) -> bool:
        """Return whether the sink's tokens follow the request's `num_tokens` without a gap."""
        return bool(self._early) and self._early[0].position == num_tokens

    def take_early(self) -> list[WorkerToken]:
        early, self._early = self._early, []
        return early
