"""OpenAI's Responses API over a FrontDoor.

    POST /v1/responses      GET, DELETE /v1/responses/{id}
    POST /v1/responses/{id}/cancel      GET /v1/responses/{id}/input_items

cluster/front/responses/ reads the bodies, writes the answers and keeps them.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....workers.common.errors import InvalidRequest
from ...common.quota import Quota
from ...telemetry.call_trace import TRACE
from ...tokens.prompt_encoding import WrittenChat
from ..front_door import FrontDoor
from ..openai.fields import shorten
from ..responses.answer import AnswerStyle, ResponseAnswer
from ..responses.body import ResponseCall
from ..responses.run import ResponseRun
from ..responses.store import ResponseStore, Stored, StoredTurn, StoreLimits, history
from ..retries.answer_key import AnswerKey
from ..retries.event_ids import EventIds
from ..whole_answers import bounded
from .calls import MAX_INLINE_BYTES, CallReader, answer_id
from .edge import CALL, OWNER
from .stream import EventStream, while_connected

MAX_LISTED = 100  # items in one answer
_DEFAULT_LISTED = 20
# Fields as the front door names them, and as the Responses API does.
_FIELDS = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}


class ResponsesApi:
    def __init__(self, door: FrontDoor, calls: CallReader, gathered: Quota, limits: StoreLimits | None = None) -> None:
        """`gathered`: of log-probabilities that are held until their answer ends. `limits`: of what is kept."""
        self._door = door
        self._calls = calls
        self._gathered = gathered
        self._store = ResponseStore(limits)

    async def create(self, request: Request) -> Response | EventStream:
        try:
            run, timeout_s, answer, ids = await self._started(request)
        except InvalidRequest as e:
            e.param = _FIELDS.get(e.param or "", e.param)
            raise
        if answer.is_streamed:
            return EventStream(run.events(), answer.error_event, timeout_s, ids)
        whole = await while_connected(request.scope, run.whole())
        return Response(whole, media_type="application/json")

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() != "false":
            raise InvalidRequest("stream is not supported here: a stream is sent once, by POST", param="stream")
        entry = self._found(request)
        return Response(entry.response(), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        entry = self._found(request)
        if entry.cancel is not None:
            entry.cancel()
        self._store.drop(entry)
        return JSONResponse({"id": entry.response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End a response that is being streamed. Does nothing where it was ended early. Raises InvalidRequest for one
        that has come to its end."""
        entry = self._found(request)
        if entry.is_whole:
            raise InvalidRequest(
                "Cannot cancel a synchronous response. This one has ended: only one that is being streamed can be "
                "cancelled"
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

    async def _started(self, request: Request) -> tuple[ResponseRun, float, ResponseAnswer, EventIds | None]:
        call, state = await self._calls.read_response(request), request.scope["state"]
        tenant = _tenant(request)
        before = None if call.previous is None else self._store.previous(tenant, call.previous)
        turn = self._store.turn_after(before, call.messages)
        written = _written(call, before)
        spec = replace(call.parsed.spec, prompts=(WrittenChat(written),))
        if spec.key is not None and before is not None:
            spec = replace(spec, key=await _key_after(spec.key, written))
        spec = bounded(spec, self._door.limits.max_answer_logprobs, "in a response: ask for fewer")
        response_id = f"resp_{answer_id(request, spec.key)}"
        generation = await self._door.start(spec, response_id, state.get(CALL), state.get(TRACE))
        dialect = self._door.dialect
        style = AnswerStyle(
            model=spec.model or self._door.model().name,
            echo=call.echo,
            is_streamed=call.parsed.stream,
            tools=spec.tools,
            short_ids=dialect.tools is not None and dialect.tools.short_ids,
        )
        answer = ResponseAnswer(generation, self._door.tokenizer, style)
        run = ResponseRun(generation, answer, self._store, self._gathered)
        if call.store:
            run.keep(Stored(response_id, tenant, call.items, turn, answer.json, run.cancel))
        ids = None if spec.key is None else EventIds(spec.key.num_seen)
        return run, generation.timeout_s, answer, ids

    def _found(self, request: Request) -> Stored:
        """Raises UnknownResponse."""
        return self._store.find(_tenant(request), request.path_params["response_id"])


def _tenant(request: Request) -> str:
    """Name of the call's key; empty where no key is needed."""
    return str(request.scope["state"].get(OWNER, ""))


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
