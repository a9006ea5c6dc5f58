"""gRPC service diptych.v1.Inference over a FrontDoor, with grpc.health.v1 and reflection. embed.py has the messages of
its Embed.

Cancelling a call closes its token streams, which aborts its requests on the workers; so does a call's own deadline.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from .... import __version__
from ....proto import inference_pb2, inference_pb2_grpc
from ....workers.common.channel import RequireKey, authorization, bind
from ....workers.common.errors import ConfigError, DiptychError, InvalidRequest, Unauthenticated
from ....workers.common.prompt_logprobs import PromptLogprobs
from ....workers.common.wire import FINISH_TO_PROTO, asked_sparse
from ...common.config import TlsConfig
from ...common.grpc_errors import MAX_MESSAGE_CHARS, REQUEST_ID_KEY, status_of, trailing_metadata
from ...telemetry.call_trace import CHAT, CallTrace, Tracer
from ...tokens.tokenizer import Tokenizer
from ..access.accounts import Account, Call
from ..access.key_ring import KeyRing
from ..delivery import Delivery
from ..front_door import FrontDoor, GenerationSpec
from ..generation import Generation
from ..limits import ConnectionLimits
from ..text_completion import TextDelta
from .embed import embed_responses, embedding_spec
from .keys import MessageIds, key_of_message
from .level_fields import level_of
from .prompt_fields import prediction_of, prompt_of, sampling_of, truncation_of
from .traces import begin_rpc, end_rpc, trace_metadata

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH_PERIOD_S = 1.0
MIN_TIMEOUT_S = 0.001
MAX_AGE_S = 3600.0  # of a connection; then its client is asked to open another one
MAX_STREAMS = 1024  # open calls per connection
MAX_POSITIONS = 256  # of prompts in a message: about 8 ms to write with the most alternatives

if TYPE_CHECKING:  # the class is generic in its stubs only
    Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServer:
    """gRPC server of a router. `start` and `stop` on one event loop. All calls but those of health need a key."""

    def __init__(
        self,
        door: FrontDoor,
        keys: KeyRing | None = None,
        *,
        tls: TlsConfig | None = None,
        reuse_port: bool = False,
        limits: ConnectionLimits | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._door = door
        self._keys = keys or KeyRing()
        self._credentials = _credentials(tls) if tls else None
        refusal = "the API key is missing or wrong: send it as metadata 'authorization: Bearer KEY'"
        limits = limits or ConnectionLimits()
        options = [
            ("grpc.so_reuseport", int(reuse_port)),
            ("grpc.max_receive_message_length", door.limits.max_message_bytes),
            # A call that its client does not read ends with its connection at the latest.
            ("grpc.max_connection_age_ms", round(MAX_AGE_S * 1e3)),
            ("grpc.max_connection_age_grace_ms", round((door.limits.max_timeout_s + limits.send_timeout_s) * 1e3)),
            *_bounds(limits),
        ]
        self._service = InferenceService(door, self._keys, limits.send_timeout_s, tracer)
        self._server = grpc.aio.server(options=options, interceptors=[RequireKey(self._keys.accepts, refusal)])
        self._health = health.aio.HealthServicer()

    async def start(self, host: str, port: int) -> int:
        """Listen on host:port (0: the kernel chooses) and return the port. Raises PortInUse, ConfigError."""
        inference_pb2_grpc.add_InferenceServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        bound = bind(self._server, host, port, self._credentials)
        await self._report_health()
        await self._server.start()
        self._reporting = asyncio.create_task(self._repeat_health())
        return bound

    async def stop(self, grace_s: float = 10.0) -> None:
        """Take no new call, give open ones `grace_s` to end."""
        self._reporting.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _repeat_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            await self._report_health()

    async def _report_health(self) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if self._door.readiness.health().ready else response.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, door: FrontDoor, keys: KeyRing, send_timeout_s: float, tracer: Tracer | None = None) -> None:
        self._door = door
        self._keys = keys
        self._send_timeout_s = send_timeout_s
        self._tracer = tracer

    async def Generate(  # type: ignore[override]  # the stubs know no handler that writes by its context
        self, request: inference_pb2.GenerateRequest, context: "Context"
    ) -> None:
        await self._on_account("gen", context, partial(self._generate, request, context))

    async def Embed(  # type: ignore[override]  # as above
        self, request: inference_pb2.EmbedRequest, context: "Context"
    ) -> None:
        await self._on_account("embd", context, partial(self._embed, request, context))

    async def _on_account(
        self, kind: str, context: "Context", work: Callable[[str, Call | None, CallTrace | None], Awaitable[None]]
    ) -> None:
        """Do `work`, with an id that begins with `kind`, on the account of the call's key; None: no key is needed."""
        request_id = f"{kind}-{uuid.uuid4().hex}"
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
        trace = begin_rpc(self._tracer, kind, context.invocation_metadata() or (), request_id)
        status = grpc.StatusCode.CANCELLED  # unless it ends otherwise
        try:
            if self._keys.is_open:
                await work(request_id, None, trace)
            else:
                with self._account(context).begin() as call:
                    await work(request_id, call, trace)
            status = grpc.StatusCode.OK
        except DiptychError as e:
            status = status_of(e)
            # With a client that does not read, this ends when it reads, or when its connection is closed.
            await _abort(context, e, request_id)
        finally:
            end_rpc(self._tracer, trace, status)

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: "Context",
        request_id: str,
        call: Call | None,
        trace: CallTrace | None,
    ) -> None:
        spec = self._spec(request, context, call.account.name if call else "")
        ids = MessageIds(spec.key)
        if trace is not None and request.HasField("chat"):
            trace.operation = CHAT
        await _begin(context, call, trace)
        generation = await self._door.start(spec, request_id, call, trace)
        async with Delivery(generation.timeout_s, self._send_timeout_s) as delivery:
            num_running = len(generation.completions)
            async with aclosing(generation.batches()) as batches:
                async for batch in batches:
                    for delta in batch:
                        num_running -= delta.finish_reason is not None
                        if delta.prompt_logprobs:
                            prompt = generation.completions[delta.index].request.prompt_token_ids
                            for part in _prompt_logprobs(request_id, prompt, delta, self._door.tokenizer):
                                if ids.add_to(part):
                                    await delivery.of(context.write(part))
                        response = _response(request_id, delta, self._door.tokenizer)
                        if num_running == 0:
                            _conclude(response, generation)
                        if ids.add_to(response):
                            await delivery.of(context.write(response))

    async def _embed(
        self,
        request: inference_pb2.EmbedRequest,
        context: "Context",
        request_id: str,
        call: Call | None,
        trace: CallTrace | None,
    ) -> None:
        try:
            spec = embedding_spec(request, _timeout_s(request, context, self._door), self._door)
            await _begin(context, call, trace)
            dimensions = request.dimensions if request.HasField("dimensions") else None
            run = await self._door.embed(spec, dimensions, request_id, call, trace)
        except InvalidRequest as e:
            e.param = "inputs" if e.param == "prompt" else e.param
            raise
        with self._door.embeddings.share() as held:
            held.take(run.num_floats)
            async with Delivery(run.timeout_s, self._send_timeout_s) as delivery:
                for response in embed_responses(request_id, await run.vectors(), run):
                    await delivery.of(context.write(response))

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: "Context") -> inference_pb2.ModelInfo:
        try:
            return self._door.model().to_proto(__version__)
        except DiptychError as e:
            await _abort(context, e, f"get-{uuid.uuid4().hex}")

    def _spec(self, request: inference_pb2.GenerateRequest, context: "Context", owner: str) -> GenerationSpec:
        sampling = request.sampling
        if len(request.stop) > self._door.limits.max_stop_strings:
            raise InvalidRequest(f"at most {self._door.limits.max_stop_strings} stop strings", param="stop")
        prompt, continues = prompt_of(request, self._door.model().max_context_tokens)
        return GenerationSpec(
            prompts=(prompt,),
            continues=continues,
            truncation=truncation_of(request, "left"),
            sampling=sampling_of(request),
            n=request.n or 1,
            stop=tuple(request.stop),
            shows_stop=request.include_stop,
            shows_special=request.show_special_tokens,
            seed=sampling.seed if sampling.HasField("seed") else None,
            max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
            timeout_s=_timeout_s(request, context, self._door),
            model=request.model or None,
            cache_salt=request.cache_salt,
            level=level_of(request),
            speculates=not request.no_speculation,
            prediction=prediction_of(request),
            sparse_attention=asked_sparse(request),
            key=key_of_message(request, owner),
        )

    def _account(self, context: "Context") -> Account:
        account = self._keys.find(authorization(context.invocation_metadata()))
        if account is None:
            raise Unauthenticated("the API key is not valid any more: send another one")
        return account


def _timeout_s(
    request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, context: "Context", door: FrontDoor
) -> float | None:
    """Time-out that a call asks for, by its field or its own deadline."""
    if request.HasField("timeout_s"):
        return request.timeout_s
    # It is None where the call has no deadline, against the type stubs.
    remaining_s = cast("float | None", context.time_remaining())
    return None if remaining_s is None else min(max(remaining_s, MIN_TIMEOUT_S), door.limits.max_timeout_s)


async def _begin(context: "Context", call: Call | None, trace: CallTrace | None) -> None:
    """Send the initial metadata. Not with the first message: no error could follow if sending both were given up."""
    limits = tuple(call.account.headers()) if call else ()
    await context.send_initial_metadata((*limits, *trace_metadata(trace)))


def _response(request_id: str, delta: TextDelta, tokenizer: Tokenizer) -> inference_pb2.GenerateResponse:
    def text(token_id: int) -> str:
        return tokenizer.token_bytes(token_id).decode(errors="replace")

    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=FINISH_TO_PROTO[delta.finish_reason],
        stop_string=delta.stop_string,
    )
    for entry in delta.logprobs:
        top = [inference_pb2.TopLogprob(token_id=i, logprob=p, token=text(i)) for i, p in entry.top]
        response.logprobs.add(token_id=entry.token_id, logprob=entry.logprob, token=text(entry.token_id), top=top)
    return response


def _prompt_logprobs(
    request_id: str, prompt: Sequence[int], delta: TextDelta, tokenizer: Tokenizer
) -> Iterator[inference_pb2.GenerateResponse]:
    """Prompt log-probabilities in messages below 4 MiB: by default clients refuse larger ones."""

    def text(token_id: int) -> str:
        return tokenizer.token_bytes(token_id).decode(errors="replace")

    # Cut where no step of a prefill matters: message N is the same at any router.
    for part in PromptLogprobs.joined(delta.prompt_logprobs).pieces(MAX_POSITIONS):
        response = inference_pb2.GenerateResponse(request_id=request_id, index=delta.index)
        columns = (part.logprobs, part.ranks, part.top_ids, part.top_logprobs)
        rows = zip(prompt[part.first : part.end], *(column.tolist() for column in columns), strict=True)
        for own, logprob, rank, ids, logprobs in rows:
            found = zip(ids, logprobs, strict=True)
            top = [inference_pb2.TopLogprob(token_id=i, logprob=p, token=text(i)) for i, p in found]
            response.prompt_logprobs.add(token_id=own, logprob=logprob, token=text(own), rank=rank, top=top)
        yield response


def _conclude(last: inference_pb2.GenerateResponse, generation: Generation) -> None:
    """Fields that only the last message of a call has."""
    usage = generation.usage
    last.usage.prompt_tokens = usage.prompt_tokens
    last.usage.completion_tokens = usage.completion_tokens
    last.usage.cached_tokens = usage.cached_tokens
    last.usage.stored_tokens = usage.stored_tokens
    last.usage.accepted_prediction_tokens = usage.accepted_prediction_tokens
    last.usage.rejected_prediction_tokens = usage.rejected_prediction_tokens
    last.service_tier = generation.service_tier
    last.timings.extend(timings.to_proto(index) for index, timings in generation.timings)


async def _abort(context: "Context", error: DiptychError, request_id: str) -> NoReturn:
    metadata = trailing_metadata(error, request_id)
    await context.abort(status_of(error), error.message[:MAX_MESSAGE_CHARS], trailing_metadata=metadata)


def _credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    try:
        return grpc.ssl_server_credentials([(Path(tls.key).read_bytes(), Path(tls.cert).read_bytes())])
    except OSError as e:
        raise ConfigError(f"cannot read {e.filename}: {e.strerror}. Check grpc_tls") from e


def _bounds(limits: ConnectionLimits) -> Sequence[tuple[str, Any]]:
    return (
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
        # First for the TLS handshake and the client's settings; second for a connection without a call.
        ("grpc.server_handshake_timeout_ms", round(limits.header_timeout_s * 1e3)),
        ("grpc.http2.settings_timeout", round(limits.header_timeout_s * 1e3)),
        ("grpc.max_connection_idle_ms", round(limits.idle_timeout_s * 1e3)),
        # These pings find a client that left without a FIN (power loss, a cut cable).
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # shortest interval at which clients may ping
        ("grpc.http2.max_ping_strikes", 2),
    )
