"""Results of a request's prompt that have come so far: its log-probabilities, which a resumed request does not compute
again, or its embedding."""

import sys

from ....workers.common.errors import InternalError
from ....workers.common.prompt_logprobs import PromptLogprobs
from ....workers.common.request import Request
from ....workers.core.embedding import Embedding, Vector


class PromptState:
    """Received log-probabilities, or embedding. `next`: position of the first token without one of the former. Token 0
    never has one."""

    def __init__(self, request: Request) -> None:
        self._end = len(request.prompt_token_ids)
        self._num_top = request.sampling.prompt_logprobs
        self.next = 1
        self._parts: list[PromptLogprobs] = []
        self._embeds = request.embeds
        self._embedding: Vector | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether all that were asked for have come."""
        return self._num_top is None or self.next >= self._end

    @property
    def max_cached(self) -> int:
        """Number of tokens that a worker with their KV need not compute."""
        return sys.maxsize if self.is_complete else self.next - 1

    def add(self, found: PromptLogprobs) -> None:
        """Add what has come; drop repetitions. Raises InternalError for an impossible range."""
        num_top = found.top_ids.shape[1]
        is_next = 1 <= found.first <= self.next and found.end <= self._end
        if self._num_top is None or num_top > self._num_top or not is_next:
            raise InternalError(
                f"a worker sent log-probabilities of tokens [{found.first}, {found.end}) with {num_top} alternatives, "
                f"of a prompt of {self._end}, where token {self.next} was next"
            )
        if found.end > self.next:
            self._parts.append(found.between(self.next, found.end))
            self.next = found.end

    def embed(self, found: Embedding) -> None:
        """Take the embedding. Raises InternalError where none is due."""
        if not self._embeds or found.num_cached >= self._end:
            raise InternalError(
                f"a worker sent an embedding of {found.num_cached} cached tokens that was not asked for"
            )
        self._embedding = found.vector

    @property
    def has_embedding(self) -> bool:
        """True from when the embedding has come until it is taken."""
        return self._embedding is not None

    def take_embedding(self) -> Vector | None:
        """Embedding, once it has come; None after the first call."""
        vector, self._embedding = self._embedding, None
        return vector

    def take(self) -> tuple[PromptLogprobs, ...]:
        """Log-probabilities that came since the last call."""
        parts, self._parts = self._parts, []
        return tuple(parts)
