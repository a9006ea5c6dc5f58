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
from ..common.request import RecordKey
from ..engine.events import StepTokens

Part = tuple[int, "array[int]"]  # position of the first token, and the tokens: uint32


@dataclass(frozen=True, slots=True)
class RecordLimits:
    max_answers: int = 8192
    max_tokens: int = 4 << 20  # of all answers: 16 MiB
    lifetime_s: float = 600.0  # since its last token


@dataclass(slots=True)
class AnswerRecord:
    call: bytes
    parts: list[Part] = field(default_factory=list[Part])
    keys: set[str] = field(default_factory=set[str])  # sequences that add to it
    is_finished: bool = False
    expires_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for _, tokens in self.parts)

    def add(self, position: int, token_id: int) -> bool:
        """Add a token, if it is new."""
        if self.parts:
            first, tokens = self.parts[-1]
            if position < first + len(tokens):
                return False
            if position == first + len(tokens):
                tokens.append(token_id)
                return True
        self.parts.append((position, array("I", (token_id,))))
        return True


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
        found.keys.add(key)
        self.live[key] = found
        for position, token_id in enumerate(output_token_ids):
            self.num_tokens += found.add(position, token_id)
        self._make_room()

    def note(self, tokens: StepTokens) -> None:
        """Add the tokens of a step."""
        for entry, key in enumerate(tokens.keys):
            record = self.live.get(key)
            if record is None:
                continue
            self.num_tokens += record.add(tokens.positions[entry], tokens.token_ids[entry])
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
            record.keys.discard(key)

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
