"""AnswerStore: the text of earlier answers, each behind the end of its prompt, by tenant, bounded in tokens over all
tenants. Oldest answers go first.

A tenant is whatever shares cached prefixes (core/prefix_cache.py): a `cache_salt`, which the front door derives from
the API key where there are several. Each has a text and an index of its own, so nothing of another is ever compared
with. Memory: about 150 bytes a token.
"""

from array import array
from collections import deque
from collections.abc import Sequence as SequenceOf

from .occurrences import Occurrences

BOUNDARY = -1  # between answers: no token
SHORTEST = 4  # tokens of an answer that is worth keeping
MOST_TOKENS = 1 << 20  # of all tenants


class TenantAnswers:
    """Answers of one tenant, one after the other, and where their trigrams ended."""

    def __init__(self) -> None:
        self.text = array("i")
        self.trigrams = Occurrences(3)
        self._sizes: deque[int] = deque()  # of answers, with their boundaries

    def add(self, token_ids: SequenceOf[int]) -> None:
        self.text.extend(token_ids)
        self.text.append(BOUNDARY)
        self._sizes.append(len(token_ids) + 1)
        self.trigrams.extend(self.text, len(self.text))

    def drop_oldest(self) -> int:
        """Forget an answer. Returns how many tokens it had, with its boundary."""
        size = self._sizes.popleft()
        self.trigrams.cut(self.text, size)
        del self.text[:size]
        return size


class AnswerStore:
    def __init__(self, max_tokens: int = MOST_TOKENS) -> None:
        self.num_tokens = 0  # with boundaries
        self._max_tokens = max_tokens
        self._tenants: dict[bytes, TenantAnswers] = {}
        self._order: deque[bytes] = deque()  # tenants of all answers, oldest first

    def of(self, salt: bytes) -> TenantAnswers | None:
        return self._tenants.get(salt)

    def add(self, salt: bytes, token_ids: SequenceOf[int], num_prompt: int = 0) -> None:
        """Add an answer. num_prompt: tokens before it. Of more tokens than the bound the last ones are kept."""
        num_answer = len(token_ids) - num_prompt
        token_ids = token_ids[-(self._max_tokens - 1) :]
        size = len(token_ids) + 1
        if num_answer < SHORTEST or size > self._max_tokens:
            return
        while self.num_tokens + size > self._max_tokens:
            self._drop_oldest()
        self._tenants.setdefault(salt, TenantAnswers()).add(token_ids)
        self._order.append(salt)
        self.num_tokens += size

    def _drop_oldest(self) -> None:
        salt = self._order.popleft()
        tenant = self._tenants[salt]
        self.num_tokens -= tenant.drop_oldest()
        if not tenant.text:
            del self._tenants[salt]
