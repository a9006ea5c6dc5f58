"""OpenAI's Responses API over a FrontDoor.

    POST /v1/responses      GET, DELETE /v1/responses/{id}
    POST /v1/responses/{id}/cancel      GET /v1/responses/{id}/input_items
    POST /v1/responses/input_tokens

cluster/front/responses/ reads the bodies, writes the answers and keeps them.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....workers.common.errors import IdempotencyKeyReused, InvalidRequest
from ...common.quota import Quota
from ...telemetry.call_trace import TRACE
from ...tokens.prompt_encoding import WrittenChat
from ..front_door import FrontDoor, GenerationSpec
from ..openai.fields import shorten
from ..responses.answer import AnswerStyle, ResponseAnswer
from ..responses.background import BackgroundRuns
from ..responses.body import ResponseCall
from ..responses.event_record import EventRecord
from ..responses.run import ResponseRun
from ..responses.store import ResponseStore, Stored, StoredTurn, StoreLimits, history
from ..retries.answer_key import AnswerKey
from ..retries.event_ids import EventIds
from ..whole_answers import bounded
from .calls import MAX_INLINE_BYTES, CallReader, answer_id
from .edge import CALL, OWNER, WORK
from .errors import error_event, renaming
from .stream import EventStream, while_connected

COUNT_PATH = "/v1/responses/input_tokens"  # looks like that of a response
MAX_LISTED = 100  # items in one answer
_DEFAULT_LISTED = 20
# Fields as the front door names them, and as the Responses API does. A body may have a `prompt` of another kind.
_FIELDS_READ = {"max_tokens": "max_output_tokens", "messages": "input"}
_FIELDS = _FIELDS_READ | {"prompt": "input"}


@dataclass(frozen=True, slots=True)
class _Started:
    """Response that was started and does not run yet."""

    run: ResponseRun
    answer: ResponseAnswer
    entry: Stored  # where it may be kept
    timeout_s: float
    ids: EventIds | None  # of its events


class ResponsesApi:
    def __init__(self, door: FrontDoor, calls: CallReader, gathered: Quota, limits: StoreLimits | None = None) -> None:
        """`gathered`: of log-probabilities that are held until their answer ends. `limits`: of what is kept."""
        self._door = door
        self._calls = calls
        self._gathered = gathered
        self._store = ResponseStore(limits)
        self._background = BackgroundRuns(self._store)

    async def create(self, request: Request) -> Response | EventStream:
        with renaming(_FIELDS_READ):
            call = await self._calls.read_response(request)
        with renaming(_FIELDS):
            if call.in_background and (entry := self._asked_before(request, call)) is not None:
                return _of_background(entry, request, 0, _ids(call.parsed.spec))
            made = await self._start(request, call)
        if call.in_background:
            request.scope["state"][WORK] = self._background.start(made.run, made.answer, made.entry)
            return _of_background(made.entry, request, 0, made.ids)
        if call.store:
            made.run.keep(made.entry)
        if made.answer.is_streamed:
            return EventStream(made.run.events(), made.answer.error_event, made.timeout_s, made.ids)
        whole = await while_connected(request.scope, made.run.whole())
        return Response(whole, media_type="application/json")

    async def count(self, request: Request) -> Response:
        """Number of tokens of the prompt that a call would have."""
        with renaming(_FIELDS_READ):
            call = await self._calls.read_response(request)
        with renaming(_FIELDS):
            self._door.model(call.parsed.spec.model)
            before = None if call.previous is None else self._store.previous(_tenant(request), call.previous)
            num_tokens = len(await self._door.encode(WrittenChat(_written(call, before))))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def retrieve(self, request: Request) -> Response | EventStream:
        entry, query = self._found(request), request.query_params
        if query.get("stream", "false").lower() == "false":
            if "starting_after" in query:
                raise InvalidRequest("starting_after needs stream=true", param="starting_after")
            return Response(entry.response(), media_type="application/json")
        if entry.events is None:
            raise InvalidRequest(
                "only a response that was created with background=true and stream=true can be streamed again: leave "
                "stream out",
                param="stream",
            )
        return _of_background(entry, request, _num_seen(query, entry.events))

    async def delete(self, request: Request) -> Response:
        entry = self._found(request)
        if entry.cancel is not None:
            entry.cancel()
        self._store.drop(entry)
        return JSONResponse({"id": entry.response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End a response that runs. Does nothing where it was ended early. Raises InvalidRequest for one
        that has come to its end."""
        entry = self._found(request)
        if entry.is_whole:
            raise InvalidRequest(
                "Cannot cancel a synchronous response. This one has ended: only one that runs can be cancelled"
            )
        if entry.cancel is not None:
            entry.cancel()
        return Response(entry.response(), media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        items, query = list(self._found(request).items), request.query_params
        if query.get("order", "desc") not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", param="order")
        if query.get("order") != "asc":
            items.reverse()
        start = 0
        if (after := query.get("after")) is not None:
            start = next((i + 1 for i, (name, _) in enumerate(items) if name == after), -1)
            if start < 0:
                raise InvalidRequest(f"after names {shorten(after)}, which is no item of the input", param="after")
        num = _limit(query)
        page = items[start : start + num]
        first, last = (json.dumps(page[i][0]) if page else "null" for i in (0, -1))
        data = ",".join(text for _, text in page)
        more = "true" if start + num < len(items) else "false"
        whole = f'{{"object":"list","data":[{data}],"first_id":{first},"last_id":{last},"has_more":{more}}}'
        return Response(whole, media_type="application/json")

    def _asked_before(self, request: Request, call: ResponseCall) -> Stored | None:
        """Response in the background that a call with the same key has begun, unless it was ended early. Raises
        IdempotencyKeyReused."""
        key = call.parsed.spec.key
        if key is None:
            return None
        entry = self._store.get(_tenant(request), _response_id(request, key))
        if entry is None or not (entry.is_running or entry.is_whole):
            return None
        if entry.call != key.call:
            raise IdempotencyKeyReused(
                "another call has begun a response with this Idempotency-Key: choose another key"
            )
        return entry

    async def _start(self, request: Request, call: ResponseCall) -> "_Started":
        state = request.scope["state"]
        tenant = _tenant(request)
        before = None if call.previous is None else self._store.previous(tenant, call.previous)
        turn = self._store.turn_after(before, call.messages)
        written = _written(call, before)
        first_key = call.parsed.spec.key
        spec = replace(call.parsed.spec, prompts=(WrittenChat(written),))
        if spec.key is not None and before is not None:
            spec = replace(spec, key=await _key_after(spec.key, written))
        spec = bounded(spec, self._door.limits.max_answer_logprobs, "in a response: ask for fewer")
        response_id = _response_id(request, spec.key)
        generation = await self._door.start(spec, response_id, state.get(CALL), state.get(TRACE))
        dialect = self._door.dialect
        style = AnswerStyle(
            model=spec.model or self._door.model().name,
            echo=call.echo,
            is_streamed=call.parsed.stream,
            tools=spec.tools,
            short_ids=dialect.tools is not None and dialect.tools.short_ids,
            in_background=call.in_background,
        )
        answer = ResponseAnswer(generation, self._door.tokenizer, style)
        run = ResponseRun(generation, answer, self._store, self._gathered)
        entry = Stored(response_id, tenant, call.items, turn, answer.json, run.cancel)
        if call.in_background:
            entry.call = b"" if first_key is None else first_key.call
            if answer.is_streamed:
                entry.events = EventRecord(generation.timeout_s)
        return _Started(run, answer, entry, generation.timeout_s, _ids(spec))

    def _found(self, request: Request) -> Stored:
        """Raises UnknownResponse; HTTPException where the path is another operation's, which has other methods."""
        if request.url.path.endswith(COUNT_PATH):
            raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"allow": "POST"})
        return self._store.find(_tenant(request), request.path_params["response_id"])


def _tenant(request: Request) -> str:
    """Name of the call's key; empty where no key is needed."""
    return str(request.scope["state"].get(OWNER, ""))


def _response_id(request: Request, key: AnswerKey | None) -> str:
    return f"resp_{answer_id(request, key)}"


def _ids(spec: GenerationSpec) -> EventIds | None:
    return None if spec.key is None else EventIds(spec.key.num_seen)


def _of_background(
    entry: Stored, request: Request, num_seen: int, ids: EventIds | None = None
) -> Response | EventStream:
    """Response as it is now, or its events where it was asked for as a stream, without the first `num_seen`."""
    if entry.events is None:
        return Response(entry.response(), media_type="application/json")
    events, timeout_s = entry.events.after(num_seen), entry.events.timeout_s
    return EventStream(events, lambda e: error_event(e, request), timeout_s, ids)


def _num_seen(query: Mapping[str, str], events: EventRecord) -> int:
    """Number of events that the client has, by the number of the last. Raises InvalidRequest."""
    given = query.get("starting_after")
    if given is None:
        return 0
    if not (given.isascii() and given.isdecimal() and int(given[:18]) < events.num_events):
        raise InvalidRequest(
            f"starting_after is the number of an event that was sent: at most {events.num_events - 1} now, got "
            f"{shorten(given)}",
            param="starting_after",
        )
    return int(given) + 1


def _written(call: ResponseCall, before: StoredTurn | None) -> str:
    """ChatPrompt of the whole conversation, as JSON."""
    messages = ",".join(filter(None, (call.system, *history(before), call.messages)))
    return f'{{"messages":[{messages}],{call.template}}}'


async def _key_after(key: AnswerKey, written: str) -> AnswerKey:
    """Key of a call that goes on from a kept response, which may have another end at another router."""
    if len(written) <= MAX_INLINE_BYTES:
        return key.also_of(written.encode())
    return await asyncio.to_thread(lambda: key.also_of(written.encode()))


def _limit(query: Mapping[str, str]) -> int:
    given = query.get("limit", str(_DEFAULT_LISTED))
    if not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= MAX_LISTED):
        raise InvalidRequest(f"limit must be in [1, {MAX_LISTED}], got {shorten(given)}", param="limit")
    return int(given)
