"""OpenAI's HTTP API over a FrontDoor.

    POST /v1/completions, /v1/chat/completions      GET /v1/models, /v1/models/{id}
    POST /v1/messages, /v1/messages/count_tokens (Anthropic's)
    POST /tokenize, /detokenize (vLLM's): tokenize.py
    POST /v1/embeddings: embeddings.py
    POST /invocations: a chat, a completion or embeddings, as Amazon SageMaker asks for them
    POST /v1/responses and what belongs to it: responses.py
    GET  /health, /health/decode (200 ready, 503 not), /load, /metrics (Prometheus), /version, /openapi.json
    GET  /dashboard, /dashboard/assets/{name}, /dashboard/data: ../dashboard/pages.py

The server gives every call an id: in the header x-request-id, in the answer, in every error. Every error is
OpenAI's object {"error": {message, type, param, code}} under the status of its class in workers/common/errors.py.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .... import __version__
from ....workers.common.errors import DiptychError, InvalidRequest
from ....workers.core.runner import ModelInfo
from ...common.admission import RouterLoad
from ...common.quota import Quota
from ...common.timings import server_timing
from ...telemetry.call_trace import TRACE, Tracer
from ...tokens.prompt_encoding import Encoded
from ..answer_form import AnswerForm
from ..anthropic.body import CountBody, MessagesBody
from ..anthropic.format import MessagesFormat
from ..dashboard.pages import DashboardApi
from ..dashboard.snapshots import Snapshots
from ..front_door import FrontDoor, GenerationSpec
from ..generation import MIN_LARGE_SIZE, Generation
from ..json_parts import to_json, to_small_json
from ..openai.format import ChatFormat, CompletionFormat, check_repeated
from ..openai.parsed_format import ParsedChatFormat
from ..openai.types import ChatBody, CompletionBody, ParsedRequest
from ..responses.store import StoreLimits
from ..retries.event_ids import EventIds
from ..whole_answers import gather
from .calls import CallReader, answer_id
from .edge import CALL, AccessPolicy, surround
from .embeddings import EmbeddingsApi
from .errors import EXCEPTION_HANDLERS, error_event, error_response, renaming
from .metrics import HttpMetrics
from .openapi import document
from .operations import OPERATIONS
from .responses import ResponsesApi
from .stream import EventStream, LastEvents, while_connected
from .tokenize import TokenizeApi

_OF_THE_BODY = (b"content-length", b"content-encoding")  # headers of it as it was sent

Handler = Callable[[Request], Awaitable[Response | EventStream]]


def make_app(
    door: FrontDoor,
    access: AccessPolicy | None = None,
    metrics: HttpMetrics | None = None,
    kept: StoreLimits | None = None,
    tracer: Tracer | None = None,
    snapshots: Snapshots | None = None,
) -> ASGIApp:
    """ASGI application of the API. `metrics`: those of its port; `kept`: limits of the responses that it keeps;
    `tracer`: of its calls; None: they are not traced; `snapshots`: for the dashboard."""
    metrics = metrics or HttpMetrics()
    api = HttpApi(door, metrics)
    responses = ResponsesApi(door, api.calls, api.gathered, kept)
    tokens = TokenizeApi(door, api.calls.bodies, api.calls.unknown_fields)
    embeddings = EmbeddingsApi(door, api.calls)
    dashboard = DashboardApi(snapshots)
    handlers: dict[str, Handler] = {
        "completions": api.completions,
        "chat_completions": api.chat_completions,
        "create_response": responses.create,
        "count_input": responses.count,
        "retrieve_response": responses.retrieve,
        "delete_response": responses.delete,
        "cancel_response": responses.cancel,
        "input_items": responses.input_items,
        "messages": api.messages,
        "count_tokens": api.count_tokens,
        "embeddings": embeddings.create,
        "invocations": _Invocations(
            {"messages": api.chat_completions, "prompt": api.completions, "input": embeddings.create}, api.calls
        ),
        "tokenize": tokens.tokenize,
        "detokenize": tokens.detokenize,
        "models": api.models,
        "model": api.model,
        "health": api.health,
        "decode_health": api.decode_health,
        "load": api.load,
        "metrics": api.metrics,
        "dashboard": dashboard.page,
        "dashboard_asset": dashboard.asset,
        "dashboard_data": dashboard.data,
        "version": api.version,
        "openapi": api.openapi,
    }
    app = Starlette(routes=_routes(handlers), exception_handlers=EXCEPTION_HANDLERS)
    app.router.redirect_slashes = False
    direct = ServerErrorMiddleware(_DirectCalls(handlers, app), EXCEPTION_HANDLERS[Exception])
    return surround(direct, access or AccessPolicy(), metrics, tracer, door.tag)


def _routes(handlers: Mapping[str, Handler]) -> list[Route]:
    """Route of each path of the operations, with the handlers of its methods."""
    assert handlers.keys() == OPERATIONS.keys()
    by_path: dict[str, dict[str, Handler]] = {}
    for name, operation in OPERATIONS.items():
        by_path.setdefault(operation.path, {})[operation.method] = handlers[name]
    return [Route(path, _by_method(found), methods=list(found)) for path, found in by_path.items()]


def _by_method(handlers: Mapping[str, Handler]) -> Handler:
    if len(handlers) == 1:
        return next(iter(handlers.values()))

    async def handle(request: Request) -> Response | EventStream:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return handle


class _DirectCalls:
    """Handles calls of the operations whose paths have no parameter; `app` handles all others. A small call costs
    Starlette as much to route as to read its body."""

    def __init__(self, handlers: Mapping[str, Handler], app: ASGIApp) -> None:
        self._handlers = {(o.method, o.path): handlers[name] for name, o in OPERATIONS.items() if "{" not in o.path}
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            answer = await handler(request)
            await answer(scope, receive, send)
        except DiptychError as e:
            await error_response(e, request)(scope, receive, send)


class _Invocations:
    """Calls of which the body says for which operation they are."""

    def __init__(self, handlers: Mapping[str, Handler], calls: CallReader) -> None:
        """`handlers`: by the field that only bodies of theirs have."""
        self._handlers = handlers
        self._calls = calls

    async def __call__(self, request: Request) -> Response | EventStream:
        body, fields = await self._calls.read_fields(request)
        found = next((handler for field, handler in self._handlers.items() if field in fields), None)
        if found is None:
            raise InvalidRequest(
                "messages is missing: send it for a chat, prompt for a completion, or input for embeddings",
                param="messages",
            )

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        headers = [(name, value) for name, value in request.scope["headers"] if name not in _OF_THE_BODY]
        return await found(Request({**request.scope, "headers": headers}, receive))


class HttpApi:
    def __init__(self, door: FrontDoor, metrics: HttpMetrics) -> None:
        self._door = door
        self._metrics = metrics
        self._started = int(time.time())
        self.calls = CallReader(door)
        self.gathered = Quota(
            door.limits.max_gathered_logprobs,
            "other answers without streaming hold too many log-probabilities: try later, or send stream=true",
        )

    async def completions(self, request: Request) -> Response | EventStream:
        call = await self.calls.read(CompletionBody, request)
        generation = await self._generation(call, f"cmpl-{answer_id(request, call.spec.key)}", request)
        echo = await self._echo(call.spec, generation) if call.echo else ()
        form = CompletionFormat(generation, self._door.tokenizer, self._name(call), call.include, echo)
        return await self._answer(request, generation, form, call)

    async def chat_completions(self, request: Request) -> Response | EventStream:
        call = await self.calls.read(ChatBody, request)
        generation = await self._generation(call, f"chatcmpl-{answer_id(request, call.spec.key)}", request)
        form = self._chat_format(call, generation)
        return await self._answer(request, generation, form, call)

    async def _generation(self, call: ParsedRequest, its_id: str, request: Request) -> Generation:
        """Start what a call asks for, on the account of its key, and in its trace."""
        state = request.scope["state"]
        try:
            return await self._door.start(call.spec, its_id, state.get(CALL), state.get(TRACE))
        except InvalidRequest:
            with renaming(call.names):  # entered here alone: most calls have no error
                raise

    def _chat_format(self, call: ParsedRequest, generation: Generation) -> ChatFormat:
        door, name = self._door, self._name(call)
        prefix = call.spec.continues or "" if call.echo else ""
        if call.spec.tools is None or generation.completions[0].parser is None:
            return ChatFormat(generation, door.tokenizer, name, call.include, prefix)
        return ParsedChatFormat(
            generation, door.tokenizer, name, call.include, call.spec.tools, door.dialect.has_short_ids, prefix
        )

    async def messages(self, request: Request) -> Response | EventStream:
        call = await self.calls.read(MessagesBody, request)
        generation = await self._generation(call, f"msg_{answer_id(request, call.spec.key)}", request)
        form = MessagesFormat(
            generation,
            self._name(call),
            call.spec.tools,
            num_asked=call.spec.default_max_tokens,
            short_ids=self._door.dialect.has_short_ids,
            reasoning=call.include.reasoning,
        )
        return await self._answer(request, generation, form, call)

    async def count_tokens(self, request: Request) -> Response:
        call = await self.calls.read(CountBody, request)
        self._door.model(call.spec.model)
        [prompt] = call.spec.prompts
        return JSONResponse({"input_tokens": len(await self._door.encode(prompt))})

    async def models(self, _: Request) -> Response:
        cards = [self._model_card(self._door.model(), name) for name in self._door.model_names()]
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}  # for Anthropic's clients
        return JSONResponse({"object": "list", "data": cards, **ends})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._model_card(self._door.model(name), name))

    async def health(self, _: Request) -> Response:
        health = self._door.readiness.health()
        return JSONResponse(
            {
                "status": "ready" if health.ready else "not ready",
                "prefill_workers": health.num_prefill_workers,
                "decode_workers": health.num_decode_workers,
                "mixed_workers": health.num_mixed_workers,
                "requests": health.num_requests,
            },
            status_code=_ready_status(health.ready),
        )

    async def decode_health(self, _: Request) -> Response:
        found = await self._door.readiness.decoding()
        age_s = found.decoded_s_ago
        return JSONResponse(
            {
                "status": "ready" if found.ready else "not ready",
                "decoded_s_ago": None if age_s is None else round(age_s, 3),
                "problem": found.problem,
            },
            status_code=_ready_status(found.ready),
        )

    async def load(self, _: Request) -> Response:
        ready, outlook = self._door.readiness.health().ready, self._door.source.outlook()
        return JSONResponse(RouterLoad(self._door.tag, ready, outlook).to_json())

    async def metrics(self, _: Request) -> Response:
        found = self._door.source.metrics() + self._metrics.exposition()
        return Response(found, media_type="text/plain; version=0.0.4")

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def openapi(self, _: Request) -> Response:
        # Made on a thread: the first call would stop all streams for a moment.
        return Response(await asyncio.to_thread(document), media_type="application/json")

    async def _answer(
        self, request: Request, generation: Generation, form: AnswerForm, call: ParsedRequest
    ) -> Response | EventStream:
        if call.stream:
            events, key = _events(generation, form), call.spec.key
            ids = None if key is None else EventIds(key.num_seen)
            return EventStream(events, lambda e: error_event(e, request), generation.timeout_s, ids)
        whole = await while_connected(request.scope, self._whole(generation, form))
        return Response(whole, headers=_server_timing(generation), media_type="application/json")

    async def _whole(self, generation: Generation, form: AnswerForm) -> bytes:
        async with aclosing(generation.batches()) as batches:
            with self.gathered.share() as held:
                answer = await form.whole(await gather(batches, held))
                return to_small_json(answer) if form.is_small else await to_json(answer)

    async def _echo(self, spec: GenerationSpec, generation: Generation) -> list[str]:
        """Text of the prompt, for each choice. Raises InvalidRequest."""
        check_repeated(generation, "echo")
        texts: list[str] = []
        for prompt, completion in zip(spec.prompts, generation.completions[:: spec.n], strict=True):
            text = prompt.text if isinstance(prompt, Encoded) else prompt if isinstance(prompt, str) else None
            if text is None:
                text = await self._decode(completion.request.prompt_token_ids)
            texts += [text] * spec.n
        return texts

    async def _decode(self, ids: Sequence[int]) -> str:
        decode = partial(self._door.tokenizer.decode, special=True)
        return decode(ids) if len(ids) < MIN_LARGE_SIZE else await asyncio.to_thread(decode, ids)

    def _name(self, call: ParsedRequest) -> str:
        """Name of the model in the answer: as the client asked for it."""
        return call.spec.model or self._door.model().name

    def _model_card(self, info: ModelInfo, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "diptych",
            "max_model_len": info.max_context_tokens,
            "root": info.name,
            # As Anthropic's clients read it:
            "type": "model",
            "display_name": name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "max_input_tokens": info.max_context_tokens,
        }


async def _events(generation: Generation, form: AnswerForm) -> AsyncGenerator[str, None]:
    last = ""  # events of the last batch, which are sent together with what ends the stream
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            events = form.events(await form.prepare(batch) if form.tells_of_prompts else batch)
            if generation.is_over:
                last += events
            elif events:
                yield events
    yield LastEvents(last + form.last_events())


def _ready_status(is_ready: bool) -> HTTPStatus:
    return HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE


def _server_timing(generation: Generation) -> dict[str, str]:
    """Server-Timing header, of the completion that took longest: the client waited for it."""
    timings = max((t for _, t in generation.timings), key=lambda t: t.total_s, default=None)
    return {} if timings is None else {"server-timing": server_timing(timings)}
