"""ASGI middleware of every HTTP call: id, trace, count, CORS, and the check of its key before its body is read.

CallId ── CORS, where it is configured: answers preflights, which carry no key ── KeyCheck ── the application
"""

import asyncio
import secrets
from dataclasses import dataclass, field

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....workers.common.errors import Overloaded, Unauthenticated
from ....workers.telemetry.logs import CALL as LOGGED_CALL
from ....workers.telemetry.logs import CallIds
from ...telemetry.call_trace import RESPONSE_HEADER, TRACE, CallTrace, Tracer
from ...telemetry.http_trace import begin_http, end_http
from ..access.accounts import Account
from ..access.key_ring import KeyRing, is_bearer
from ..access.limits import HEADER_NAMES
from ..openai.fields import HEADER
from .errors import error_response
from .metrics import HttpMetrics
from .operations import OPERATIONS
from .stream import SEND

# Called by orchestrators and by readers of the API's description, who have no key.
OPEN_PATHS = frozenset(o.path for o in OPERATIONS.values() if o.is_open and "{" not in o.path)
OPEN_FOLDERS = tuple(o.path.partition("{")[0] for o in OPERATIONS.values() if o.is_open and "{" in o.path)
# They tell of the calls of all keys: for the operator.
OPERATOR_PATHS = frozenset({"/metrics", "/load", "/dashboard/data"})
CALL_ID_BYTES = 16
CALL = "key_call"  # in a call's state: on the account of its key; absent where no key is needed
OWNER = "owner"  # in a call's state: name of its key; absent where no key is needed
WORK = "work"  # in a call's state: task that goes on after the answer, until which the call lasts; absent without one
CANCEL = "/cancel"  # ends a call, which must not wait for it to end
ID_HEADER = "x-request-id"
# Headers that pages of another origin may read.
EXPOSED = (ID_HEADER, HEADER, RESPONSE_HEADER, "server-timing", "retry-after", *HEADER_NAMES)
PREFLIGHT_S = 600  # how long browsers may cache a preflight


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Keys and origins that may call. `metrics_key`: for OPERATOR_PATHS, which the single key opens too, and no key of
    a file; None: the single key alone."""

    keys: KeyRing = field(default_factory=KeyRing)
    metrics_key: str | None = None
    cors_origins: tuple[str, ...] = ()


def surround(
    app: ASGIApp, access: AccessPolicy, metrics: HttpMetrics, tracer: Tracer | None = None, tag: str = ""
) -> ASGIApp:
    """Middleware around `app`. `tag`: begins the ids of its calls."""
    inner: ASGIApp = _KeyCheck(app, access)
    if access.cors_origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=access.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # OpenAI's browser client adds a dozen headers
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_S,
        )
    return _CallId(inner, metrics, tracer, tag)


class _CallId:
    """Middleware that gives every call an id and a trace, names its unknown fields, and counts its answer."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, tracer: Tracer | None, tag: str) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._tag = tag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call_id = self._tag + secrets.token_hex(CALL_ID_BYTES)[len(self._tag) :]
        request_id = f"req-{call_id}"
        scope["state"] = {**scope.get("state", {}), "call_id": call_id, SEND: send}
        own = [(ID_HEADER.encode(), request_id.encode())]
        trace = self._begin_trace(scope, request_id, own)
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                ignored: str = scope["state"].get("ignored", "")
                named = [(HEADER.encode(), ignored.encode())] if ignored else []
                message["headers"] = [*message.get("headers", ()), *own, *named]
                status = message["status"]
                self._metrics.answered(scope["path"], message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if trace is not None and self._tracer is not None:
                self._end_trace(self._tracer, trace, status, scope)

    def _begin_trace(self, scope: Scope, request_id: str, headers: list[tuple[bytes, bytes]]) -> CallTrace | None:
        """Begin the trace of a call, and add its header to those of the answer. None: the call is not traced. Log lines
        of the call have its ids."""
        trace = None
        if self._tracer is not None:
            method, path, scheme = scope["method"], scope["path"], scope.get("scheme", "http")
            now = asyncio.get_running_loop().time()
            trace = begin_http(self._tracer, method, path, scheme, scope["headers"], now, request_id)
        if trace is None:
            LOGGED_CALL.set(CallIds(request_id))
            return None
        scope["state"][TRACE] = trace
        headers.append((RESPONSE_HEADER.encode(), trace.response_header.encode()))
        LOGGED_CALL.set(CallIds(request_id, trace.context.trace_id, trace.context.span_id))
        return trace

    def _end_trace(self, tracer: Tracer, trace: CallTrace, status: int | None, scope: Scope) -> None:
        """End the trace of a call, or have it ended with the call's work, which may go on after the answer."""
        loop, work = asyncio.get_running_loop(), scope["state"].get(WORK)
        if work is None:
            end_http(tracer, trace, status, loop.time())
        else:
            work.add_done_callback(lambda _: end_http(tracer, trace, status, loop.time()))


class _KeyCheck:
    def __init__(self, app: ASGIApp, access: AccessPolicy) -> None:
        self._app = app
        self._keys = access.keys
        self._metrics_key = access.metrics_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys.is_open and scope["path"] not in OPERATOR_PATHS:
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))  # of those that were sent twice, the first
        given = headers.get(b"authorization", b"")
        if not given and (key := headers.get(b"x-api-key")):  # as Anthropic's clients send it
            given = b"Bearer " + key
        account = self._keys.find(given)
        if not self._opens(scope["path"], given, account):
            await _refuse(scope, receive, send)
            return
        if account is not None:
            scope["state"][OWNER] = account.name
        if account is None or scope["method"] != "POST" or scope["path"].endswith(CANCEL):
            await self._app(scope, receive, send)
            return
        try:
            call = account.begin()
        except Overloaded as e:
            response = error_response(e, Request(scope))
            response.headers.update(dict(account.headers()))
            await response(scope, receive, send)
            return
        scope["state"][CALL] = call
        try:
            await self._app(scope, receive, _with_headers(account, send))
        finally:
            if WORK in scope["state"]:
                scope["state"][WORK].add_done_callback(lambda _: call.end())
            else:
                call.end()

    def _opens(self, path: str, given: bytes, account: Account | None) -> bool:
        if path not in OPERATOR_PATHS:
            return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS) or account is not None
        if self._metrics_key is not None and is_bearer(given, self._metrics_key):
            return True
        return self._keys.is_single(given) or (self._keys.is_open and self._metrics_key is None)


def _with_headers(account: Account, send: Send) -> Send:
    """`send` that tells how much the key may still use."""
    if not account.headers():
        return send

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            found = [(name.encode(), value.encode()) for name, value in account.headers()]
            message["headers"] = [*message.get("headers", ()), *found]
        await send(message)

    return send_with_headers


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    how = "'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    error = Unauthenticated(f"the API key is missing or wrong: send it as {how}")
    response = error_response(error, Request(scope))
    response.headers["www-authenticate"] = "Bearer"
    await response(scope, receive, send)
