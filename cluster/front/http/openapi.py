"""Writes the OpenAPI 3.1 document of the HTTP API, which GET /openapi.json publishes.

Paths come from operations.py, fields of bodies from the classes that read them, answers from answer_schemas.py.
"""

import json
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from typing import Any, cast

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from .... import __version__
from ....workers.common.errors import Unauthenticated
from ..anthropic import errors as anthropic
from ..openai.fields import HEADER, Known
from ..retries.answer_key import KEY_HEADER, MAX_KEY_CHARS, SEEN_HEADER
from .answer_schemas import ANSWERS
from .edge import ID_HEADER
from .level_headers import ADMISSION, TPOT, TTFT
from .operations import OPERATIONS, BodyModel, Operation

Json = dict[str, Any]

_ANY_CALL: Mapping[int, str] = {
    400: "The call is invalid: the message names the field, the cause and the remedy",
    408: "The headers or the body did not come in time",
    429: "Too many calls, or too many connections of one address: `retry-after` says when to try again",
    431: "The request's line and headers are too large",
    500: "The server failed",
    503: "No worker can serve the call, or too many connections are open: try again",
}
_ERRORS: Mapping[int, str] = {
    **_ANY_CALL,
    401: "The API key is missing or wrong",
    404: "There is no such model, response or file",
    409: "Another call with the same Idempotency-Key goes on with the answer",
    413: "The body is too large",
    415: "The body has an encoding other than gzip",
    422: "The Idempotency-Key was used for another call",
    504: "The answer was not ready before the call's deadline",
}
_LEVEL: Mapping[str, tuple[str, Json]] = {
    TTFT: ("Wanted time to first token, in milliseconds", {"type": "number"}),
    TPOT: ("Wanted time per output token, in milliseconds", {"type": "number"}),
    ADMISSION: ("Whether a call that will be late waits or is refused with 429", {"enum": ["wait", "refuse"]}),
}


_KEY: Mapping[str, tuple[str, Json]] = {
    KEY_HEADER: (
        "Name that the client gives the answer: the same call with it gives the same answer, at any router",
        {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
    ),
    SEEN_HEADER: ("Id of the last event that the client has of it", {"type": "string", "pattern": "^[0-9]*$"}),
}


class _WithoutTitles(GenerateJsonSchema):
    """Schemas without a title for each field, which would be its name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def document() -> bytes:
    """JSON of the document, made once: that takes tens of milliseconds."""
    return json.dumps(describe(OPERATIONS), separators=(",", ":")).encode()


def describe(operations: Mapping[str, Operation]) -> Json:
    """OpenAPI document of `operations`, by their names."""
    paths: dict[str, Json] = {}
    for name, operation in operations.items():
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(name, operation, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Diptych",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs over a disaggregated cluster. Unknown fields of a body are "
            f"ignored, and named in the answer's header {HEADER}, unless the server is strict.",
        },
        "paths": paths,
        "components": {
            "schemas": {**_bodies(operations), **ANSWERS},
            "headers": {ID_HEADER: {"description": "Id of the call", "schema": {"type": "string"}}},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"x-api-key": []}, {}],  # the last: a server without keys
    }


def _operation(name: str, operation: Operation, path: str) -> Json:
    found: Json = {"operationId": name, "summary": operation.summary, "responses": _responses(operation, path)}
    if operation.is_open:
        found["security"] = []
    parameters = _parameters(operation, path)
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        content: Json = {"schema": _reference(_name(operation.body))}
        if operation.example is not None:
            content["example"] = operation.example
        found["requestBody"] = {"required": True, "content": {"application/json": content}}
    return found


def _parameters(operation: Operation, path: str) -> list[Json]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    found: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    for query in operation.queries:
        found.append({"name": query.name, "in": "query", "description": query.description, "schema": query.schema})
    if operation.streams is not None and operation.body is not None:
        for name, (description, schema) in _KEY.items():
            found.append({"name": name, "in": "header", "description": description, "schema": schema})
    if operation.takes_level:
        for name, (description, schema) in _LEVEL.items():
            found.append({"name": name, "in": "header", "description": description, "schema": schema})
    return found


def _responses(operation: Operation, path: str) -> Json:
    """Answers of an operation, by status."""
    content: Json = {operation.media: {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {"application/json": {"schema": _reference(operation.answer)}}
    description = "The answer"
    if operation.streams is not None:
        content["text/event-stream"] = {}
        description += f"; with `stream`, {operation.streams}"
    own = {error.status for error in operation.errors} | (set() if operation.is_open else {Unauthenticated.status})
    error = _reference("MessagesError" if anthropic.is_own(path) else "Error")
    if anthropic.is_own(path):  # a connection is refused before its path is known
        error = {"anyOf": [error, _reference("Error")]}
    found: Json = {"200": _response(description, content)}
    for status in sorted(own | set(_ANY_CALL)):
        is_unready = status == HTTPStatus.SERVICE_UNAVAILABLE and operation.unready is not None
        schema = {"anyOf": [_reference(operation.unready or ""), error]} if is_unready else error
        found[str(status)] = _response(_ERRORS[status], {"application/json": {"schema": schema}})
    return found


def _response(description: str, content: Json) -> Json:
    headers = {ID_HEADER: {"$ref": f"#/components/headers/{ID_HEADER}"}}
    return {"description": description, "headers": headers, "content": content}


def _bodies(operations: Mapping[str, Operation]) -> Json:
    """Schemas of the bodies, and of what they consist of, by name."""
    kinds = [operation.body for operation in operations.values() if operation.body is not None]
    _, made = models_json_schema(
        [(cast(type[BaseModel], kind), "validation") for kind in kinds],
        ref_template="#/components/schemas/{model}",
        schema_generator=_WithoutTitles,
    )
    schemas: Json = made.get("$defs", {})
    for kind in kinds:
        _add_known(schemas[_name(kind)]["properties"], kind.known())
    return schemas


def _add_known(properties: Json, known: Known) -> None:
    """Add the fields that are accepted and not served."""
    for name, values in known.not_served.items():
        if name not in known.served:
            description = "Not served: only values without effect are accepted"
            properties[name] = {"enum": [None, *values], "description": description}
    for name in sorted(known.no_effect):
        properties.setdefault(name, {"description": "Accepted, without effect"})


def _name(kind: type[BodyModel]) -> str:
    return kind.__name__


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
