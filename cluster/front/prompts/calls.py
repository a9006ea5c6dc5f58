"""Reads a large request body in prompt_process.py: prompts become token ids, and the other fields come back as JSON.

The router thus keeps only what it serves, however large the body was.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from pydantic import TypeAdapter

from ....workers.common.errors import InvalidRequest
from ....workers.common.request import MAX_GRAMMAR_BYTES, check_prompt_length
from ...tokens.prompt_encoding import (
    ChatPrompt,
    Encoded,
    Prompt,
    WrittenChat,
    encode_chat,
    encode_prediction,
    encode_text,
)
from ...tokens.tokenizer import Tokenizer
from ..anthropic.body import CountBody, MessagesBody
from ..openai.embeddings import EmbeddingsBody
from ..openai.types import ChatBody, CompletionBody, ParsedRequest, parse
from ..responses.body import ResponseCall, ResponsesBody

MAX_REST_BYTES = (256 << 10) + MAX_GRAMMAR_BYTES  # of a call without its prompts
MAX_PROMPT_TOKENS = 1 << 20  # tokens of one call over all prompts; more if the context is larger
_LAST_PROMPT = ""  # in place of a prediction that is the last of a call's prompts

_CALL = TypeAdapter(ParsedRequest)
_RESPONSE = TypeAdapter(ResponseCall)
_BODIES = {each.__name__: each for each in (ChatBody, CompletionBody, MessagesBody, CountBody, EmbeddingsBody)}


def read_call(
    tokenizer: Tokenizer, kind: str, body: bytes, max_context_tokens: int, max_prompts: int
) -> tuple[bytes, list[Encoded]]:
    """Call without its prompts as JSON, and its prompts, with its prediction as the last; a call of the Responses API
    has no prompts: its conversation is not whole. `kind`: class name of the body. Raises InvalidRequest."""
    if kind == ResponsesBody.__name__:
        return _RESPONSE.dump_json(parse(ResponsesBody, body).call()), []
    call = parse(_BODIES[kind], body).call()
    if (num := len(call.spec.prompts)) > max_prompts:
        raise InvalidRequest(f"{num} prompts; a call has at most {max_prompts}: send several calls", param="prompt")
    found: list[Encoded] = []
    most, num_tokens = max(MAX_PROMPT_TOKENS, max_context_tokens), 0
    for prompt in call.spec.prompts:
        ids = _encode(tokenizer, prompt, max_context_tokens, special=call.spec.special)
        if call.spec.truncation is not None:
            reserved = 0 if call.embedding is not None else call.spec.num_reserved
            ids = call.spec.truncation.cut(ids, max_context_tokens - reserved)
        if kind != CountBody.__name__:  # one that is only counted may be longer
            check_prompt_length(len(ids), max_context_tokens, embeds=call.embedding is not None)
        num_tokens += len(ids)
        if num_tokens > most:
            raise InvalidRequest(
                f"the prompts have more than {most} tokens in total: send several calls", param="prompt"
            )
        found.append(Encoded(ids, prompt if call.echo and isinstance(prompt, str) else None))
    predicted = call.spec.prediction
    if isinstance(predicted, str):
        found.append(Encoded(encode_prediction(tokenizer, predicted)))
        predicted = _LAST_PROMPT
    rest = _CALL.dump_json(replace(call, spec=replace(call.spec, prompts=(), prediction=predicted)))
    if len(rest) > MAX_REST_BYTES:
        param = "stop" if len(call.spec.stop) > 1 else None
        raise InvalidRequest(
            f"the fields other than the prompts have {len(rest)} bytes; at most {MAX_REST_BYTES} are allowed",
            param=param,
        )
    return rest, found


def with_prompts(call: bytes, prompts: Sequence[Encoded]) -> ParsedRequest:
    """Call that `read_call` has read."""
    found = _CALL.validate_json(call)
    prediction = None
    if found.spec.prediction == _LAST_PROMPT:
        *prompts, prediction = prompts
    return replace(found, spec=replace(found.spec, prompts=prompts, prediction=prediction))


def response_call(call: bytes) -> ResponseCall:
    """Call of the Responses API that `read_call` has read."""
    return _RESPONSE.validate_json(call)


def _encode(tokenizer: Tokenizer, prompt: Prompt, max_context_tokens: int, *, special: bool) -> tuple[int, ...]:
    match prompt:
        case str():
            return encode_text(tokenizer, prompt, max_context_tokens, special=special)
        case ChatPrompt():
            return encode_chat(tokenizer, prompt, max_context_tokens)
        case WrittenChat():
            return encode_chat(tokenizer, ChatPrompt(**json.loads(prompt.json)), max_context_tokens)
        case Encoded():
            return prompt.token_ids
        case _:
            return prompt
