"""Writes one response: its object, its events, and what is kept of it."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ....workers.common.errors import DiptychError, InvalidRequest, Overloaded
from ....workers.common.request import FinishReason
from ...dialects.tools import ToolUse
from ...tokens.tokenizer import Tokenizer
from ..generation import Generation
from ..openai.parsed_format import ParsedChoice
from ..openai.tokens import Json, TokenNames
from ..retries.event_ids import Unnumbered
from ..text_completion import TextDelta
from .items import output_messages
from .output import EventLog, NoEvents, Output, Status

_to_json = json.JSONEncoder(separators=(",", ":")).encode
_LAST_EVENT = {
    Status.COMPLETED: "response.completed",
    Status.INCOMPLETE: "response.incomplete",
    Status.CANCELLED: "response.incomplete",  # there is no event of its own
    Status.FAILED: "response.failed",
}


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """Parts of a response besides its output, and how it is sent."""

    model: str
    echo: str  # JSON members that repeat the call's
    is_streamed: bool
    tools: ToolUse | None
    short_ids: bool  # of calls
    in_background: bool = False  # it waits for its first token without its client


class ResponseAnswer:
    """Response to one call, while it is made."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, style: AnswerStyle) -> None:
        self._generation = generation
        self._style = style
        self._created = int(time.time())
        completion = generation.completions[0]
        self._log = EventLog(completion.ids) if style.is_streamed else NoEvents(completion.ids)
        parser, choice = completion.parser, None
        if parser is not None and style.tools is not None:
            choice = ParsedChoice(parser, style.tools, completion.ids, short_ids=style.short_ids, reasoning=True)
        self._output = Output(self._log, choice, TokenNames(tokenizer, as_ids=False))
        self._finish: FinishReason | None = None
        self._error: Json | None = None
        self._whole = ""  # JSON of the response, once it has ended
        self.status = Status.IN_PROGRESS
        self.has_begun = False
        if style.in_background:
            self.status = Status.QUEUED
            self._begin("response.created", "response.queued")

    @property
    def is_streamed(self) -> bool:
        return self._style.is_streamed

    @property
    def is_whole(self) -> bool:
        """Return whether it has ended, and was neither cancelled nor failed."""
        return self.status in (Status.COMPLETED, Status.INCOMPLETE)

    def push(self, batch: Sequence[TextDelta]) -> None:
        """Take new text."""
        self._run()
        for delta in batch:
            self._output.push(delta)
            self._finish = delta.finish_reason or self._finish

    def finish(self) -> None:
        """End after the last token."""
        self._end(Status.INCOMPLETE if self._finish is FinishReason.LENGTH else Status.COMPLETED)

    def cancel(self) -> None:
        """End early. Does nothing where it has ended."""
        self._end(Status.CANCELLED)

    def fail(self, error: DiptychError) -> None:
        if not self.status.is_over:
            self._error = {"code": _code(error), "message": error.message}
            self._end(Status.FAILED)

    def error_event(self, error: DiptychError) -> str:
        """Event of an error that is not the response's."""
        found: Json = {"code": error.code, "message": error.message, "param": error.param}
        self._log.add("error", _to_json(found)[1:-1])
        return self._log.take()

    def take_events(self) -> str:
        """Events since the last call. They are Unnumbered once the response was ended early."""
        events = self._log.take()
        return events if self.is_whole or not self.status.is_over else Unnumbered(events)

    def messages(self) -> str:
        """Messages of the next turn: JSON objects between commas."""
        return _to_json(output_messages(self._output.plain))[1:-1]

    def json(self) -> str:
        """JSON of the response as it is now."""
        if self._whole:
            return self._whole
        has_ended = self.status.is_over
        reason = {Status.INCOMPLETE: {"reason": "max_output_tokens"}}.get(self.status)
        head: Json = {
            "id": self._generation.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self.status is Status.COMPLETED else None,
            "status": self.status.value,
            "error": self._error,
            "incomplete_details": reason,
            "model": self._style.model,
            "service_tier": self._generation.service_tier,
            "usage": self._usage() if has_ended else None,
        }
        return f'{{{_to_json(head)[1:-1]},"output":[{",".join(self._output.items)}],{self._style.echo}}}'

    def _run(self) -> None:
        if not self.has_begun:
            self._begin("response.created", "response.in_progress")
        elif self.status is Status.QUEUED:
            self.status = Status.IN_PROGRESS
            self._begin("response.in_progress")

    def _begin(self, *events: str) -> None:
        self.has_begun = True
        for kind in events:
            self._log.add(kind, f'"response":{self.json()}')

    def _end(self, status: Status) -> None:
        if self.status.is_over:
            return
        self._run()
        self._output.end(Status.COMPLETED if status is Status.COMPLETED else Status.INCOMPLETE)
        self.status = status
        self._whole = self.json()
        self._log.add(_LAST_EVENT[status], f'"response":{self._whole}')

    def _usage(self) -> Json:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.stored_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._output.num_thought_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _code(error: DiptychError) -> str:
    """OpenAI's code of a response's error: it knows few."""
    match error:
        case InvalidRequest():
            return "invalid_prompt"
        case Overloaded():
            return "rate_limit_exceeded"
        case _:
            return "server_error"
