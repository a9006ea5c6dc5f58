"""Sends the sessions of a workload to an endpoint, and keeps the reply to each request.

closed loop     `concurrency` clients, each with one session after the other
open loop       a session starts at its time, whether or not earlier ones have ended; `concurrency` bounds how many run
                at once, and the wait for that is not measured (as in `vllm bench serve`)
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .openai import Asking
from .types import BenchRequest, Messages, Prompt, Reply, Session, Turn


class ServerEndpoint(Protocol):
    async def find_model(self, wanted: str | None, timeout_s: float) -> str: ...

    async def ask(self, call: BenchRequest, asking: Asking) -> Reply: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a workload. `starts_s`: start of each session, in order; None: a closed loop. `concurrency`: 0 is
    unbounded. `think_s`: between an answer and the next turn. `max_s`: last start of a session; 0: no limit."""

    starts_s: Sequence[float] | None
    concurrency: int
    think_s: float = 0.0
    max_s: float = 0.0


class Load:
    """Load on an endpoint. `replies` grows as requests end; `on_reply` is called with each."""

    def __init__(self, endpoint: ServerEndpoint, asking: Asking, on_reply: Callable[[Reply], None]) -> None:
        self._endpoint = endpoint
        self._asking = asking
        self._on_reply = on_reply
        self.replies: list[Reply] = []

    async def run(self, sessions: Sequence[Session], pace: Pace) -> None:
        """Run all sessions. Cancelling ends it at once: requests under way are not counted."""
        if pace.starts_s is None:
            rest = self._in_time(sessions, pace)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(pace.concurrency, len(sessions))):
                    group.create_task(self._client(rest, pace))
        else:
            await self._open_loop(sessions, pace, pace.starts_s)

    async def _open_loop(self, sessions: Sequence[Session], pace: Pace, starts_s: Sequence[float]) -> None:
        gate = asyncio.Semaphore(pace.concurrency) if pace.concurrency else None
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for session, start_s in sorted(zip(sessions, starts_s, strict=True), key=lambda pair: pair[1]):
                if pace.max_s and start_s >= pace.max_s:
                    break
                await asyncio.sleep(began + start_s - time.perf_counter())
                if gate is not None:
                    await gate.acquire()
                task = group.create_task(self._talk(session, pace.think_s))
                if gate is not None:
                    task.add_done_callback(lambda _, gate=gate: gate.release())

    @staticmethod
    def _in_time(sessions: Sequence[Session], pace: Pace) -> Iterator[Session]:
        began = time.perf_counter()
        for session in sessions:
            if pace.max_s and time.perf_counter() - began >= pace.max_s:
                return
            yield session

    async def _client(self, rest: Iterator[Session], pace: Pace) -> None:
        for session in rest:
            await self._talk(session, pace.think_s)

    async def _talk(self, session: Session, think_s: float) -> None:
        """Run the turns of a session in order. A turn that fails ends it."""
        history = History(self._asking.is_chat)
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(think_s)
            reply = await self._endpoint.ask(history.ask(turn), self._asking)
            self.replies.append(reply)
            self._on_reply(reply)
            if reply.failure is not None:
                return
            history.answered(reply)


class History:
    """Conversation so far, in the endpoint's form."""

    def __init__(self, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self._token_ids: list[int] = []
        self._num_tokens = 0

    def ask(self, turn: Turn) -> BenchRequest:
        self._num_tokens += turn.num_tokens
        return BenchRequest(self._prompt(turn), self._num_tokens, turn.max_tokens)

    def answered(self, reply: Reply) -> None:
        self._num_tokens += reply.num_output
        if self._is_chat:
            self._messages.append({"role": "assistant", "content": reply.text})
        self._text += reply.text
        self._token_ids += reply.token_ids

    def _prompt(self, turn: Turn) -> Prompt:
        if not isinstance(turn.text, str):
            self._token_ids += turn.text
            return list(self._token_ids)
        if self._is_chat:
            self._messages.append({"role": "user", "content": turn.text})
            messages: Messages = list(self._messages)
            return messages
        self._text += turn.text
        return self._text
