"""Reads calls of the HTTP API: headers and body, small ones here and large ones in another process."""

import asyncio
from collections.abc import Collection
from dataclasses import replace

from pydantic_core import from_json
from starlette.requests import Request

from ....workers.common.errors import InvalidRequest
from ...common.quota import Quota
from ...tokens.prompt_encoding import Encoded
from ..anthropic.body import CountBody
from ..front_door import FrontDoor
from ..levels import NO_LEVEL, AskedLevel
from ..openai.embeddings import EmbeddingsBody
from ..openai.fields import UnknownFields, header_value
from ..openai.types import ChatBody, CompletionBody, ParsedRequest, parse
from ..prompts.calls import response_call, with_prompts
from ..responses.body import ResponseCall, ResponsesBody
from ..retries.answer_key import KEY_HEADER, AnswerKey, key_of
from ..whole_answers import bounded
from .body import read_json
from .edge import OWNER
from .errors import renaming
from .level_headers import level_of

MAX_INLINE_BYTES = 65_536  # of a body: smaller ones are read in the router, in about 2 ms


class CallReader:
    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self.unknown_fields = UnknownFields(door.limits.strict)
        limits = door.limits
        self.bodies = Quota(limits.max_held_body_bytes, "too many bytes of bodies are being read: try again later")

    async def read(
        self, kind: type[ChatBody | CompletionBody | CountBody | EmbeddingsBody], request: Request
    ) -> ParsedRequest:
        """Raises DiptychErrors. The answer names unknown fields in a header."""
        limits, level = self._door.limits, level_of(request.headers)
        with self.bodies.share() as held:
            body = await read_json(request, limits.max_body_bytes, limits.body_timeout_s, held)
            key = await _key(request, body)
            if len(body) <= MAX_INLINE_BYTES:
                call = parse(kind, body).call()
            else:
                encoded, waited_s = await self._read_large(kind.__name__, body)
                call = _waited(with_prompts(*encoded), waited_s)
            del body
        call = self._checked(request, call, level, key)
        if call.stream or call.spec.sampling.logprobs is None:
            return call
        with renaming(call.names):
            return replace(call, spec=bounded(call.spec, limits.max_answer_logprobs))

    async def read_fields(self, request: Request) -> tuple[bytes, Collection[str]]:
        """Body of a call, and the names of its fields. Raises as `read`. It is bounded like a gRPC message, for it is
        read in the router."""
        limits = self._door.limits
        with self.bodies.share() as held:
            body = await read_json(request, limits.max_message_bytes, limits.body_timeout_s, held)
        try:
            fields: object = from_json(body)
        except ValueError as e:
            raise InvalidRequest(f"the body is not valid JSON: {e}") from e
        if not isinstance(fields, dict):
            raise InvalidRequest("the body must be a JSON object")
        return body, fields.keys()

    async def read_response(self, request: Request) -> ResponseCall:
        """Read a call of the Responses API. Raises and answers as `read`."""
        limits, level = self._door.limits, level_of(request.headers)
        with self.bodies.share() as held:
            body = await read_json(request, limits.max_body_bytes, limits.body_timeout_s, held)
            key = await _key(request, body)
            if len(body) <= MAX_INLINE_BYTES:
                call = parse(ResponsesBody, body).call()
            else:
                (written, _), waited_s = await self._read_large(ResponsesBody.__name__, body)
                call = response_call(written)
                call = replace(call, parsed=_waited(call.parsed, waited_s))
            del body
        return replace(call, parsed=self._checked(request, call.parsed, level, key))

    async def _read_large(self, kind: str, body: bytes) -> tuple[tuple[bytes, list[Encoded]], float]:
        """Call as the other process has read it, and how long that took, in seconds."""
        self._door.source.admit(1)
        most, max_prompts = self._door.model().max_context_tokens, self._most_prompts(kind)
        loop = asyncio.get_running_loop()
        began = loop.time()
        return await self._door.encoder.read_body(kind, body, most, max_prompts), loop.time() - began

    def _most_prompts(self, kind: str) -> int:
        """The most prompts that a call may have. `kind`: class name of its body."""
        limits = self._door.limits
        return limits.max_inputs if kind == EmbeddingsBody.__name__ else limits.max_sequences

    def _checked(
        self, request: Request, call: ParsedRequest, level: AskedLevel, key: AnswerKey | None
    ) -> ParsedRequest:
        """Call with the level and the key that its headers have."""
        self.unknown_fields.note(call.unknown)
        if call.unknown:
            request.state.ignored = header_value(call.unknown)
        if key is not None:
            call = replace(call, spec=replace(call.spec, key=key))
        if level == NO_LEVEL:
            return call
        return replace(call, spec=replace(call.spec, level=replace(level, tier=call.spec.level.tier)))


def answer_id(request: Request, key: AnswerKey | None) -> str:
    """Id of the answer: of its key, else of the call."""
    return str(request.state.call_id) if key is None else key.name


async def _key(request: Request, body: bytes) -> AnswerKey | None:
    """Key of the call. On a thread where it has much to hash, which does not hold the interpreter's lock."""
    call = request.headers, request.scope["state"].get(OWNER, ""), request.scope["path"], body
    if len(body) <= MAX_INLINE_BYTES or KEY_HEADER not in request.headers:
        return key_of(*call)
    return await asyncio.to_thread(key_of, *call)


def _waited(call: ParsedRequest, waited_s: float) -> ParsedRequest:
    return replace(call, spec=replace(call.spec, waited_s=waited_s))
