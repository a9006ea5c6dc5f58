"""OpenAI's HTTP API over a FrontDoor.

    POST /v1/completions, /v1/chat/completions      GET /v1/models, /v1/models/{id}
    GET  /health (200 ready, 503 not), /metrics (Prometheus), /version

Every call has an id of our making: in the header x-request-id, in the id of the answer, in every error. Every error is
OpenAI's object {"error": {message, type, param, code}} under the status of its class in workers/errors.py.
"""

import math
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..workers.errors import DiptychError, InternalError, InvalidRequest, Overloaded, Unauthenticated
from ..workers.runner import ModelInfo
from .auth import ApiKey
from .front_door import FrontDoor, GenerationSpec
from .generation import Generation, TextDelta
from .http_stream import SEND, EventStream, read_json, while_connected
from .openai_calls import with_prompts
from .openai_fields import HEADER, UnknownFields, header_value
from .openai_format import ChatFormat, CompletionFormat, Format, to_event
from .openai_types import Body, Call, ChatBody, CompletionBody, parse
from .prompt_encoding import Encoded
from .timings import server_timing

MAX_INLINE_BYTES = 65_536  # of a body: what takes about 2 ms to read stays in the router
OPEN_PATHS = frozenset({"/health", "/version"})  # asked by orchestrators, which hold no key


def make_app(door: FrontDoor, api_key: str | None = None) -> ASGIApp:
    """The API as an ASGI application. Where there is an `api_key`, all but health and version ask for it."""
    api = HttpApi(door)
    app = Starlette(
        routes=[
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/version", api.version),
        ],
        exception_handlers={DiptychError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
    )
    app.router.redirect_slashes = False
    return _Edge(app, ApiKey(api_key))


class HttpApi:
    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._started = int(time.time())
        self._unknown_fields = UnknownFields(door.limits.strict)

    async def completions(self, request: Request) -> Response | EventStream:
        call = await self._call(CompletionBody, request)
        generation = await self._door.start(call.spec, f"cmpl-{_call_id(request)}")
        echo = self._echo(call.spec, generation) if call.echo else ()
        name = self._door.model().name
        form = CompletionFormat(generation, self._door.tokenizer, name, call.include, echo)
        return await self._answer(request, generation, form, call.stream)

    async def chat_completions(self, request: Request) -> Response | EventStream:
        call = await self._call(ChatBody, request)
        generation = await self._door.start(call.spec, f"chatcmpl-{_call_id(request)}")
        form = ChatFormat(generation, self._door.tokenizer, self._door.model().name, call.include)
        return await self._answer(request, generation, form, call.stream)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card(self._door.model())]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model_card(self._door.model(request.path_params["name"])))

    async def health(self, _: Request) -> Response:
        health = self._door.source.health()
        return JSONResponse(
            {
                "status": "ready" if health.ready else "not ready",
                "prefill_workers": health.num_prefill_workers,
                "decode_workers": health.num_decode_workers,
                "mixed_workers": health.num_mixed_workers,
                "requests": health.num_requests,
            },
            status_code=HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    async def metrics(self, _: Request) -> Response:
        return Response(self._door.source.metrics(), media_type="text/plain; version=0.0.4")

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _call(self, kind: type[Body], request: Request) -> Call:
        """Read what is asked for. Unknown fields are named in a header of whatever is answered."""
        limits = self._door.limits
        call = await self._read(kind, await read_json(request, limits.max_body_bytes, limits.body_timeout_s))
        self._unknown_fields.note(call.unknown)
        request.state.ignored = header_value(call.unknown)
        return call

    async def _read(self, kind: type[Body], body: bytes) -> Call:
        if len(body) <= MAX_INLINE_BYTES:
            return parse(kind, body).call()
        self._door.source.admit(1)
        most = self._door.model().max_context_tokens
        return with_prompts(*await self._door.encoder.read_body(kind.__name__, body, most))

    async def _answer(
        self, request: Request, generation: Generation, form: Format, stream: bool
    ) -> Response | EventStream:
        if stream:
            request_id = _request_id(request)
            events = _events(generation, form)
            return EventStream(events, lambda e: to_event(error_object(e, request_id)), generation.timeout_s)
        deltas = await while_connected(request.receive, _collect(generation))
        return JSONResponse(form.whole(deltas), headers=_server_timing(generation))

    def _echo(self, spec: GenerationSpec, generation: Generation) -> list[str]:
        """The prompt's text, for each choice."""
        ids = [completion.request.prompt_token_ids for completion in generation.completions]
        prompts = [spec.prompts[i // spec.n] for i in range(len(ids))]
        texts = [p.text if isinstance(p, Encoded) else p if isinstance(p, str) else None for p in prompts]
        return [self._door.tokenizer.decode(ids[i]) if text is None else text for i, text in enumerate(texts)]

    def _model_card(self, info: ModelInfo) -> dict[str, object]:
        return {
            "id": info.name,
            "object": "model",
            "created": self._started,
            "owned_by": "diptych",
            "max_model_len": info.max_context_tokens,
        }


async def _events(generation: Generation, form: Format) -> AsyncGenerator[str, None]:
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            yield form.events(batch)
    yield form.last_events()


async def _collect(generation: Generation) -> list[TextDelta]:
    async with aclosing(generation.batches()) as batches:
        return [delta async for batch in batches for delta in batch]


def _server_timing(generation: Generation) -> dict[str, str]:
    """Of the completion that took longest, for that is what the client waited for."""
    timings = max((t for _, t in generation.timings), key=lambda t: t.total_s, default=None)
    return {} if timings is None else {"server-timing": server_timing(timings)}


class _Edge:
    """What surrounds every call: its id, the names of its unknown fields, and the check of its key."""

    def __init__(self, app: ASGIApp, key: ApiKey) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call_id = uuid.uuid4().hex
        scope["state"] = {**scope.get("state", {}), "call_id": call_id, SEND: send}
        header = (b"x-request-id", f"req-{call_id}".encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                ignored: str = scope["state"].get("ignored", "")
                named = [(HEADER.encode(), ignored.encode())] if ignored else []
                message["headers"] = [*message.get("headers", ()), header, *named]
            await send(message)

        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        app = self._app if scope["path"] in OPEN_PATHS or self._key.accepts(given) else _refuse
        await app(scope, receive, send_with_id)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = Unauthenticated("the API key is missing or wrong: send it as 'Authorization: Bearer KEY'")
    response = _error_response(error, _request_id(Request(scope)))
    response.headers["www-authenticate"] = "Bearer"
    await response(scope, receive, send)


def _call_id(request: Request) -> str:
    return str(request.state.call_id)


def _request_id(request: Request) -> str:
    return f"req-{_call_id(request)}"


def error_object(error: DiptychError, request_id: str, status: int | None = None) -> dict[str, object]:
    """OpenAI's error object."""
    status = error.status if status is None else status
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": f"{error.message} (request id: {request_id})",
            "type": kind,
            "param": error.param,
            "code": None if error.code == kind else error.code,
        }
    }


def _error_response(error: DiptychError, request_id: str, status: int | None = None) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(error_object(error, request_id, status), status or error.status, headers)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DiptychError)
    return _error_response(error, _request_id(request))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = HTTPStatus(error.status_code).phrase.lower()
    message = f"{reason}: {request.method} {request.url.path[:200]}. See GET /v1/models and POST /v1/chat/completions"
    response = _error_response(InvalidRequest(message), _request_id(request), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, _: Exception) -> Response:
    # Starlette raises it again after this answer, so that the server logs it.
    return _error_response(InternalError("the server failed: please report this"), _request_id(request))
