"""Sends the answer of one HTTP call, and watches whether the client is still there.

A client that leaves is noticed at once, even while nothing is being sent: the work is cancelled, which closes the token
streams, which aborts the requests on the workers.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from ....workers.common.errors import DiptychError, RequestAborted
from ..delivery import GRACE_S
from ..retries.event_ids import EventIds
from .connection import CLIENT, CUT, ClientPresence

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise a proxy buffers the tokens
]

SEND = "send"  # in a call's state: the server's own `send`, without the middleware

T = TypeVar("T")


async def while_connected(scope: Scope, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`. If the call's client leaves before, cancels the work and raises RequestAborted."""
    client: ClientPresence = scope["state"][CLIENT]
    # A separate task: resuming it for a token does not pass through the middleware.
    task = asyncio.create_task(work)
    client.add(task)
    try:
        return await task  # cancelled together with this task
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if not client.is_gone or (caller is not None and caller.cancelling()):
            raise
        raise RequestAborted("the client closed the connection") from None
    finally:
        client.discard(task)


class LastEvents(str):
    """Events that end a stream: they are sent in one write with the end of the answer."""

    __slots__ = ()


class EventStream:
    """Answer of server-sent events. The status is sent with the first event, so that an earlier error has its own
    status. A client that has not read it all shortly after `timeout_s` is disconnected."""

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        error_event: Callable[[DiptychError], str],
        timeout_s: float,
        ids: EventIds | None = None,
    ) -> None:
        """`ids`: of the events; None: they have none."""
        self._ids = ids
        self._events = events
        self._error_event = error_event
        self._timeout_s = timeout_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timer = asyncio.get_running_loop().call_later(self._timeout_s + GRACE_S, scope["state"][CUT])
        try:
            # The middleware around `send` needs only the start of the answer, and costs as much as an event.
            await while_connected(scope, self._send_events(send, scope["state"].get(SEND, send)))
        except RequestAborted:
            if not self._started:
                raise
        finally:
            timer.cancel()

    async def _send_events(self, start: Send, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not self._started:
                        self._started = True
                        await start({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    has_more = not isinstance(event, LastEvents)
                    text = event if self._ids is None else self._ids.add_to(event)
                    if text or not has_more:
                        await send({"type": "http.response.body", "body": text.encode(), "more_body": has_more})
                    if not has_more:
                        return
        except DiptychError as e:
            if not self._started:
                raise
            await send({"type": "http.response.body", "body": self._error_event(e).encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
