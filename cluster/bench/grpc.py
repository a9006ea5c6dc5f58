"""Endpoint of a Diptych server over gRPC: Inference.Generate."""

import time
from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio

from ...proto import inference_pb2, inference_pb2_grpc
from ...workers.common.channel import TOKEN_KEY
from ...workers.common.errors import DiptychError, InvalidRequest, Unauthenticated, UnknownModel
from ..client.client_request import build_request
from ..common.grpc_errors import error_from_rpc
from .openai import Asking
from .types import BenchRequest, Reply, RequestFailure

_OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)


class GrpcEndpoint:
    def __init__(self, address: str, api_key: str | None, *, tls: bool) -> None:
        if tls:
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), _OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(address, _OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = ((TOKEN_KEY, f"Bearer {api_key}"),) if api_key else ()
        self._address = address

    async def find_model(self, wanted: str | None, timeout_s: float) -> str:
        """Raises a DiptychError: Unavailable, Unauthenticated, UnknownModel."""
        request = inference_pb2.GetModelRequest()
        try:
            served = (await self._stub.GetModel(request, timeout=timeout_s, metadata=self._metadata)).name
        except grpc.aio.AioRpcError as e:
            raise _typed(e) from e
        if wanted not in (None, served):
            raise UnknownModel(f"{self._address} does not serve {wanted!r}. It serves: {served}")
        return served

    async def ask(self, call: BenchRequest, asking: Asking) -> Reply:
        """Do one request to its end. An error is in the Reply."""
        reply = Reply(time.perf_counter(), num_input=call.num_tokens)
        try:
            await self._read(self._start(call, asking), reply)
        except DiptychError as e:
            reply.failure = RequestFailure(e.code, e.message, isinstance(e, InvalidRequest | Unauthenticated))
            reply.ended_at = time.perf_counter()
        return reply

    def _start(self, call: BenchRequest, asking: Asking) -> Any:
        """Start a call. Raises InvalidRequest for fields that the service does not have."""
        options: Any = {"max_tokens": call.max_tokens, "model": asking.model, **asking.more}
        prompt: Any = call.prompt
        named = {"messages": prompt} if asking.is_chat else {"prompt": prompt}
        return self._stub.Generate(build_request(options, **named), timeout=asking.timeout_s, metadata=self._metadata)

    @staticmethod
    async def _read(answer: Any, reply: Reply) -> None:
        texts: list[str] = []
        try:
            while (response := await answer.read()) is not grpc.aio.EOF:
                reply.ended_at = now = time.perf_counter()
                if response.token_ids:
                    reply.token_at.append(now)
                    reply.token_ids.extend(response.token_ids)
                    texts.append(response.text)
                if response.HasField("usage"):
                    reply.num_input = response.usage.prompt_tokens
                    reply.num_cached = response.usage.cached_tokens
        except grpc.aio.AioRpcError as e:
            raise _typed(e) from e
        finally:
            answer.cancel()
            reply.text, reply.num_output = "".join(texts), len(reply.token_ids)

    async def close(self) -> None:
        await self._channel.close()


def _typed(error: Any) -> DiptychError:
    metadata: Iterable[tuple[str, object]] = error.trailing_metadata() or ()
    return error_from_rpc(error.code(), error.details(), metadata)
