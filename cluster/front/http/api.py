"""OpenAI's HTTP API over a FrontDoor.

    POST /v1/completions, /v1/chat/completions      GET /v1/models, /v1/models/{id}
    GET  /health (200 ready, 503 not), /metrics (Prometheus), /version

The server gives every call an id: in the header x-request-id, in the answer, in every error. Every error is
OpenAI's object {"error": {message, type, param, code}} under the status of its class in workers/common/errors.py.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .... import __version__
from ....workers.core.runner import ModelInfo
from ...common.quota import Quota
from ...common.timings import server_timing
from ...tokens.prompt_encoding import Encoded
from ..front_door import FrontDoor, GenerationSpec
from ..generation import MIN_LARGE_SIZE, Generation
from ..json_parts import to_json, to_small_json
from ..levels import NO_LEVEL
from ..openai.calls import with_prompts
from ..openai.fields import UnknownFields, header_value
from ..openai.format import AnswerFormat, ChatFormat, CompletionFormat, check_repeated, to_event
from ..openai.types import Body, ChatBody, CompletionBody, ParsedRequest, parse
from ..whole_answers import bounded, gather
from .body import read_json
from .edge import AccessPolicy, surround
from .errors import EXCEPTION_HANDLERS, call_id, error_object, request_id
from .level_headers import level_of
from .metrics import HttpMetrics
from .stream import EventStream, while_connected

MAX_INLINE_BYTES = 65_536  # of a body: smaller ones are read in the router, in about 2 ms


def make_app(door: FrontDoor, access: AccessPolicy | None = None, metrics: HttpMetrics | None = None) -> ASGIApp:
    """ASGI application of the API. `metrics`: those of its port."""
    metrics = metrics or HttpMetrics()
    api = HttpApi(door, metrics)
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
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router.redirect_slashes = False
    return surround(app, access or AccessPolicy(), metrics)


class HttpApi:
    def __init__(self, door: FrontDoor, metrics: HttpMetrics) -> None:
        self._door = door
        self._metrics = metrics
        self._started = int(time.time())
        self._unknown_fields = UnknownFields(door.limits.strict)
        limits = door.limits
        self._bodies = Quota(limits.max_held_body_bytes, "too many bytes of bodies are being read: try again later")
        self._gathered = Quota(
            limits.max_gathered_logprobs,
            "other answers without streaming hold too many log-probabilities: try later, or send stream=true",
        )

    async def completions(self, request: Request) -> Response | EventStream:
        call = await self._call(CompletionBody, request)
        generation = await self._door.start(call.spec, f"cmpl-{call_id(request)}")
        echo = await self._echo(call.spec, generation) if call.echo else ()
        form = CompletionFormat(generation, self._door.tokenizer, self._name(call), call.include, echo)
        return await self._answer(request, generation, form, call.stream)

    async def chat_completions(self, request: Request) -> Response | EventStream:
        call = await self._call(ChatBody, request)
        generation = await self._door.start(call.spec, f"chatcmpl-{call_id(request)}")
        form = ChatFormat(generation, self._door.tokenizer, self._name(call), call.include)
        return await self._answer(request, generation, form, call.stream)

    async def models(self, _: Request) -> Response:
        cards = [self._model_card(self._door.model(), name) for name in self._door.model_names()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._model_card(self._door.model(name), name))

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
        found = self._door.source.metrics() + self._metrics.exposition()
        return Response(found, media_type="text/plain; version=0.0.4")

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _call(self, kind: type[Body], request: Request) -> ParsedRequest:
        """Read a request's headers and body. The answer names unknown fields in a header."""
        limits, level = self._door.limits, level_of(request.headers)
        with self._bodies.share() as held:
            body = await read_json(request, limits.max_body_bytes, limits.body_timeout_s, held)
            call = await self._read(kind, body)
            del body
        self._unknown_fields.note(call.unknown)
        if call.unknown:
            request.state.ignored = header_value(call.unknown)
        if level != NO_LEVEL:
            call = replace(call, spec=replace(call.spec, level=replace(level, tier=call.spec.level.tier)))
        if call.stream or call.spec.sampling.logprobs is None:
            return call
        return replace(call, spec=bounded(call.spec, limits.max_answer_logprobs))

    async def _read(self, kind: type[Body], body: bytes) -> ParsedRequest:
        if len(body) <= MAX_INLINE_BYTES:
            return parse(kind, body).call()
        self._door.source.admit(1)
        most, max_prompts = self._door.model().max_context_tokens, self._door.limits.max_sequences
        loop = asyncio.get_running_loop()
        began = loop.time()
        call = with_prompts(*await self._door.encoder.read_body(kind.__name__, body, most, max_prompts))
        return replace(call, spec=replace(call.spec, waited_s=loop.time() - began))

    async def _answer(
        self, request: Request, generation: Generation, form: AnswerFormat, stream: bool
    ) -> Response | EventStream:
        if stream:
            its_id = request_id(request)
            events = _events(generation, form)
            return EventStream(events, lambda e: to_event(error_object(e, its_id)), generation.timeout_s)
        whole = await while_connected(request.receive, self._whole(generation, form))
        return Response(whole, headers=_server_timing(generation), media_type="application/json")

    async def _whole(self, generation: Generation, form: AnswerFormat) -> bytes:
        async with aclosing(generation.batches()) as batches:
            with self._gathered.share() as held:
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
        }


async def _events(generation: Generation, form: AnswerFormat) -> AsyncGenerator[str, None]:
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            yield form.events(await form.prepare(batch) if form.tells_of_prompts else batch)
    yield form.last_events()


def _server_timing(generation: Generation) -> dict[str, str]:
    """Server-Timing header, of the completion that took longest: the client waited for it."""
    timings = max((t for _, t in generation.timings), key=lambda t: t.total_s, default=None)
    return {} if timings is None else {"server-timing": server_timing(timings)}
