"""Log-probabilities of prompts' tokens as OpenAI and vLLM write them: the first token has none.

    CallPrompts    those of one call, each prompt's written once for all its choices
    PromptTokens   those of one prompt, as JSON

The first choice of a prompt receives them, with its first delta. They may be many, so they are written on a thread.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain

from ....workers.common.prompt_logprobs import PromptLogprobs
from ...tokens.tokenizer import Tokenizer
from ..generation import Generation
from ..json_parts import Written
from ..text_completion import TextDelta
from .tokens import Json, TokenNames, finite


class CallPrompts:
    """A prompt is known by the index of its first choice."""

    def __init__(
        self, generation: Generation, names: TokenNames, echo: Sequence[str], *, num_listed: int | None
    ) -> None:
        """`echo`: the prompt's text for each choice; write them as the beginning of `logprobs` (none: do not).
        `num_listed`: write `prompt_logprobs` with so many alternatives."""
        self._n = generation.n
        self._requests = [completion.request for completion in generation.completions]
        self._names = names
        self._echo = echo
        self._num_listed = num_listed
        self._num_missing = len(self._requests) // self._n if echo or num_listed is not None else 0
        self._echoed: dict[int, dict[str, Written]] = {}
        self._listed: dict[int, Written] = {}
        self._known: set[int] = set()
        self._held: dict[int, list[TextDelta]] = {}

    @property
    def is_waiting(self) -> bool:
        """Some prompt's have not come yet."""
        return self._num_missing > 0

    async def take(self, deltas: Sequence[TextDelta]) -> list[TextDelta]:
        """Write what came with `deltas`. Return those that can be told: no choice's before its prompt is known."""
        ready: list[TextDelta] = []
        for delta in deltas:
            first = delta.index - delta.index % self._n
            if first in self._known:
                ready.append(delta)
            elif delta.index != first:
                self._held.setdefault(first, []).append(delta)
            else:
                await asyncio.to_thread(self._write, first, delta.prompt_logprobs)
                self._known.add(first)
                self._num_missing -= 1
                ready += (delta, *self._held.pop(first, ()))
        return ready

    def echoed(self, index: int) -> dict[str, Written]:
        """The beginning of choice `index`'s `logprobs`, by column."""
        return self._echoed[index - index % self._n]

    def listed(self, index: int) -> Written | None:
        """The `prompt_logprobs` of choice `index`; None where they were not asked for."""
        return None if self._num_listed is None else self._listed[index - index % self._n]

    def _write(self, first: int, parts: Sequence[PromptLogprobs]) -> None:
        request = self._requests[first]
        tokens = PromptTokens(request.prompt_token_ids, parts, self._names)
        if self._echo:
            self._echoed[first] = tokens.echoed(self._echo[first], request.sampling.logprobs or 0)
        if self._num_listed is not None:
            self._listed[first] = tokens.listed(self._num_listed)


class PromptTokens:
    """A prompt's tokens and what was found of them."""

    def __init__(self, token_ids: Sequence[int], parts: Sequence[PromptLogprobs], names: TokenNames) -> None:
        """parts: of all tokens but the first, in order."""
        self._ids = token_ids
        self._names = names
        self._logprobs: list[float] = []
        self._ranks: list[int] = []
        self._top_ids: list[list[int]] = []
        self._top_logprobs: list[list[float]] = []
        for part in parts:
            self._logprobs += map(finite, part.logprobs.tolist())
            self._ranks += part.ranks.tolist()
            self._top_ids += part.top_ids.tolist()
            self._top_logprobs += [list(map(finite, row)) for row in part.top_logprobs.tolist()]

    def echoed(self, text: str, num_top: int) -> dict[str, Written]:
        """The columns of a completion's `logprobs`, before those of its own tokens. `text`: of the prompt."""
        return {
            "tokens": Written.of(map(self._names.legacy, self._ids)),
            "token_logprobs": Written.of(chain((None,), self._logprobs)),
            "top_logprobs": Written.of(chain((None,), self._tops(num_top))),
            "text_offset": Written.of(text_offsets(self._ids, text, self._names.tokenizer)),
        }

    def listed(self, num_top: int) -> Written:
        """vLLM's `prompt_logprobs`: the prompt's own token first, then the most likely ones."""
        return Written.of(chain((None,), self._entries(num_top)))

    def _tops(self, num_top: int) -> Iterator[Json]:
        name = self._names.legacy
        for own, logprob, ids, top in zip(
            self._ids[1:], self._logprobs, self._top_ids, self._top_logprobs, strict=True
        ):
            both = zip((own, *ids[:num_top]), (logprob, *top[:num_top]), strict=True)
            yield {name(token_id): value for token_id, value in both}

    def _entries(self, num_top: int) -> Iterator[Json]:
        def entry(token_id: int, logprob: float, rank: int) -> Json:
            return {"logprob": logprob, "rank": rank, "decoded_token": self._names.text(token_id)}

        columns = (self._ids[1:], self._logprobs, self._ranks, self._top_ids, self._top_logprobs)
        for own, logprob, rank, top_ids, top in zip(*columns, strict=True):
            found = {str(own): entry(own, logprob, rank)}
            for i, (token_id, value) in enumerate(zip(top_ids[:num_top], top, strict=False), start=1):
                if token_id != own:
                    found[str(token_id)] = entry(token_id, value, i)
            yield found


def text_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[int]:
    """Where each token begins in the prompt's text, in characters. That text may lack special tokens, which the
    tokenizer puts around a text."""
    detokenizer, num_chars = tokenizer.detokenizer(special=True), 0
    for token_id in token_ids:
        if special := tokenizer.special_text(token_id):
            num_chars += len(detokenizer.flush())
        yield num_chars
        if special and not text.startswith(special, num_chars):
            continue
        num_chars += len(detokenizer.push(token_id))
