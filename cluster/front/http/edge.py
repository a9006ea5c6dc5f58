"""ASGI middleware of every HTTP call: id, count, CORS, and the check of its key before its body is read.

CallId ── CORS, where it is configured: answers preflights, which carry no key ── KeyCheck ── the application
"""

import uuid
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....workers.common.errors import Unauthenticated
from ..auth import ApiKey
from ..openai.fields import HEADER
from .errors import error_response, request_id
from .metrics import HttpMetrics
from .stream import SEND

OPEN_PATHS = frozenset({"/health", "/version"})  # called by orchestrators, which have no key
METRICS_PATH = "/metrics"
ID_HEADER = "x-request-id"
EXPOSED = (ID_HEADER, HEADER, "server-timing", "retry-after")  # headers that pages of another origin may read
PREFLIGHT_S = 600  # how long browsers may cache a preflight


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Keys and origins that may call. `metrics_key`: for /metrics; without it `api_key` is. None: no key is needed."""

    api_key: str | None = None
    metrics_key: str | None = None
    cors_origins: tuple[str, ...] = ()


def surround(app: ASGIApp, access: AccessPolicy, metrics: HttpMetrics) -> ASGIApp:
    inner: ASGIApp = _KeyCheck(app, access)
    if access.cors_origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=access.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's browser client adds a dozen headers
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_S,
        )
    return _CallId(inner, metrics)


class _CallId:
    """Middleware that gives every call an id, names its unknown fields, and counts its answer."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call_id = uuid.uuid4().hex
        scope["state"] = {**scope.get("state", {}), "call_id": call_id, SEND: send}
        header = (ID_HEADER.encode(), f"req-{call_id}".encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                ignored: str = scope["state"].get("ignored", "")
                named = [(HEADER.encode(), ignored.encode())] if ignored else []
                message["headers"] = [*message.get("headers", ()), header, *named]
                self._metrics.answered(scope["path"], message["status"])
            await send(message)

        await self._app(scope, receive, send_with_id)


class _KeyCheck:
    def __init__(self, app: ASGIApp, access: AccessPolicy) -> None:
        self._app = app
        self._key = ApiKey(access.api_key)
        self._metrics_keys = [ApiKey(key) for key in (access.metrics_key, access.api_key) if key is not None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        app = self._app if self._accepts(scope["path"], given) else _refuse
        await app(scope, receive, send)

    def _accepts(self, path: str, given: bytes) -> bool:
        if path == METRICS_PATH and self._metrics_keys:
            return any(key.accepts(given) for key in self._metrics_keys)
        return path in OPEN_PATHS or self._key.accepts(given)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = Unauthenticated("the API key is missing or wrong: send it as 'Authorization: Bearer KEY'")
    response = error_response(error, request_id(Request(scope)))
    response.headers["www-authenticate"] = "Bearer"
    await response(scope, receive, send)
