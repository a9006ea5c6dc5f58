"""Table of the HTTP API: every route, with its body, its answer and its errors.

The application (api.py), the labels of metrics (metrics.py) and the published document (openapi.py) are made from it. A
new route is a row here and its handler in api.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ....workers.common import errors
from ....workers.common.errors import DiptychError
from ..anthropic.body import CountBody, MessagesBody
from ..openai.embeddings import EmbeddingsBody
from ..openai.fields import Known
from ..openai.tokenize import DetokenizeBody, TokenizeBody
from ..openai.types import ChatBody, CompletionBody
from ..responses.body import ResponsesBody

Errors = tuple[type[DiptychError], ...]


class BodyModel(Protocol):
    """Class that reads a request body."""

    @classmethod
    def known(cls) -> Known: ...


@dataclass(frozen=True, slots=True)
class Query:
    """Parameter of a URL."""

    name: str
    schema: Mapping[str, object]
    description: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `answer`: name of its schema in answer_schemas.py; None: text, of the kind `media`."""

    method: str
    path: str  # as in OpenAPI; {name:path} may contain slashes
    summary: str
    answer: str | None
    body: type[BodyModel] | None = None
    example: Mapping[str, object] | None = None  # body that any model answers
    streams: str | None = None  # form of the events, where the answer may be streamed
    queries: tuple[Query, ...] = ()
    errors: Errors = ()  # besides those of every call
    takes_level: bool = False  # headers may ask for a service level
    is_open: bool = False  # without a key
    unready: str | None = None  # schema of the answer with status 503
    media: str = "text/plain"


_BODY: Errors = (errors.UnknownModel, errors.BodyTooLarge, errors.UnsupportedEncoding)
_RUN: Errors = (*_BODY, errors.DeadlineExceeded)
# Of a call that may name its answer: its operation may be streamed.
_ANSWER: Errors = (*_RUN, errors.AnswerTakenOver, errors.IdempotencyKeyReused)
_ASKED = [{"role": "user", "content": "Hello"}]
_CHUNKS = "chunks in OpenAI's form; the last is `data: [DONE]`"
_RESPONSE = "/v1/responses/{response_id}"
_GONE: Errors = (errors.UnknownResponse,)
_LISTED = (
    Query("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "Most items of the answer"),
    Query("order", {"enum": ["asc", "desc"], "default": "desc"}, "Whether the oldest item comes first"),
    Query("after", {"type": "string"}, "Id of the item before the first of the answer"),
)

_CHAT = Operation(
    "POST",
    "/v1/chat/completions",
    "Answer a conversation",
    "ChatCompletion",
    ChatBody,
    {"messages": _ASKED, "max_tokens": 8},
    streams=_CHUNKS,
    errors=_ANSWER,
    takes_level=True,
)
# By the names of their handlers.
OPERATIONS: Mapping[str, Operation] = {
    "completions": Operation(
        "POST",
        "/v1/completions",
        "Complete prompts",
        "Completion",
        CompletionBody,
        {"prompt": "Once upon a time", "max_tokens": 8},
        streams=_CHUNKS,
        errors=_ANSWER,
        takes_level=True,
    ),
    "chat_completions": _CHAT,
    "create_response": Operation(
        "POST",
        "/v1/responses",
        "Answer in the form of the Responses API",
        "Response",
        ResponsesBody,
        {"input": "Hello", "max_output_tokens": 8},
        streams="events of the Responses API, to `response.completed`",
        errors=_ANSWER,
        takes_level=True,
    ),
    "count_input": Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Count the tokens of the prompt that a call would have",
        "InputTokens",
        ResponsesBody,
        {"input": "Hello"},
        errors=_BODY,
    ),
    "retrieve_response": Operation(
        "GET",
        _RESPONSE,
        "Read a kept response",
        "Response",
        streams="events of a response that was created with `background` and `stream`",
        queries=(
            Query("stream", {"type": "boolean", "default": False}, "Whether its events are sent, those to come too"),
            Query("starting_after", {"type": "integer", "minimum": 0}, "Number of the event before the first"),
        ),
        errors=_GONE,
    ),
    "delete_response": Operation("DELETE", _RESPONSE, "Forget a kept response", "DeletedResponse", errors=_GONE),
    "cancel_response": Operation("POST", f"{_RESPONSE}/cancel", "End a response that runs", "Response", errors=_GONE),
    "input_items": Operation(
        "GET",
        f"{_RESPONSE}/input_items",
        "List the input of a kept response",
        "ItemList",
        queries=_LISTED,
        errors=_GONE,
    ),
    "messages": Operation(
        "POST",
        "/v1/messages",
        "Answer a conversation in Anthropic's form",
        "Message",
        MessagesBody,
        {"messages": _ASKED, "max_tokens": 8},
        streams="Anthropic's events, to `message_stop`",
        errors=_ANSWER,
        takes_level=True,
    ),
    "count_tokens": Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count a prompt's tokens",
        "TokenCount",
        CountBody,
        {"messages": _ASKED},
        errors=_BODY,
    ),
    "embeddings": Operation(
        "POST",
        "/v1/embeddings",
        "Compute embeddings of texts",
        "EmbeddingList",
        EmbeddingsBody,
        {"input": "Hello"},
        errors=_RUN,
        takes_level=True,
    ),
    "invocations": replace(
        _CHAT,
        path="/invocations",
        summary="Answer a chat; with prompt or input in place of messages, complete prompts or compute embeddings",
    ),
    "tokenize": Operation(
        "POST", "/tokenize", "Token ids of a text", "Tokens", TokenizeBody, {"prompt": "Hello"}, errors=_BODY
    ),
    "detokenize": Operation(
        "POST", "/detokenize", "Text of token ids", "TokenText", DetokenizeBody, {"tokens": [72, 105]}, errors=_BODY
    ),
    "models": Operation("GET", "/v1/models", "List the model's names", "ModelList"),
    "model": Operation("GET", "/v1/models/{name:path}", "Describe a model", "ModelCard", errors=(errors.UnknownModel,)),
    "health": Operation("GET", "/health", "Say whether requests are served", "Health", is_open=True, unready="Health"),
    "decode_health": Operation(
        "GET", "/health/decode", "Say whether tokens are decoded", "DecodeHealth", is_open=True, unready="DecodeHealth"
    ),
    "load": Operation("GET", "/load", "Load of the router, and what it predicts", "Load"),
    "metrics": Operation("GET", "/metrics", "Metrics for Prometheus", None),
    "dashboard": Operation(
        "GET", "/dashboard", "Page that shows the cluster as it runs", None, is_open=True, media="text/html"
    ),
    "dashboard_asset": Operation(
        "GET",
        "/dashboard/assets/{name}",
        "File of that page",
        None,
        errors=(errors.UnknownFile,),
        is_open=True,
        media="text/javascript",
    ),
    "dashboard_data": Operation("GET", "/dashboard/data", "State of the router, for that page", "DashboardData"),
    "version": Operation("GET", "/version", "Version of the server", "Version", is_open=True),
    "openapi": Operation("GET", "/openapi.json", "This document", "OpenApiDocument", is_open=True),
}
