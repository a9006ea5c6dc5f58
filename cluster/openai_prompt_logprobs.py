"""Log-probabilities of a prompt's tokens as OpenAI and vLLM write them: the first token has none."""

from collections.abc import Callable, Sequence
from typing import Any

from ..workers.prompt_logprobs import PromptLogprobs
from .tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's word for "never": JSON has no infinity

Json = dict[str, Any]


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


class PromptTokens:
    """A prompt's tokens and what was found of them."""

    def __init__(self, token_ids: Sequence[int], parts: Sequence[PromptLogprobs]) -> None:
        """parts: of all tokens but the first, in order."""
        self._ids = token_ids
        self._logprobs: list[float] = []
        self._ranks: list[int] = []
        self._top_ids: list[list[int]] = []
        self._top_logprobs: list[list[float]] = []
        for part in parts:
            self._logprobs += map(finite, part.logprobs.tolist())
            self._ranks += part.ranks.tolist()
            self._top_ids += part.top_ids.tolist()
            self._top_logprobs += [list(map(finite, row)) for row in part.top_logprobs.tolist()]

    def echoed(self, num_top: int, name: Callable[[int], str], tokenizer: Tokenizer) -> Json:
        """As the beginning of a completion's `logprobs`, before those of its own tokens."""
        rows = zip(self._ids[1:], self._logprobs, self._top_ids, self._top_logprobs, strict=True)
        top = [
            {name(i): logprob for i, logprob in zip((*top_ids[:num_top], own), (*top[:num_top], logprob), strict=True)}
            for own, logprob, top_ids, top in rows
        ]
        return {
            "tokens": list(map(name, self._ids)),
            "token_logprobs": [None, *self._logprobs],
            "top_logprobs": [None, *top],
            "text_offset": _offsets(self._ids, tokenizer),
        }

    def listed(self, num_top: int, text: Callable[[int], str]) -> list[Json | None]:
        """As vLLM's `prompt_logprobs`: the prompt's own token first, then the most likely ones."""

        def entry(token_id: int, logprob: float, rank: int) -> Json:
            return {"logprob": logprob, "rank": rank, "decoded_token": text(token_id)}

        listed: list[Json | None] = [None]
        columns = (self._ids[1:], self._logprobs, self._ranks, self._top_ids, self._top_logprobs)
        for own, logprob, rank, top_ids, top in zip(*columns, strict=True):
            found = {str(own): entry(own, logprob, rank)}
            for i, (token_id, value) in enumerate(zip(top_ids[:num_top], top, strict=False), start=1):
                if token_id != own:
                    found[str(token_id)] = entry(token_id, value, i)
            listed.append(found)
        return listed


def _offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Where each begins in the text of all, characters."""
    detokenizer, offsets, num_chars = tokenizer.detokenizer(), list[int](), 0
    for token_id in token_ids:
        offsets.append(num_chars)
        num_chars += len(detokenizer.push(token_id))
    return offsets
