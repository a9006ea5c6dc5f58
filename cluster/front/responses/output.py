"""Makes the output of a response: text of the model -> items, and the events that tell of them.

    delta -> ParsedChoice -> parts of the message -> the open item, or the next one -> EventLog

One item is open at a time. What an event says besides new text is written once, as JSON.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum

from ..openai.format import chat_logprobs
from ..openai.parsed_format import ParsedChoice
from ..openai.tokens import Json, TokenNames
from ..retries.ids import IdSource
from ..text_completion import TextDelta
from .items import new_item_id

_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Status(Enum):
    """State of a response, or of an item of its output."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self not in (Status.QUEUED, Status.IN_PROGRESS)


class EventLog:
    """Server-sent events of a response, in order."""

    def __init__(self, ids: IdSource) -> None:
        """`ids`: of the response's items."""
        self.ids = ids
        self._num = 0
        self._events: list[str] = []

    def add(self, kind: str, members: str) -> None:
        """Add an event. `members`: JSON members of its own."""
        self._events.append(f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._num},{members}}}\n\n')
        self._num += 1

    def take(self) -> str:
        """Events since the last call."""
        events, self._events = "".join(self._events), []
        return events


class NoEvents(EventLog):
    """Log of a response that is not streamed."""

    def add(self, kind: str, members: str) -> None:
        pass


class MadeItem(ABC):
    """Item that is being made."""

    kind: str
    delta_event: str  # of new text
    done_event: str  # of the whole text
    text_name: str  # of the whole text, in its event

    def __init__(self, log: EventLog, index: int) -> None:
        self.item_id = new_item_id(self.kind, log.ids)
        self._log = log
        self._index = f'"output_index":{index}'
        self._where = f'"item_id":"{self.item_id}",{self._index}'
        self._texts: list[str] = []

    def begin(self) -> None:
        self._log.add("response.output_item.added", f'{self._index},"item":{self._json(Status.IN_PROGRESS, None)}')

    def add(self, text: str, logprobs: str = "") -> None:
        """Add text. `logprobs`: JSON of those of its tokens, between commas."""
        self._texts.append(text)
        self._log.add(self.delta_event, f'{self._where},"delta":{_to_json(text)}')

    def end(self, status: Status) -> str:
        """JSON of the whole item."""
        text = _to_json(self.text)
        self._log.add(self.done_event, f'{self._where},"{self.text_name}":{text}{self._besides()}')
        whole = self._json(status, text)
        self._log.add("response.output_item.done", f'{self._index},"item":{whole}')
        return whole

    def _besides(self) -> str:
        """Further members of the event of the whole text."""
        return ""

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def plain(self) -> Json:
        """Item of the next turn's input."""

    def _json(self, status: Status, text: str | None) -> str:
        """JSON of the item. `text`: JSON of its text; None: none has come."""
        head = f'"id":"{self.item_id}","type":"{self.kind}","status":"{status.value}"'
        return f"{{{head},{self._members(text)}}}"

    @abstractmethod
    def _members(self, text: str | None) -> str:
        """JSON members of the item besides those that every kind has. `text`: as in `_json`."""


class _PartItem(MadeItem):
    """Item whose text is in its only content part."""

    text_name = "text"

    def __init__(self, log: EventLog, index: int) -> None:
        super().__init__(log, index)
        self._where += ',"content_index":0'

    def begin(self) -> None:
        super().begin()
        self._log.add("response.content_part.added", f'{self._where},"part":{self._part(_EMPTY)}')

    def end(self, status: Status) -> str:
        text = _to_json(self.text)
        self._log.add(self.done_event, f'{self._where},"text":{text}{self._besides()}')
        self._log.add("response.content_part.done", f'{self._where},"part":{self._part(text)}')
        whole = self._json(status, text)
        self._log.add("response.output_item.done", f'{self._index},"item":{whole}')
        return whole

    def _content(self, text: str | None) -> str:
        return "[]" if text is None else f"[{self._part(text)}]"

    @abstractmethod
    def _part(self, text: str) -> str:
        """JSON of the part. `text`: JSON of its text."""


class MadeMessage(_PartItem):
    kind = "message"
    delta_event, done_event = "response.output_text.delta", "response.output_text.done"

    def __init__(self, log: EventLog, index: int) -> None:
        super().__init__(log, index)
        self._logprobs: list[str] = []

    def add(self, text: str, logprobs: str = "") -> None:
        self._texts.append(text)
        if logprobs:
            self._logprobs.append(logprobs)
        self._log.add(self.delta_event, f'{self._where},"delta":{_to_json(text)},"logprobs":[{logprobs}]')

    def plain(self) -> Json:
        return {"type": self.kind, "role": "assistant", "content": self.text}

    def _members(self, text: str | None) -> str:
        return f'"role":"assistant","content":{self._content(text)}'

    def _part(self, text: str) -> str:
        return f'{{"type":"output_text","text":{text},"annotations":[]{self._besides()}}}'

    def _besides(self) -> str:
        return f',"logprobs":[{",".join(self._logprobs)}]'


class MadeThought(_PartItem):
    kind = "reasoning"
    delta_event, done_event = "response.reasoning_text.delta", "response.reasoning_text.done"

    def plain(self) -> Json:
        return {"type": self.kind, "content": [{"type": "reasoning_text", "text": self.text}]}

    def _members(self, text: str | None) -> str:
        return f'"summary":[],"content":{self._content(text)},"encrypted_content":null'

    def _part(self, text: str) -> str:
        return f'{{"type":"reasoning_text","text":{text}}}'


class _CallItem(MadeItem):
    def __init__(self, log: EventLog, index: int, call_id: str, name: str) -> None:
        super().__init__(log, index)
        self._call_id = call_id
        self._name = name

    def plain(self) -> Json:
        return {"type": self.kind, "call_id": self._call_id, "name": self._name, self.text_name: self.text}

    def _members(self, text: str | None) -> str:
        own = f'"call_id":{_to_json(self._call_id)},"name":{_to_json(self._name)}'
        return f'{own},"{self.text_name}":{text or _EMPTY}'


class MadeFunctionCall(_CallItem):
    kind, text_name = "function_call", "arguments"
    delta_event = "response.function_call_arguments.delta"
    done_event = "response.function_call_arguments.done"

    def _besides(self) -> str:
        return f',"name":{_to_json(self._name)}'


class MadeCustomCall(_CallItem):
    kind, text_name = "custom_tool_call", "input"
    delta_event = "response.custom_tool_call_input.delta"
    done_event = "response.custom_tool_call_input.done"


class Output:
    """Output of one response."""

    def __init__(self, log: EventLog, choice: ParsedChoice | None, names: TokenNames) -> None:
        """`choice`: reads the text's thoughts and calls; None: it has none."""
        self._log = log
        self._choice = choice
        self._names = names
        self._open: MadeItem | None = None
        self._logprobs: list[str] = []  # of tokens whose text has not come yet
        self.items: list[str] = []  # JSON of those that have ended
        self.plain: list[Json] = []  # the same as items of the next turn's input

    @property
    def num_thought_tokens(self) -> int:
        return 0 if self._choice is None else self._choice.num_thought_tokens

    def push(self, delta: TextDelta) -> None:
        """Take new text."""
        if delta.logprobs:
            self._logprobs.append(_to_json(chat_logprobs(self._names, (delta,))["content"])[1:-1])
        if self._choice is None:
            parts: Sequence[Json] = ({"content": delta.text},) if delta.text else ()
        else:
            parts = self._choice.deltas(delta)
        for part in parts:
            self._add(part)

    def end(self, status: Status) -> None:
        """End the open item, with `status`. A completed output has at least one item."""
        if status is Status.COMPLETED and self._open is None and not self.items:
            self._begin(MadeMessage(self._log, 0))
        if self._logprobs and isinstance(self._open, MadeMessage):
            self._open.add("", self._take_logprobs())
        self._end_item(status)

    def _add(self, part: Json) -> None:
        if text := part.get("content"):
            logprobs = self._take_logprobs()
            self._item_of(MadeMessage).add(text, logprobs)
        elif text := part.get("reasoning"):
            self._item_of(MadeThought).add(text)
        else:
            for call in part.get("tool_calls", ()):
                self._add_call(call)
        self._logprobs.clear()

    def _add_call(self, call: Json) -> None:
        given, kind = (call["custom"], MadeCustomCall) if "custom" in call else (call["function"], MadeFunctionCall)
        if "id" in call:
            self._begin(kind(self._log, len(self.items) + (self._open is not None), call["id"], given["name"]))
        text = given.get("input" if kind is MadeCustomCall else "arguments")
        if text and self._open is not None:
            self._open.add(text)

    def _item_of(self, kind: type[MadeMessage] | type[MadeThought]) -> MadeItem:
        if not isinstance(self._open, kind):
            self._begin(kind(self._log, len(self.items) + (self._open is not None)))
        assert self._open is not None
        return self._open

    def _begin(self, item: MadeItem) -> None:
        self._end_item(Status.COMPLETED)
        self._open = item
        item.begin()

    def _end_item(self, status: Status) -> None:
        if self._open is not None:
            self.items.append(self._open.end(status))
            self.plain.append(self._open.plain())
            self._open = None

    def _take_logprobs(self) -> str:
        found = ",".join(self._logprobs)
        self._logprobs.clear()
        return found


_EMPTY = '""'
