"""Prompts of gRPC calls: what they are made of, how they end, and which part of a long one is kept."""

from collections.abc import Mapping
from dataclasses import replace

from ....proto import inference_pb2
from ....workers.common.errors import InvalidRequest
from ....workers.common.request import SamplingParams, check_prediction_length, check_prompt_length
from ....workers.common.wire import sampling_from_proto
from ...tokens.prompt_encoding import ChatPrompt, Prompt, Truncation, check_num_messages
from ..openai.messages import continued_text, end_of_prompt
from ..openai.structured import allowed_tokens, text_without, the_only
from ..openai.types import Side, truncation

_SIDES: Mapping[int, Side | None] = {
    inference_pb2.TRUNCATION_SIDE_UNSPECIFIED: None,
    inference_pb2.TRUNCATION_SIDE_LEFT: "left",
    inference_pb2.TRUNCATION_SIDE_RIGHT: "right",
}


def prompt_of(request: inference_pb2.GenerateRequest, max_context_tokens: int) -> tuple[Prompt, str | None]:
    """Prompt of a message, and the text that the answer goes on with; None: it goes on with none. Checks counts before
    it copies anything. Raises InvalidRequest."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text, None
    if kind == "tokens":
        if not request.HasField("truncate_prompt_tokens"):
            check_prompt_length(len(request.tokens.ids), max_context_tokens)
        return tuple(request.tokens.ids), None
    if kind == "chat":
        chat = request.chat
        check_num_messages(len(chat.messages))
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        adds_header = False if chat.no_generation_prompt else None
        end = end_of_prompt(messages, adds_header=adds_header, continues=chat.continue_final_message)
        return ChatPrompt(messages, end=end), continued_text(messages, end)
    raise InvalidRequest("the prompt is missing: set text, tokens or chat", param="prompt")


def prediction_of(request: inference_pb2.GenerateRequest) -> str | tuple[int, ...] | None:
    """Text or token ids that the answer is expected to be like. Checks counts as `prompt_of`."""
    check_prediction_length(len(request.prediction_tokens.ids))
    return request.prediction_text or tuple(request.prediction_tokens.ids) or None


def sampling_of(request: inference_pb2.GenerateRequest) -> SamplingParams:
    """Parameters by which each token of the answer is chosen. Raises InvalidRequest."""
    sampling = sampling_from_proto(request.sampling)
    if not request.allowed_token_ids and not request.bad_words:
        return sampling
    asked = [] if sampling.grammar is None else [sampling.grammar]
    if request.allowed_token_ids:
        asked.append(allowed_tokens(request.allowed_token_ids))
    if request.bad_words:
        asked.append(text_without(request.bad_words))
    return replace(sampling, grammar=the_only(asked))


def truncation_of(
    request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, usual: Side
) -> Truncation | None:
    """Cut of prompts that are too long; None: they are refused. `usual`: side where none is named. Raises
    InvalidRequest."""
    if request.truncation_side not in _SIDES:
        raise InvalidRequest("truncation_side must be LEFT, RIGHT or absent", param="truncation_side")
    if not request.HasField("truncate_prompt_tokens"):
        return None
    return truncation(request.truncate_prompt_tokens, _SIDES[request.truncation_side] or usual)
