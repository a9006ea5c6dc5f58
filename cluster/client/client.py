"""Python client: text in, text out, over gRPC, with the same errors as on the server.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)
        for text in client.chat_stream([{"role": "user", "content": "Hello"}]):
            print(text, end="", flush=True)

A TextStream that is closed, or left with `break` inside its `with` block, cancels its call, and the server ends the
request. Imports neither torch nor ray nor the server.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from ...proto import inference_pb2, inference_pb2_grpc
from ...workers.common.channel import ERROR_KEY, TOKEN_KEY
from ...workers.common.errors import (
    ConfigError,
    DeadlineExceeded,
    DiptychError,
    InvalidRequest,
    RequestAborted,
    Unavailable,
)
from ..common.grpc_errors import error_from_rpc
from .client_request import (
    ChatMessages,
    Completion,
    EmbedOptions,
    EmbedResult,
    Options,
    Prompt,
    ResponseCollector,
    build_embed_request,
    build_request,
    collect_embeddings,
)

DEFAULT_TIMEOUT_S = 600.0
TIMEOUT_MARGIN_S = 5.0  # added to the server's deadline, because the server's error has more details
_OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)


class TextStream(Iterator[str]):
    """Text of a completion as it comes. `completion`: the whole of it, after its end."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._responses = ResponseCollector()
        self._is_closed = False

    def __next__(self) -> str:
        try:
            while not self._is_closed:
                if text := self._responses.add(next(self._call)):
                    return text
        except grpc.RpcError as e:
            raise _typed(e) from e
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the call, if it still runs."""
        self._is_closed = True
        self._call.cancel()

    @property
    def completion(self) -> Completion:
        return self._responses.completion


class AsyncTextStream(AsyncIterator[str]):
    """TextStream for `async for` and `async with`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._responses = ResponseCollector()
        self._is_closed = False

    async def __anext__(self) -> str:
        try:
            while not self._is_closed:
                response = await self._call.read()
                if response is grpc.aio.EOF:
                    break
                if text := self._responses.add(response):
                    return text
        except grpc.RpcError as e:
            raise _typed(e) from e
        except asyncio.CancelledError as e:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Another task has closed the stream or the client: grpc raises as if this one were cancelled.
            raise RequestAborted("the stream was closed while it was read") from e
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the call, if it still runs."""
        self._is_closed = True
        self._call.cancel()

    @property
    def completion(self) -> Completion:
        return self._responses.completion


class Client:
    """Client of a Diptych server. Raises the DiptychErrors of workers/common/errors.py. Threads may share it."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: bool | bytes = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`tls`: True trusts the system's certificates; bytes: PEM certificates. `timeout_s`: default of calls. Raises
        ConfigError."""
        _check_address(address)
        credentials = _credentials(tls)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = _metadata(api_key)
        self._timeout_s = _checked_timeout_s(timeout_s)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs. Idempotent."""
        self._is_closed = True
        self._channel.close()

    @property
    def _calls(self) -> inference_pb2_grpc.InferenceStub:
        """Raises InvalidRequest."""
        _check_open(self._is_closed)
        return self._stub

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Complete a text or token ids."""
        return _read_all(self.stream(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> TextStream:
        return self._start(build_request(options, prompt=prompt))

    def chat(self, messages: ChatMessages, **options: Unpack[Options]) -> Completion:
        """Answer a conversation: {"role": …, "content": …} each."""
        return _read_all(self.chat_stream(messages, **options))

    def chat_stream(self, messages: ChatMessages, **options: Unpack[Options]) -> TextStream:
        return self._start(build_request(options, messages=messages))

    def embed(self, inputs: Iterable[Prompt], **options: Unpack[EmbedOptions]) -> EmbedResult:
        """Return the embeddings of texts or token ids."""
        request = build_embed_request(inputs, options)
        try:
            call = self._calls.Embed(request, timeout=_deadline_s(request, self._timeout_s), metadata=self._metadata)
            return collect_embeddings(list(call))
        except grpc.RpcError as e:
            raise _typed(e) from e

    def model(self) -> inference_pb2.ModelInfo:
        """Information on the served model."""
        try:
            return self._calls.GetModel(
                inference_pb2.GetModelRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as e:
            raise _typed(e) from e

    def _start(self, request: inference_pb2.GenerateRequest) -> TextStream:
        timeout_s = _deadline_s(request, self._timeout_s)
        return TextStream(self._calls.Generate(request, timeout=timeout_s, metadata=self._metadata))


class AsyncClient:
    """Client for an event loop."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: bool | bytes = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`tls`: True trusts the system's certificates; bytes: PEM certificates. `timeout_s`: default of calls. Raises
        ConfigError."""
        _check_address(address)
        self._address = address
        self._credentials = _credentials(tls)
        self._metadata = _metadata(api_key)
        self._timeout_s = _checked_timeout_s(timeout_s)
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # that the channel belongs to
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what runs. Idempotent."""
        self._is_closed = True
        if self._channel is not None and self._loop is asyncio.get_running_loop():
            await self._channel.close()

    @property
    def _calls(self) -> Any:
        """Calls over a channel of the running event loop: the client may be made before that runs, and be used by
        several in turn. Raises InvalidRequest."""
        _check_open(self._is_closed)
        if self._loop is not (loop := asyncio.get_running_loop()):
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._address, _OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self._address, self._credentials, _OPTIONS)
            self._stub, self._loop = inference_pb2_grpc.InferenceStub(self._channel), loop
        return self._stub

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Complete a text or token ids."""
        return await _read_all_async(self.stream(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncTextStream:
        return self._start(build_request(options, prompt=prompt))

    async def chat(self, messages: ChatMessages, **options: Unpack[Options]) -> Completion:
        """Answer a conversation: {"role": …, "content": …} each."""
        return await _read_all_async(self.chat_stream(messages, **options))

    def chat_stream(self, messages: ChatMessages, **options: Unpack[Options]) -> AsyncTextStream:
        return self._start(build_request(options, messages=messages))

    async def embed(self, inputs: Iterable[Prompt], **options: Unpack[EmbedOptions]) -> EmbedResult:
        """Return the embeddings of texts or token ids."""
        request = build_embed_request(inputs, options)
        try:
            call = self._calls.Embed(request, timeout=_deadline_s(request, self._timeout_s), metadata=self._metadata)
            return collect_embeddings([response async for response in call])
        except grpc.RpcError as e:
            raise _typed(e) from e

    async def model(self) -> inference_pb2.ModelInfo:
        """Information on the served model."""
        try:
            return await self._calls.GetModel(
                inference_pb2.GetModelRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as e:
            raise _typed(e) from e

    def _start(self, request: inference_pb2.GenerateRequest) -> AsyncTextStream:
        timeout_s = _deadline_s(request, self._timeout_s)
        return AsyncTextStream(self._calls.Generate(request, timeout=timeout_s, metadata=self._metadata))


def _read_all(stream: TextStream) -> Completion:
    with stream:
        for _ in stream:
            pass
        return stream.completion


async def _read_all_async(stream: AsyncTextStream) -> Completion:
    async with stream:
        async for _ in stream:
            pass
        return stream.completion


def _deadline_s(request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, default_s: float) -> float:
    """Raises InvalidRequest."""
    own_s = _checked_timeout_s(request.timeout_s) if request.HasField("timeout_s") else default_s
    return own_s + TIMEOUT_MARGIN_S


def _checked_timeout_s(timeout_s: object) -> float:
    """Raises InvalidRequest for what is no time: grpc takes NaN, and infinity, for one that is over."""
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise InvalidRequest(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}", param="timeout_s")
    return timeout_s


def _check_address(address: str) -> None:
    """Raises ConfigError for the address of the HTTP API, which grpc would take for a name of a machine."""
    if address.startswith(("http:", "https:")):
        raise ConfigError(f"the address must be that of gRPC without a scheme, as 127.0.0.1:50051, got {address!r}")
    if ":" not in address:
        raise ConfigError(f"the address has no port: write HOST:PORT, as 127.0.0.1:50051, got {address!r}")


def _check_open(is_closed: bool) -> None:
    if is_closed:
        raise InvalidRequest("the client is closed: call it inside its `with` block, or make another one")


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Raises ConfigError for what no header can hold: grpc would show the key in its error."""
    key = (api_key or "").strip()  # that of a file ends with a line's end
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key must hold printable ASCII characters alone: check where it comes from")
    if not key:
        return ()
    return ((TOKEN_KEY, f"Bearer {key}"),)


def _credentials(tls: bool | bytes) -> grpc.ChannelCredentials | None:
    if tls is False:
        return None
    return grpc.ssl_channel_credentials(None if tls is True else tls)


def _typed(error: Any) -> DiptychError:
    """DiptychError for an error of a call. `error` has the methods of a call."""
    metadata: Iterable[tuple[str, object]] = error.trailing_metadata() or ()
    found = error_from_rpc(error.code(), error.details(), metadata)
    if ERROR_KEY in dict(metadata):
        return found
    if isinstance(found, Unavailable) and "http1.x" in found.message:
        return Unavailable(f"the address is one of HTTP: give that of gRPC, as 127.0.0.1:50051 ({found.message})")
    if isinstance(found, DeadlineExceeded):
        return DeadlineExceeded(f"no answer came in time ({found.message}): raise timeout_s, or check the server")
    return found
