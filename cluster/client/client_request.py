"""Builds the messages of a request, and collects those of its answer, for both clients."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from ...proto import inference_pb2
from ...workers.common.errors import InvalidRequest
from ...workers.common.wire import FINISH_FROM_PROTO

Prompt = str | Sequence[int]  # a text, or token ids
ChatMessages = Iterable[Mapping[str, str]]  # "role" and "content"

_OF_THE_CALL = ("timeout_s", "model", "cache_salt", "service_tier", "truncate_prompt_tokens")
_GRAMMARS = {
    "json_schema": inference_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    "regex": inference_pb2.GRAMMAR_KIND_REGEX,
    "choice": inference_pb2.GRAMMAR_KIND_CHOICE,
    "grammar": inference_pb2.GRAMMAR_KIND_GRAMMAR,
}
_NAMED: Mapping[str, Mapping[str, int]] = {  # values of options that have names
    "admission": {"wait": inference_pb2.ADMISSION_WAIT, "refuse": inference_pb2.ADMISSION_REFUSE},
    "truncation_side": {"left": inference_pb2.TRUNCATION_SIDE_LEFT, "right": inference_pb2.TRUNCATION_SIDE_RIGHT},
}


class CallOptions(TypedDict, total=False):
    """Options of every call. The server has defaults for all of them."""

    timeout_s: float
    model: str
    cache_salt: str
    service_tier: str
    ttft_s: float  # service level that the request asks for
    tpot_s: float
    admission: Literal["wait", "refuse"]  # where it is predicted to miss its level
    truncate_prompt_tokens: int  # most that a longer prompt keeps; -1: as many as there is room for
    truncation_side: Literal["left", "right"]  # at which tokens are cut off


class Options(CallOptions, total=False):
    """Options of a completion. The server has defaults for all of them."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    stop: str | Sequence[str]
    json_schema: str | Mapping[str, Any]  # that the answer follows; of this and the next three at most one
    regex: str
    choice: Sequence[str]
    grammar: str  # Lark, or GBNF
    speculation: bool  # False: no drafts are verified for it
    sparse_attention: bool  # whether long contexts may be decoded in part
    prediction: str | Sequence[int]  # text or token ids that the answer is expected to be like
    allowed_token_ids: Sequence[int]  # the answer has no others
    bad_words: Sequence[str]  # none of them occurs in the answer
    include_stop: bool  # the stop string or stop token that ends the answer is a part of its text
    show_special_tokens: bool  # special tokens are a part of the text
    add_generation_prompt: bool  # of a chat; False: the prompt ends with its last message
    continue_final_message: bool  # of a chat: the answer goes on with its last message
    idempotency_key: str  # asked again with it, the call gives the same answer, at any router


class EmbedOptions(CallOptions, total=False):
    """Options of embeddings. The server has defaults for all of them."""

    dimensions: int


# The message has fields that have no name in Options: what a grammar is made of, and prompt_logprobs.
_OPTIONS = Options.__optional_keys__ | set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    stop_string: str | None  # stop string that ended it
    usage: inference_pb2.Usage
    logprobs: tuple[inference_pb2.TokenLogprob, ...]  # one a token, where asked for
    request_id: str
    timings: inference_pb2.Timings | None  # times of its phases
    service_tier: str = ""  # that served it


@dataclass(frozen=True, slots=True)
class EmbedResult:
    vectors: list[list[float]]  # in the order of the inputs
    usage: inference_pb2.Usage
    request_id: str
    service_tier: str  # that served it


class ResponseCollector:
    """Messages of one call so far."""

    def __init__(self) -> None:
        self._responses: list[inference_pb2.GenerateResponse] = []

    def add(self, response: inference_pb2.GenerateResponse) -> str:
        self._responses.append(response)
        return response.text

    @property
    def completion(self) -> Completion:
        last = self._responses[-1] if self._responses else None
        finish = FINISH_FROM_PROTO.get(last.finish_reason) if last else None
        if last is None or finish is None:
            raise InvalidRequest("the stream has no completion yet: read it to its end first")
        return Completion(
            text="".join(r.text for r in self._responses),
            token_ids=tuple(i for r in self._responses for i in r.token_ids),
            finish_reason=finish.value,
            stop_string=last.stop_string if last.HasField("stop_string") else None,
            usage=last.usage,
            logprobs=tuple(entry for r in self._responses for entry in r.logprobs),
            request_id=last.request_id,
            timings=last.timings[0] if last.timings else None,
            service_tier=last.service_tier,
        )


def build_request(
    options: Options, *, prompt: Prompt | None = None, messages: ChatMessages | None = None
) -> inference_pb2.GenerateRequest:
    """Build a request; an option that is None is not given. Raises InvalidRequest for what protobuf cannot hold."""
    sampling = _given(options, _OPTIONS)
    stop, prediction = sampling.pop("stop", ()), sampling.pop("prediction", ())
    key = sampling.pop("idempotency_key", "")
    flags = {name: sampling.pop(name) for name in ("include_stop", "show_special_tokens") if name in sampling}
    adds_header = sampling.pop("add_generation_prompt", True)
    continues = sampling.pop("continue_final_message", False)
    bounds = {name: sampling.pop(name) for name in ("allowed_token_ids", "bad_words") if name in sampling}
    speculation, sparse = sampling.pop("speculation", True), sampling.pop("sparse_attention", None)
    grammars = {name: sampling.pop(name) for name in _GRAMMARS if name in sampling}
    if len(grammars) > 1:
        raise InvalidRequest(f"{' and '.join(grammars)} both say what the answer looks like: leave one out")
    try:
        call = _of_the_call(sampling)
        for name, given in grammars.items():
            text = given if isinstance(given, str) else json.dumps(given)
            sampling["grammar"] = inference_pb2.Grammar(kind=_GRAMMARS[name], text=text)
        request = inference_pb2.GenerateRequest(
            sampling=_sampling(sampling),
            stop=[stop] if isinstance(stop, str) else stop,
            **bounds,
            **flags,
            **call,
        )
        request.no_speculation, request.idempotency_key = not speculation, key
        if sparse is not None:
            request.sparse_attention = sparse
        if isinstance(prediction, str):
            request.prediction_text = prediction
        else:
            request.prediction_tokens.ids.extend(prediction)
        if isinstance(prompt, str):
            request.text = prompt
        elif prompt is not None:
            request.tokens.SetInParent()
            _add_ids(request.tokens, prompt, "prompt")
        if messages is not None:
            request.chat.no_generation_prompt, request.chat.continue_final_message = not adds_header, continues
            request.chat.SetInParent()
            _add_messages(request.chat, messages)
    except (ValueError, TypeError, KeyError) as e:
        raise InvalidRequest(f"the request cannot be sent: {e}") from e
    return request


def build_embed_request(inputs: Iterable[Prompt], options: EmbedOptions) -> inference_pb2.EmbedRequest:
    """Build a request, as `build_request` does."""
    if isinstance(inputs, str | bytes):
        raise InvalidRequest("inputs must be a list, also for one text: write embed([text])", param="inputs")
    rest = _given(options, EmbedOptions.__optional_keys__)
    try:
        request = inference_pb2.EmbedRequest(**_of_the_call(rest), **rest)
        for i, given in enumerate(inputs):
            added = request.inputs.add()
            if isinstance(given, str):
                added.text = given
            else:
                added.tokens.SetInParent()
                _add_ids(added.tokens, given, f"inputs[{i}]")
    except (ValueError, TypeError, KeyError) as e:
        raise InvalidRequest(f"the request cannot be sent: {e}") from e
    return request


def collect_embeddings(responses: Sequence[inference_pb2.EmbedResponse]) -> EmbedResult:
    last = responses[-1]  # the server sends at least one
    return EmbedResult([list(r.embedding) for r in responses], last.usage, last.request_id, last.service_tier)


def _given(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Options that are given. Raises InvalidRequest for a name that is not known."""
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(sorted(known))}"
            raise InvalidRequest(f"there is no option {name!r}: {hint}", param=name)
    return {name: value for name, value in options.items() if value is not None}


def _sampling(given: Mapping[str, Any]) -> inference_pb2.SamplingParams:
    """Raises InvalidRequest."""
    made = inference_pb2.SamplingParams()
    for name, value in given.items():
        try:
            made.MergeFrom(inference_pb2.SamplingParams(**{name: value}))
        except (ValueError, TypeError) as e:  # it does not say which field
            raise InvalidRequest(f"{name} cannot be sent: {e}", param=name) from e
    return made


def _add_ids(message: inference_pb2.TokenIds, given: Iterable[int], param: str) -> None:
    """Raises InvalidRequest."""
    try:
        if isinstance(given, bytes):
            raise TypeError("got bytes")
        message.ids.extend(given)
    except (ValueError, TypeError) as e:
        raise InvalidRequest(f"{param} must be a text or a list of token ids: {e}", param=param) from e


def _add_messages(chat: inference_pb2.Chat, messages: Any) -> None:
    """Raises InvalidRequest."""
    if isinstance(messages, str | bytes | Mapping):
        raise InvalidRequest(
            'messages must be a list, also of one: write [{"role": "user", "content": "..."}]', param="messages"
        )
    for i, message in enumerate(messages):
        for name in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(name), str):
                where = f"messages[{i}]"
                raise InvalidRequest(
                    f"{where} must be a mapping whose role and content are texts, got {str(message)[:100]}", param=where
                )
        chat.messages.add(role=message["role"], content=message["content"])


def _of_the_call(options: dict[str, Any]) -> dict[str, Any]:
    """Fields that every request has, taken out of `options`."""
    call = {name: options.pop(name) for name in _OF_THE_CALL if name in options}
    level = {name: options.pop(name) for name in ("ttft_s", "tpot_s") if name in options}
    if level:
        call["level"] = inference_pb2.ServiceLevel(**level)
    for name, values in _NAMED.items():
        if name in options:
            if (given := options.pop(name)) not in values:
                raise InvalidRequest(f"{name} must be {' or '.join(values)}, got {given!r}", param=name)
            call[name] = values[given]
    return call
