"""Log-probabilities of a request's prompt that have come so far. A resumed request does not compute them again."""

import sys

from ...workers.common.errors import InternalError
from ...workers.common.prompt_logprobs import PromptLogprobs
from ...workers.common.request import Request


class PromptLogprobsState:
    """Received log-probabilities. `next`: position of the first token without one. Token 0 never has one."""

    def __init__(self, request: Request) -> None:
        self._end = len(request.prompt_token_ids)
        self._num_top = request.sampling.prompt_logprobs
        self.next = 1
        self._parts: list[PromptLogprobs] = []

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

    def take(self) -> tuple[PromptLogprobs, ...]:
        """Log-probabilities that came since the last call."""
        parts, self._parts = self._parts, []
        return tuple(parts)
