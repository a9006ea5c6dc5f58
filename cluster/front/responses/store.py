"""Keeps responses in the memory of one router, so that a client can go on from them, read, cancel and delete them.

    begin -> running -> end -> kept until it is deleted, too old, or the least recently used one when room is needed

A response is found only with the key that made it. What a conversation's turns say is kept once, however many responses
follow each other: a turn lives as long as a response ends with it or a later turn follows it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ....workers.common.errors import InvalidRequest, Overloaded, UnknownPreviousResponse, UnknownResponse
from ..openai.fields import shorten
from .event_record import EventRecord

OVERHEAD_BYTES = 1024  # of an entry or a turn, besides its texts


@dataclass(frozen=True, slots=True)
class StoreLimits:
    max_bytes: int = 256 << 20  # of all responses
    max_entries: int = 16_384
    max_conversation_bytes: int = 16 << 20  # messages of one conversation
    lifetime_s: float = 3600.0  # since the last use


@dataclass(slots=True)
class StoredTurn:
    """Messages of a call and of its answer, and the turn before. Texts are ASCII."""

    before: "StoredTurn | None"
    messages: str  # JSON objects between commas
    num_bytes: int  # of the conversation up to here
    num_users: int = 0  # entries that end with it, and turns that follow it


@dataclass(slots=True)
class Stored:
    """Response that is kept."""

    response_id: str
    tenant: str  # name of the key that made it
    items: Sequence[tuple[str, str]]  # id and JSON of each item of the input
    turn: StoredTurn
    response: Callable[[], str]  # its JSON
    cancel: Callable[[], None] | None = None  # while it runs
    call: bytes | None = None  # what was asked for, of one that runs in the background; None: its client reads it
    events: EventRecord | None = None  # of one in the background that is streamed
    is_whole: bool = False  # it has ended, and neither failed nor was cancelled
    replaced: "Stored | None" = None  # whole one of the same key, kept until this one is whole too
    expires_s: float = 0.0
    num_bytes: int = field(default=0)

    @property
    def is_running(self) -> bool:
        return self.cancel is not None


class ResponseStore:
    def __init__(self, limits: StoreLimits | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or StoreLimits()
        self._now = now
        self._running: dict[str, Stored] = {}
        self._ended: OrderedDict[str, Stored] = OrderedDict()  # the least recently used first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._running or response_id in self._ended

    def turn_after(self, before: StoredTurn | None, messages: str) -> StoredTurn:
        """Turn that continues a conversation. Raises InvalidRequest where that becomes too long."""
        num_bytes = len(messages) + (0 if before is None else before.num_bytes)
        if num_bytes > self._limits.max_conversation_bytes:
            raise InvalidRequest(
                f"the conversation has {num_bytes} bytes; at most {self._limits.max_conversation_bytes}: begin a new "
                "one, or send less",
                param="input" if before is None else "previous_response_id",
            )
        return StoredTurn(before, messages, num_bytes)

    def begin(self, entry: Stored) -> None:
        """Keep a response that runs, in the place of one with its id, which was asked for by the same key. Raises
        Overloaded where those that run leave no room."""
        entry.num_bytes = OVERHEAD_BYTES + sum(len(name) + len(text) for name, text in entry.items)
        if (running := self._running.get(entry.response_id)) is not None:
            entry.replaced, running.replaced = running.replaced, None
            self.drop(running)
        elif (ended := self._ended.pop(entry.response_id, None)) is not None:
            if ended.is_whole:
                entry.replaced = ended
            else:
                self._forget(ended)
        self._running[entry.response_id] = entry
        self.num_bytes += entry.num_bytes
        self._hold(entry.turn)
        self._make_room()
        if self._is_full:
            self._give_back(entry)
            raise Overloaded("too many responses run whose input is kept: try again later, or send store=false")

    def end(self, entry: Stored, response: str, messages: str, *, is_whole: bool = True) -> None:
        """Keep the response as it has ended. `messages`: of its answer. `is_whole`: it neither failed nor was
        cancelled; otherwise a whole one that it replaced stays."""
        if self._running.get(entry.response_id) is not entry:
            return  # deleted meanwhile, or asked for again
        if not is_whole and entry.replaced is not None:
            self._give_back(entry)
            return
        del self._running[entry.response_id]
        self._forget_replaced(entry)
        turn = StoredTurn(entry.turn, messages, entry.turn.num_bytes + len(messages))
        self._hold(turn)
        self._release(entry.turn)  # `turn` holds it
        entry.turn, entry.cancel, entry.response, entry.is_whole = turn, None, lambda: response, is_whole
        entry.num_bytes += len(response)
        self.num_bytes += len(response)
        self._ended[entry.response_id] = entry
        self._touch(entry)
        self._make_room()

    def grow(self, entry: Stored, num_bytes: int) -> None:
        """Count bytes more of a response. Raises Overloaded where those that run leave no room for one that runs."""
        if self._running.get(entry.response_id) is not entry and self._ended.get(entry.response_id) is not entry:
            return  # deleted meanwhile
        entry.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._make_room()
        if self._is_full and entry.is_running:
            raise Overloaded("the events of responses that run in the background fill the memory: try again later")

    def find(self, tenant: str, response_id: str) -> Stored:
        """Raises UnknownResponse."""
        if (entry := self.get(tenant, response_id)) is None:
            raise UnknownResponse(_unknown(response_id))
        return entry

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """Response of that tenant, as used now; None: it is not kept."""
        self._remove_old()
        entry = self._running.get(response_id) or self._ended.get(response_id)
        if entry is None or entry.tenant != tenant:
            return None
        if not entry.is_running:
            self._touch(entry)
        return entry

    def previous(self, tenant: str, response_id: str) -> StoredTurn:
        """Last turn of a response that has ended. Raises InvalidRequest."""
        param = "previous_response_id"
        try:
            entry = self.find(tenant, response_id)
        except UnknownResponse as e:
            raise UnknownPreviousResponse(e.message, param=param) from e
        if entry.is_running:
            raise InvalidRequest(f"the response {shorten(response_id)} is in progress: wait for its end", param=param)
        return entry.turn

    def drop(self, entry: Stored) -> None:
        """Forget a response; one that runs is not cancelled. Idempotent."""
        for kept in (self._running, self._ended):
            if kept.get(entry.response_id) is entry:
                del kept[entry.response_id]
                self._forget(entry)
                self._forget_replaced(entry)

    def _give_back(self, entry: Stored) -> None:
        """Forget a response that runs, and keep the one that it replaced."""
        replaced, entry.replaced = entry.replaced, None
        self.drop(entry)
        if replaced is not None:
            self._ended[replaced.response_id] = replaced
            self._touch(replaced)

    def _forget_replaced(self, entry: Stored) -> None:
        if entry.replaced is not None:
            self._forget(entry.replaced)
            entry.replaced = None

    def _forget(self, entry: Stored) -> None:
        self.num_bytes -= entry.num_bytes
        self._release(entry.turn)

    @property
    def _is_full(self) -> bool:
        return self.num_bytes > self._limits.max_bytes or len(self) > self._limits.max_entries

    def _touch(self, entry: Stored) -> None:
        self._ended.move_to_end(entry.response_id)
        entry.expires_s = self._now() + self._limits.lifetime_s

    def _remove_old(self) -> None:
        now = self._now()
        while self._ended and (oldest := next(iter(self._ended.values()))).expires_s <= now:
            self.drop(oldest)

    def _make_room(self) -> None:
        self._remove_old()
        while self._is_full and self._ended:
            self.drop(next(iter(self._ended.values())))

    def _hold(self, turn: StoredTurn | None) -> None:
        """Count one more user of `turn`."""
        while turn is not None:
            turn.num_users += 1
            if turn.num_users > 1:
                return
            self.num_bytes += OVERHEAD_BYTES + len(turn.messages)
            turn = turn.before

    def _release(self, turn: StoredTurn | None) -> None:
        while turn is not None:
            turn.num_users -= 1
            if turn.num_users:
                return
            self.num_bytes -= OVERHEAD_BYTES + len(turn.messages)
            turn = turn.before


def history(turn: StoredTurn | None) -> list[str]:
    """Messages of a conversation, the oldest first: parts that are joined by commas."""
    found: list[str] = []
    while turn is not None:
        if turn.messages:
            found.append(turn.messages)
        turn = turn.before
    return found[::-1]


def _unknown(response_id: str) -> str:
    return (
        f"Response with id {shorten(response_id)} not found: it was not stored, is too old, or another router made it. "
        "Send the conversation in input"
    )
