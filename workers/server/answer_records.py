"""Tokens of answers that clients may ask for again (Request.record), kept for a while after their routers are lost.

    begin ── tokens of steps ── the last token | aborted | its router lost ──> kept until it is old, or others need the
                                                                               room

Soft state: a record may vanish at any time, and then the tokens are computed again. A worker that computes a part of an
answer records that part; the router joins them.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from ...proto import worker_pb2
from ..common.request import MAX_RECALLED, MAX_RECALLED_TOKENS, RecordKey
from ..engine.events import StepTokens

Part = tuple[int, "array[int]"]  # position of the first token, and the tokens: uint32


@dataclass(frozen=True, slots=True)
class RecordLimits:
    max_answers: int = 8192
    max_tokens: int = 4 << 20  # of all answers: 16 MiB
    lifetime_s: float = 600.0  # since its last token


@dataclass(slots=True)
class AnswerRecord:
    """Record of one answer. Sequences of several runs of it may add to it; their tokens differ only after two tokens
    that were equally likely up to rounding. Where they do, it goes on with the newest run."""

    call: bytes
    parts: list[Part] = field(default_factory=list[Part])
    keys: dict[str, None] = field(default_factory=dict[str, None])  # sequences that add to it, the newest last
    is_finished: bool = False
    expires_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for _, tokens in self.parts)

    def agrees(self, position: int, token_ids: "array[int]") -> bool:
        """Return whether tokens from `position` on equal those that are known."""
        for first, tokens in reversed(self.parts):
            start, end = max(first, position), min(first + len(tokens), position + len(token_ids))
            if start < end and tokens[start - first : end - first] != token_ids[start - position : end - position]:
                return False
            if first <= position:
                break
        return True

    def cut(self, position: int) -> int:
        """Forget the tokens from `position` on. Returns their number."""
        before = self.num_tokens
        while self.parts and self.parts[-1][0] >= position:
            self.parts.pop()
        if self.parts:
            first, tokens = self.parts[-1]
            del tokens[position - first :]
        self.is_finished = False
        return before - self.num_tokens

    def add(self, position: int, token_ids: "array[int]") -> int:
        """Add those of the tokens from `position` on that follow the known ones, with which they agree. Returns how
        many more are known."""
        end, num = position + len(token_ids), 0
        while self.parts and position <= self.parts[-1][0] and end >= _end(self.parts[-1]):
            num -= len(self.parts.pop()[1])  # all of it is in `token_ids`
        if self.parts and position <= (known := _end(self.parts[-1])):
            new = token_ids[known - position :]
            self.parts[-1][1].extend(new)
            return num + len(new)
        self.parts.append((position, token_ids))
        return num + len(token_ids)


def _end(part: Part) -> int:
    """Position after its last token."""
    return part[0] + len(part[1])


class AnswerRecords:
    """Records of one worker, on its event loop."""

    def __init__(self, limits: RecordLimits | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or RecordLimits()
        self._now = now
        self._records: OrderedDict[bytes, AnswerRecord] = OrderedDict()  # the least recently begun or recalled first
        self.live: dict[str, AnswerRecord] = {}  # by the sequences that add to them
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._records)

    def begin(self, key: str, record: RecordKey, output_token_ids: SequenceOf[int]) -> None:
        """Record a sequence's tokens: those that it begins with, and those that it makes."""
        self._remove_old()
        found = self._records.get(record.name)
        if found is not None and found.call != record.call:
            return  # of another call under the same name, which its router refuses
        if found is None:
            found = self._records[record.name] = AnswerRecord(record.call)
        self._touch(record.name, found)
        found.keys[key] = None
        self.live[key] = found
        if output_token_ids:
            self._add(key, found, 0, array("I", output_token_ids))
        self._make_room()

    def note(self, tokens: StepTokens) -> None:
        """Add the tokens of a step."""
        for entry, key in enumerate(tokens.keys):
            record = self.live.get(key)
            if record is None:
                continue
            if not self._add(key, record, tokens.positions[entry], array("I", (tokens.token_ids[entry],))):
                continue
            record.expires_s = self._now() + self._limits.lifetime_s
            note = tokens.notes.get(entry)
            if note is not None and note.finish is not None:
                record.is_finished = True
                self.end(key)
        self._make_room()

    def end(self, key: str) -> None:
        """Add nothing more of a sequence. Idempotent."""
        record = self.live.pop(key, None)
        if record is not None:
            record.keys.pop(key, None)

    def _add(self, key: str, record: AnswerRecord, position: int, token_ids: "array[int]") -> bool:
        """Add tokens of a sequence. Returns whether it goes on adding: of runs that differ, only the newest does."""
        if not record.agrees(position, token_ids):
            if key != next(reversed(record.keys)):
                self.end(key)
                return False
            for other in list(record.keys)[:-1]:
                self.end(other)
            self.num_tokens -= record.cut(position)
        self.num_tokens += record.add(position, token_ids)
        return True

    def recall_all(self, names: SequenceOf[bytes]) -> worker_pb2.RecalledAnswers:
        """Records of the first MAX_RECALLED names; those that would make the message too long without their tokens."""
        found = worker_pb2.RecalledAnswers()
        num_tokens = 0
        for name in names[:MAX_RECALLED]:
            answer = self.recall(name)
            num_tokens += sum(len(part.token_ids) for part in answer.parts)
            if num_tokens > MAX_RECALLED_TOKENS:
                del answer.parts[:]
                answer.is_finished = False
            found.answers.append(answer)
        return found

    def recall(self, name: bytes) -> worker_pb2.RecalledAnswer:
        """Return the record; an empty message where there is none."""
        self._remove_old()
        record = self._records.get(name)
        if record is None:
            return worker_pb2.RecalledAnswer()
        self._touch(name, record)
        parts = [worker_pb2.RecordedTokens(first=first, token_ids=tokens) for first, tokens in record.parts]
        return worker_pb2.RecalledAnswer(call=record.call, parts=parts, is_finished=record.is_finished)

    def _touch(self, name: bytes, record: AnswerRecord) -> None:
        self._records.move_to_end(name)
        record.expires_s = self._now() + self._limits.lifetime_s

    def _remove_old(self) -> None:
        now = self._now()
        while self._records and next(iter(self._records.values())).expires_s <= now:
            self._drop_oldest()

    def _make_room(self) -> None:
        limits = self._limits
        while self._records and (len(self._records) > limits.max_answers or self.num_tokens > limits.max_tokens):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, record = self._records.popitem(last=False)
        self.num_tokens -= record.num_tokens
        for key in record.keys:
            del self.live[key]
