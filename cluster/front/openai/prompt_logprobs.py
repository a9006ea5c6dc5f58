"""Writes log-probabilities of prompt tokens in OpenAI's and vLLM's form. The first token has none.

    CallPrompts    of one call: written once for each prompt, for all its choices
    PromptTokens   of one prompt, as JSON

The first choice of a prompt gets them with its first delta. They may be many, so a thread writes them.
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
    """Log-probabilities of the prompts of one call. A prompt is identified by the index of its first choice."""

    def __init__(
        self, generation: Generation, names: TokenNames, echo: Sequence[str], *, num_listed: int | None
    ) -> None:
        """`echo`: text of the prompt for each choice, whose `logprobs` begin with the prompt's (empty: they do not).
        `num_listed`: number of alternatives in `prompt_logprobs`."""
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
        """Return whether those of some prompt have not come yet."""
        return self._num_missing > 0

    async def take(self, deltas: Sequence[TextDelta]) -> list[TextDelta]:
        """Write those that came with `deltas`. Return the deltas to send: none before its prompt is complete."""
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
        """Beginning of the `logprobs` of choice `index`, by column."""
        return self._echoed[index - index % self._n]

    def listed(self, index: int) -> Written | None:
        """`prompt_logprobs` of choice `index`; None where they were not asked for."""
        return None if self._num_listed is None else self._listed[index - index % self._n]

    def _write(self, first: int, parts: Sequence[PromptLogprobs]) -> None:
        request = self._requests[first]
        tokens = PromptTokens(request.prompt_token_ids, parts, self._names)
        if self._echo:
            self._echoed[first] = tokens.echoed(self._echo[first], request.sampling.logprobs or 0)
        if self._num_listed is not None:
            self._listed[first] = tokens.listed(self._num_listed)


class PromptTokens:
    """Tokens of one prompt, and their log-probabilities."""

    def __init__(self, token_ids: Sequence[int], parts: Sequence[PromptLogprobs], names: TokenNames) -> None:
        """`parts`: of all tokens but the first, in order."""
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
        """Columns of a completion's `logprobs` before those of its own tokens. `text`: of the prompt."""
        return {
            "tokens": Written.of(map(self._names.legacy, self._ids)),
            "token_logprobs": Written.of(chain((None,), self._logprobs)),
            "top_logprobs": Written.of(chain((None,), self._tops(num_top))),
            "text_offset": Written.of(text_offsets(self._ids, text, self._names.tokenizer)),
        }

    def listed(self, num_top: int) -> Written:
        """`prompt_logprobs` as in vLLM: the prompt's own token first, then the most likely ones."""
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
    """First character of each token in the prompt's text. The text may lack special tokens, which the tokenizer puts
    around it."""
    detokenizer, num_chars = tokenizer.detokenizer(special=True), 0
    for token_id in token_ids:
        if special := tokenizer.special_text(token_id):
            num_chars += len(detokenizer.flush())
        yield num_chars
        if special and not text.startswith(special, num_chars):
            continue
        num_chars += len(detokenizer.push(token_id))
