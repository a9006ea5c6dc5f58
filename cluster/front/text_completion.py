"""Turns the tokens of one request into text: detokenised, cut at stop strings. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...workers.common.errors import RequestAborted
from ...workers.common.prompt_logprobs import PromptLogprobs
from ...workers.common.request import FinishReason, Request
from ..common.timings import RequestTimings
from ..common.worker_stats import NO_DRAFTS
from ..dialects.reader import AnswerParser
from ..routing.token_source import TokenDelta, TokenLogprob
from ..tokens.detokenizer import Detokenizer
from ..tokens.stop_strings import StopStrings
from .retries.ids import IdSource


@dataclass(slots=True)
class TextDelta:
    """New text of completion `index`, and its tokens. Text is held back while a character or a possible stop string is
    incomplete."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()  # parallel to logprobs: first character of each token in the completion's text
    finish_reason: FinishReason | None = None  # set on the last delta
    stop_string: str | None = None  # the stop string that ended it
    stop_token_id: int | None = None  # the token of the request's `stop_token_ids` that ended it
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # as in TokenDelta; of the first completion of a prompt
    elapsed_s: float = 0.0  # as in TokenDelta


class TextCompletion:
    """Text of one request, made from its tokens."""

    def __init__(
        self,
        index: int,
        request: Request,
        detokenizer: Detokenizer,
        stops: StopStrings,
        *,
        shows_stop: bool = False,
        prompt_only: bool = False,
        parser: AnswerParser | None = None,
    ) -> None:
        """`shows_stop`: what ends it, a stop string or a token, is a part of the text. `prompt_only`: the request's
        tokens are not returned. `parser`: of the text, for whoever writes the answer."""
        self._shows_stop = shows_stop
        self._prompt_only = prompt_only
        self.parser = parser
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = self.num_stored_tokens = 0
        self.timings: RequestTimings | None = None  # complete once it has ended
        self.drafts = NO_DRAFTS  # verified so far
        self.origins: Sequence[tuple[int, str]] = ()  # as in TokenDelta
        self.finish_reason: FinishReason | None = None  # once it has ended
        self._detokenizer = detokenizer
        self._stops = stops
        self._num_chars = 0  # of detokenised text, including text that is held back

    @cached_property
    def ids(self) -> IdSource:
        """Ids of the parts of the answer."""
        return IdSource(b"" if self.request.record is None else self.request.record.name)

    def push(self, delta: TokenDelta) -> TextDelta:
        """Text of a delta. On a stop string, the text ends before it, or with it where that is shown; the tokens end
        with the one that completed it."""
        if not self.num_tokens:
            self.num_cached_tokens, self.num_stored_tokens = delta.num_cached_tokens, delta.num_stored_tokens
        self.timings, self.drafts, self.origins = delta.timings or self.timings, delta.drafts, delta.origins
        if delta.finish_reason is FinishReason.ABORT:
            raise RequestAborted("the worker aborted the request: send it again")
        if self._prompt_only:
            self.finish_reason = end = FinishReason.LENGTH
            return TextDelta(self.index, "", (), finish_reason=end, prompt_logprobs=delta.prompt_logprobs)
        text: list[str] = []
        offsets: list[int] = []
        stop = None
        for i, token_id in enumerate(delta.token_ids, start=1):
            self.num_tokens += 1
            offsets.append(self._num_chars)
            # The token that ended it (end of sequence, or a stop token) has no text unless asked for.
            is_end = delta.finish_reason is FinishReason.STOP and i == len(delta.token_ids)
            shown, stop = self._show("" if is_end and not self._shows_stop else self._detokenizer.push(token_id))
            text.append(shown)
            if stop is not None:
                return self._ended(delta, "".join(text), offsets, stop)
        if delta.finish_reason is not None:
            shown, stop = self._show(self._detokenizer.flush())
            text += (shown, self._stops.flush() if stop is None else "")
            return self._ended(delta, "".join(text), offsets, stop)
        return TextDelta(
            self.index,
            "".join(text),
            delta.token_ids,
            delta.logprobs,
            tuple(offsets) if delta.logprobs else (),
            prompt_logprobs=delta.prompt_logprobs,
            elapsed_s=delta.elapsed_s,
        )

    def _show(self, piece: str) -> tuple[str, str | None]:
        self._num_chars += len(piece)
        if self.num_tokens <= self.request.sampling.min_tokens:
            return piece, None
        return self._stops.push(piece)

    def _ended(self, delta: TokenDelta, text: str, offsets: list[int], stop: str | None) -> TextDelta:
        num = len(offsets)
        if self._shows_stop and stop is not None:
            text += stop
        self.finish_reason = delta.finish_reason if stop is None else FinishReason.STOP
        has_stopped = stop is None and delta.finish_reason is FinishReason.STOP and delta.token_ids
        is_own_end = has_stopped and delta.token_ids[-1] in self.request.sampling.stop_token_ids
        # The router does not know of stop strings, nor that this delta was the last.
        self.timings = self.timings and replace(
            self.timings,
            total_s=delta.elapsed_s,
            num_drafted=delta.drafts.num_drafted,
            num_accepted=delta.drafts.num_accepted,
        )
        return TextDelta(
            self.index,
            text,
            delta.token_ids[:num],
            delta.logprobs[:num],
            tuple(offsets) if delta.logprobs else (),
            self.finish_reason,
            stop,
            delta.token_ids[-1] if is_own_end else None,
            delta.prompt_logprobs,
            delta.elapsed_s,
        )
