"""Tokens of one request so far, their details, and what the caller has taken of them. Pure."""

from ...workers.common.request import FinishReason, Request
from ...workers.core.embedding import Embedding
from .actions import TokenNotes
from .output.prompt_state import PromptState
from .token_source import TokenDelta, TokenLogprob

MAX_DELTA_TOKENS = 128  # for a slow reader: a token with log-probabilities takes 0.1 ms to send


class RequestOutput:
    def __init__(self, request: Request) -> None:
        self.token_ids: list[int] = []
        self.notes = TokenNotes()
        self.prompt = PromptState(request)
        self.logprobs: list[TokenLogprob] = []  # of tokens that are not taken yet, if they are asked for
        self.num_taken = 0  # of token_ids
        self._num_prompt = len(request.prompt_token_ids)

    def embed(self, found: Embedding) -> None:
        """Take the embedding. Raises InternalError where none is due."""
        self.prompt.embed(found)
        num_stored = min(found.num_stored, self._num_prompt - found.num_cached)
        self.notes = TokenNotes(found.num_cached, num_stored, timings=[found.timings])

    def take(self, finish: FinishReason | None, elapsed_s: float = 0.0) -> TokenDelta | None:
        """Tokens since the last call, at most MAX_DELTA_TOKENS; None: there are none. `finish`: of the request;
        `elapsed_s`: since receipt."""
        first, num, embedding = self.num_taken, len(self.token_ids), None
        if first == num and (embedding := self.prompt.take_embedding()) is None:
            return None
        self.num_taken = end = min(num, first + MAX_DELTA_TOKENS)
        logprobs, self.logprobs = self.logprobs[: end - first], self.logprobs[end - first :]
        return TokenDelta(
            token_ids=tuple(self.token_ids[first:end]),
            logprobs=tuple(logprobs),
            finish_reason=finish if end == num else None,
            num_cached_tokens=0 if first else self.notes.num_cached,
            num_stored_tokens=0 if first else self.notes.num_stored,
            prompt_logprobs=() if first else self.prompt.take(),
            elapsed_s=elapsed_s,
            drafts=self.notes.drafts,
            embedding=embedding,
            origins=self.notes.origins,
        )
