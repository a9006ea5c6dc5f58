"""Endpoint of an OpenAI-compatible server: POST /v1/completions or /v1/chat/completions, streamed."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult

from ...workers.common.errors import DiptychError, Unauthenticated, Unavailable, UnknownModel
from .http import HttpClient, Response
from .types import BenchRequest, Messages, Prompt, Reply, RequestFailure

MAX_EVENT_BYTES = 16 << 20
MAX_MESSAGE_CHARS = 300
_OF_THE_MOMENT = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}


@dataclass(frozen=True, slots=True)
class Asking:
    """Options that all requests share. `more`: further fields of the body, as temperature."""

    model: str
    is_chat: bool
    timeout_s: float
    more: Mapping[str, Any]


class OpenAIEndpoint:
    def __init__(self, url: SplitResult, api_key: str | None) -> None:
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = HttpClient(url, headers)
        base = url.path.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._shown = url.geturl()

    async def find_model(self, wanted: str | None, timeout_s: float) -> str:
        """The model's name: `wanted`, or the only served one. Raises Unavailable, Unauthenticated, UnknownModel."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.get(f"{self._base}/models")
        except (OSError, TimeoutError) as e:
            raise Unavailable(f"cannot reach {self._shown}: {_told(e)}. Is the server running at that address?") from e
        if response.status == 401:
            raise Unauthenticated(f"{self._shown} requires an API key: use --api-key, or set DIPTYCH_API_KEY")
        served = _model_names(response)
        if served is None:
            if wanted is None:
                raise UnknownModel(
                    f"{self._shown} does not list its models (status {response.status}): name one with --model"
                )
            return wanted
        if wanted in served:
            return wanted
        names = ", ".join(list(served)[:20]) or "none"
        if wanted is not None:
            raise UnknownModel(f"{self._shown} does not serve {wanted!r}. It serves: {names}")
        own = served.keys() if len(served) == 1 else served.keys() & {*served.values()}
        if len(own) != 1 or len({*served.values()}) != 1:
            raise UnknownModel(f"{self._shown} serves several models: select one with --model: {names}")
        return next(iter(own))

    async def ask(self, call: BenchRequest, asking: Asking) -> Reply:
        """Do one request to its end. An error is in the Reply."""
        path = f"{self._base}/chat/completions" if asking.is_chat else f"{self._base}/completions"
        body = _body(call, asking)
        stream = EventReader(Reply(time.perf_counter(), num_input=call.num_tokens))
        reply = stream.reply
        try:
            async with asyncio.timeout(asking.timeout_s):
                response = await self._http.post(path, body, stream.feed)
        except TimeoutError:
            reply.failure = RequestFailure("timeout", f"no whole answer within {asking.timeout_s:g} s: raise --timeout")
        except OSError as e:
            reply.failure = RequestFailure(type(e).__name__, _told(e))
        else:
            reply.failure = reply.failure or _failure(response)
        return stream.ended()

    async def close(self) -> None:
        self._http.close()


class EventReader:
    """Reader of the server-sent events of one answer: times of its tokens, text and usage."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self._rest = b""
        self._texts: list[str] = []
        self._num_counted: int | None = None  # output tokens as the server counts them
        self._has_end = False  # a finish_reason, or the event that ends a stream

    def feed(self, data: bytes, now: float) -> None:
        """Add bytes. Raises ValueError for a malformed event."""
        *lines, self._rest = (self._rest + data if self._rest else data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip(), now)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES} bytes")

    def ended(self) -> Reply:
        reply = self.reply
        reply.text = "".join(self._texts)
        reply.num_output = len(reply.token_at) if self._num_counted is None else self._num_counted
        if reply.failure is None and not reply.ended_at:
            reply.failure = RequestFailure(
                "empty answer", "the answer held no event with a choice: is it an OpenAI endpoint?"
            )
        elif reply.failure is None and not self._has_end:
            reply.failure = RequestFailure(
                "cut off", "the stream ended without a finish_reason or [DONE]: its server, or a proxy, ended early"
            )
        if reply.failure is not None:
            reply.ended_at = time.perf_counter()
        return reply

    def _read(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._has_end = True
            return
        try:
            event = json.loads(data)
        except RecursionError as e:
            raise ValueError(f"an event is nested too deeply: {data[:80]!r}") from e
        try:
            if error := event.get("error"):
                self.reply.failure = _named("error in the stream", error)
            if choices := event.get("choices"):
                self._read_choice(choices[0], now)
            if usage := event.get("usage"):
                self._read_usage(usage)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as e:
            raise ValueError(f"an event does not have OpenAI's format: {data[:80]!r}") from e

    def _read_usage(self, usage: dict[str, Any]) -> None:
        self.reply.num_input = int(usage.get("prompt_tokens") or self.reply.num_input)
        self.reply.num_cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        self._num_counted = int(usage["completion_tokens"])

    def _read_choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text") or ""
        else:
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        if not isinstance(text, str):
            raise TypeError("the text is none")
        self._has_end = self._has_end or choice.get("finish_reason") is not None
        self.reply.ended_at = now
        # An event without text begins a chat, ends an answer, or is a token that completes no character.
        is_token = text or (choice.get("finish_reason") is None and not (delta is not None and "role" in delta))
        if is_token:
            self.reply.token_at.append(now)
            self._texts.append(text)


def _body(call: BenchRequest, asking: Asking) -> bytes:
    body: dict[str, Any] = {
        "model": asking.model,
        "messages" if asking.is_chat else "prompt": _messages(call.prompt) if asking.is_chat else _plain(call.prompt),
        "max_tokens": call.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body | dict(asking.more), separators=(",", ":")).encode()


def _messages(prompt: Prompt) -> Messages:
    assert not isinstance(prompt, str)
    return [message for message in prompt if not isinstance(message, int)]


def _plain(prompt: Prompt) -> str | list[Any]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _failure(response: Response) -> RequestFailure | None:
    if response.status == 200:
        return None
    try:
        error = json.loads(response.body)
    except ValueError:
        error = response.body.decode(errors="replace")
    found = _named(f"HTTP {response.status}", error.get("error", error) if isinstance(error, dict) else error)
    return replace(found, is_refused=400 <= response.status < 500 and response.status not in _OF_THE_MOMENT)


def _named(kind: str, error: object) -> RequestFailure:
    """Failure from OpenAI's error object, or from any other answer."""
    if not isinstance(error, dict):
        return RequestFailure(kind, str(error)[:MAX_MESSAGE_CHARS])
    code = error.get("code") or error.get("type")
    return RequestFailure(f"{kind} {code}" if code else kind, str(error.get("message", error))[:MAX_MESSAGE_CHARS])


def _model_names(response: Response) -> dict[str, str] | None:
    """Names of the served models, each with the name or folder of the model that it stands for; None where the endpoint
    has no list."""
    if response.status != 200:
        return None
    try:
        models = json.loads(response.body)["data"]
        return {str(model["id"]): str(model.get("root") or model["id"]) for model in models}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _told(error: BaseException) -> str:
    if isinstance(error, DiptychError):
        return error.message
    return str(error) or type(error).__name__
