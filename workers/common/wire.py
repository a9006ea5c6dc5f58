"""protobuf <-> Request. Values received are checked by Request.validate, counts and sizes here. No torch."""

from typing import Any

from ...proto import inference_pb2, worker_pb2
from .errors import InvalidGrammar, InvalidRequest
from .logit_bias import LogitBias
from .names import check_lengths
from .request import (
    NO_BIAS,
    RECORD_BYTES,
    FinishReason,
    Grammar,
    GrammarKind,
    RecordKey,
    Request,
    RequestLevel,
    SamplingParams,
    ThoughtBudget,
    check_counts,
    check_prediction_length,
    check_prompt_length,
)
from .role import Role

MAX_MESSAGE_BYTES = 64 << 20
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # These pings detect a peer that is lost without a FIN (power, SIGSTOP, a broken cable).
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.so_reuseport", 0),
)
PROTOCOL_VERSION = 6

ROLE_TO_PROTO = {
    Role.PREFILL: worker_pb2.ROLE_PREFILL,
    Role.DECODE: worker_pb2.ROLE_DECODE,
    Role.MIXED: worker_pb2.ROLE_MIXED,
}
ROLE_FROM_PROTO = {v: k for k, v in ROLE_TO_PROTO.items()}
FINISH_TO_PROTO = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
FINISH_FROM_PROTO = {v: k for k, v in FINISH_TO_PROTO.items()}

GRAMMAR_TO_PROTO = {
    GrammarKind.JSON_SCHEMA: inference_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: inference_pb2.GRAMMAR_KIND_REGEX,
    GrammarKind.CHOICE: inference_pb2.GRAMMAR_KIND_CHOICE,
    GrammarKind.GRAMMAR: inference_pb2.GRAMMAR_KIND_GRAMMAR,
    GrammarKind.STRUCTURAL_TAG: inference_pb2.GRAMMAR_KIND_STRUCTURAL_TAG,
}
GRAMMAR_FROM_PROTO = {v: k for k, v in GRAMMAR_TO_PROTO.items()}

_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)


def sampling_to_proto(sampling: SamplingParams) -> inference_pb2.SamplingParams:
    message = inference_pb2.SamplingParams(logit_bias=sampling.logit_bias, stop_token_ids=sampling.stop_token_ids)
    for name in _SCALARS:
        if (value := getattr(sampling, name)) is not None:
            setattr(message, name, value)
    if (grammar := sampling.grammar) is not None:
        message.grammar.kind, message.grammar.text = GRAMMAR_TO_PROTO[grammar.kind], grammar.text
    if (thought := sampling.thought) is not None:
        message.thought.num_tokens, message.thought.is_open = thought.num_tokens, thought.is_open
        message.thought.begin_id, message.thought.end_id = thought.begin_id, thought.end_id
    return message


def sampling_from_proto(message: inference_pb2.SamplingParams, **defaults: Any) -> SamplingParams:
    """Fields absent on the wire take `defaults`, then SamplingParams' own. Raises InvalidRequest for lists that are too
    long to be copied."""
    check_counts(len(message.logit_bias), len(message.stop_token_ids))
    given: dict[str, Any] = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    return SamplingParams(
        **(defaults | given),
        logit_bias=LogitBias(message.logit_bias) if message.logit_bias else NO_BIAS,
        stop_token_ids=tuple(message.stop_token_ids),
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        thought=_thought_from_proto(message.thought) if message.HasField("thought") else None,
    )


def _thought_from_proto(message: inference_pb2.ThoughtBudget) -> ThoughtBudget:
    return ThoughtBudget(message.num_tokens, message.begin_id, message.end_id, message.is_open)


def grammar_from_proto(message: inference_pb2.Grammar) -> Grammar:
    """Raises InvalidGrammar for a kind that this version does not know."""
    kind = GRAMMAR_FROM_PROTO.get(message.kind)
    if kind is None:
        raise InvalidGrammar("the kind of the grammar is unknown: set one of GrammarKind", param="grammar")
    return Grammar(kind, message.text)


def request_from_submit(
    message: worker_pb2.Submit, max_context_tokens: int, received_at: float | None = None
) -> Request:
    """Read a request that was received at a time. Raises InvalidRequest or PromptTooLong for lists that are too long to
    be copied, and for names too long to be kept."""
    check_lengths(InvalidRequest, request_id=message.request_id, handoff_id=message.offer.handoff_id)
    for source in (message.source, message.prefix):
        check_lengths(
            InvalidRequest, handoff_id=source.handoff_id, address=source.address, incarnation=source.incarnation
        )
    num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
    check_prompt_length(num_tokens, max_context_tokens, embeds=message.embeds)
    check_prediction_length(len(message.prediction))
    return Request(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        timeout_s=message.timeout_s,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        num_alone=message.num_alone,
        first_prompt_logprob=max(message.first_prompt_logprob, 1),
        is_prefix=message.offer.is_prefix,
        embeds=message.embeds,
        level=RequestLevel(*times_of_level(message.level)),
        speculates=not message.no_speculation,
        prediction=tuple(message.prediction),
        sparse_attention=asked_sparse(message),
        record=_record_of(message.record) if message.HasField("record") else None,
        received_at=received_at,
    )


def _record_of(message: worker_pb2.RecordKey) -> RecordKey:
    if not len(message.name) == len(message.call) == RECORD_BYTES:
        raise InvalidRequest(f"each part of a record's key has {RECORD_BYTES} bytes")
    return RecordKey(message.name, message.call)


def asked_sparse(message: inference_pb2.GenerateRequest | worker_pb2.Submit) -> bool | None:
    """Read whether sparse attention is asked for. None: it is not said."""
    return message.sparse_attention if message.HasField("sparse_attention") else None


def times_of_level(message: inference_pb2.ServiceLevel) -> tuple[float | None, float | None]:
    """TTFT and TPOT of a level, in seconds. None: not set."""
    ttft_s = message.ttft_s if message.HasField("ttft_s") else None
    return ttft_s, message.tpot_s if message.HasField("tpot_s") else None


def submit_from_request(handle: int, request: Request, output_token_ids: list[int]) -> worker_pb2.Submit:
    return worker_pb2.Submit(
        handle=handle,
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=output_token_ids,
        sampling=sampling_to_proto(request.sampling),
        timeout_s=request.timeout_s,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        first_prompt_logprob=request.first_prompt_logprob,
        embeds=request.embeds,
        level=inference_pb2.ServiceLevel(ttft_s=request.level.ttft_s, tpot_s=request.level.tpot_s),
        no_speculation=not request.speculates,
        prediction=request.prediction,
        sparse_attention=request.sparse_attention,
        traceparent=request.trace.traceparent if request.trace else "",
        tracestate=request.trace.tracestate if request.trace else "",
        record=worker_pb2.RecordKey(name=request.record.name, call=request.record.call) if request.record else None,
    )
