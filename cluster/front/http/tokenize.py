"""vLLM's HTTP calls for tokens, over a FrontDoor: nothing is generated.

POST /tokenize, /detokenize
"""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ...common.quota import Quota
from ..front_door import FrontDoor
from ..generation import MIN_LARGE_SIZE
from ..json_parts import to_json
from ..openai.fields import UnknownField, UnknownFields, header_value
from ..openai.tokenize import DetokenizeBody, TokenizeBody
from ..openai.types import parse
from .body import read_json

SLICE = 2048  # tokens that are named at once

Body = TypeVar("Body", bound=BaseModel)


class TokenizeApi:
    def __init__(self, door: FrontDoor, bodies: Quota, unknown_fields: UnknownFields) -> None:
        """`bodies`: bytes of those that are being read."""
        self._door = door
        self._bodies = bodies
        self._unknown_fields = unknown_fields

    async def tokenize(self, request: Request) -> Response:
        call = (await self._read(TokenizeBody, request)).call()
        self._note(request, call.unknown)
        info = self._door.model(call.model)
        ids = await self._door.encode(call.prompt, special=call.special)
        answer = {
            "count": len(ids),
            "max_model_len": info.max_context_tokens,
            "tokens": list(ids),
            "token_strs": await self._names(ids) if call.strings else None,
        }
        return Response(await to_json(answer), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(DetokenizeBody, request)
        info = self._door.model(body.model)
        self._note(request, body.check(info.vocab_size))
        decode = self._door.tokenizer.decode
        if len(body.tokens) < MIN_LARGE_SIZE:
            text = decode(body.tokens, special=True)
        else:
            text = await asyncio.to_thread(decode, body.tokens, special=True)
        return Response(await to_json({"prompt": text}), media_type="application/json")

    async def _names(self, ids: Sequence[int]) -> list[str]:
        name, found = self._door.tokenizer.token_name, list[str]()
        for start in range(0, len(ids), SLICE):
            found += map(name, ids[start : start + SLICE])
            await asyncio.sleep(0)  # let others run
        return found

    async def _read(self, kind: type[Body], request: Request) -> Body:
        """Body of a call, read on the event loop: it is bounded like a gRPC message."""
        limits = self._door.limits
        with self._bodies.share() as held:
            return parse(kind, await read_json(request, limits.max_message_bytes, limits.body_timeout_s, held))

    def _note(self, request: Request, unknown: Sequence[UnknownField]) -> None:
        self._unknown_fields.note(unknown)
        if unknown:
            request.state.ignored = header_value(unknown)
