"""The published document against the server that it describes, on a real socket: routes, fields and answers."""

import copy
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from diptych.cluster.front.openai.fields import HEADER, MAX_NAMES

from ....support.front import Echo, served

Json = dict[str, Any]
METHODS = ("get", "post", "put", "delete", "patch")
IDS = {"name": "echo", "response_id": "resp_0"}


@pytest.fixture(scope="module")
def http() -> Generator[httpx.Client]:
    with served(Echo(laps=1), has_dashboard=True) as server, httpx.Client(base_url=server.url) as client:
        yield client


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> Json:
    return http.get("/openapi.json").json()


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def bodies(document: Json) -> Iterator[tuple[str, Json]]:
    """Paths with a body, and its schema."""
    for path, _, operation in operations(document):
        if "requestBody" in operation:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            yield path, document["components"]["schemas"][reference.rpartition("/")[2]]


def references(node: object) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_schema_is_valid_and_every_reference_leads_to_one(document: Json) -> None:
    assert document["openapi"] == "3.1.0"
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in references(document):
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_what_is_served_is_what_is_documented(http: httpx.Client, document: Json) -> None:
    for path, described in document["paths"].items():
        own = {method.upper() for method in described}
        own |= {"HEAD"} if "GET" in own else set()
        for method in METHODS:
            answer = http.request(method, path.format(**IDS))
            assert (answer.status_code == 405) == (method.upper() not in own), (method, path)
            assert answer.status_code != 405 or set(answer.headers["allow"].split(", ")) == own
    for path in ("/v1/none", "/docs", "/"):
        assert http.get(path).status_code == 404


def ignored(http: httpx.Client, path: str, body: Json, names: Iterable[str]) -> set[str]:
    """Those of `names` that the server does not know as fields of this body."""
    found: set[str] = set()
    listed = list(names)
    for i in range(0, len(listed), MAX_NAMES):
        answer = http.post(path, json=body | dict.fromkeys(listed[i : i + MAX_NAMES]))
        assert answer.status_code == 200, answer.text
        found |= set(filter(None, answer.headers.get(HEADER, "").split(", ")))
    return found


def examples(document: Json) -> dict[str, Json]:
    """Example of each path's body."""
    return {
        path: operation["requestBody"]["content"]["application/json"]["example"]
        for path, _, operation in operations(document)
        if "requestBody" in operation
    }


def test_each_body_knows_the_documented_fields_and_no_others(http: httpx.Client, document: Json) -> None:
    documented = {path: set(schema["properties"]) for path, schema in bodies(document)}
    every = set[str]().union(*documented.values(), CompletionCreateParamsNonStreaming.__annotations__)
    for path, body in examples(document).items():
        assert set(dict(bodies(document))[path].get("required", ())) <= body.keys() <= documented[path]
        assert ignored(http, path, body, every - body.keys()) == every - documented[path], path


def test_what_a_body_needs_is_documented(http: httpx.Client, document: Json) -> None:
    for path, schema in bodies(document):
        for name in schema.get("required", ()):
            body = {key: value for key, value in examples(document)[path].items() if key != name}
            answer = http.post(path, json=body)
            assert answer.status_code == 400 and f"{name} is missing" in answer.text, (path, name)
    for path, body in examples(document).items():
        assert http.post(path, json=body).status_code == 200


def closed(node: Any) -> Any:
    """Schema that allows documented fields alone."""
    if isinstance(node, list):
        return [closed(value) for value in node]
    if not isinstance(node, dict):
        return node
    found = {key: closed(value) for key, value in node.items()}
    if "required" in node and "properties" in node and node["properties"].keys() != {"type"}:
        found["additionalProperties"] = False
    return found


def fields(node: Any, where: str) -> Iterator[str]:
    """Places of the fields of an answer."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield f"{where}.{key}"
            yield from fields(value, f"{where}.{key}")
    elif isinstance(node, list):
        for value in node:
            yield from fields(value, where)


def documented_fields(schema: Any, where: str) -> Iterator[str]:
    for part in (schema, *schema.get("anyOf", ())):
        for key, value in part.get("properties", {}).items():
            yield f"{where}.{key}"
            yield from documented_fields(value, f"{where}.{key}")
        if "items" in part:
            yield from documented_fields(part["items"], where)


CHAT: Json = {"messages": [{"role": "user", "content": "a"}]}
CALLS: tuple[tuple[str, str, Json | None], ...] = (
    ("POST", "/v1/completions", {"prompt": "a"}),
    ("POST", "/v1/completions", {"prompt": "ab", "logprobs": 2, "prompt_logprobs": 1, "echo": True}),
    ("POST", "/v1/completions", {"prompt": "ab", "return_token_ids": True, "timings": True, "service_tier": "auto"}),
    ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
    ("POST", "/v1/chat/completions", CHAT | {"return_token_ids": True, "timings": True, "service_tier": "auto"}),
    ("POST", "/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ("POST", "/v1/responses", {"input": "a", "metadata": {"a": "b"}, "user": "u"}),
    ("POST", "/v1/responses/input_tokens", {"input": "a"}),
    ("POST", "/v1/messages", CHAT | {"max_tokens": 2}),
    ("POST", "/v1/messages/count_tokens", CHAT),
    ("POST", "/v1/embeddings", {"input": "a"}),
    ("POST", "/invocations", CHAT),
    ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [65]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{name}", None),
    ("GET", "/v1/responses/{response_id}", None),
    ("GET", "/v1/responses/{response_id}/input_items", None),
    ("POST", "/v1/responses/{response_id}/cancel", None),
    ("DELETE", "/v1/responses/{response_id}", None),
    ("GET", "/health", None),
    ("GET", "/health/decode", None),
    ("GET", "/load", None),
    ("GET", "/version", None),
    ("GET", "/openapi.json", None),
    ("GET", "/dashboard/data", None),
    ("POST", "/v1/completions", {}),
    ("POST", "/v1/messages", {}),
    ("POST", "/v1/messages", CHAT | {"max_tokens": 2, "thread": {"type": "create"}}),
)
# Only a model that calls tools or thinks, or an answer that fails, has them; tests/e2e/test_clients.py sees such.
RARE = (".message.tool_calls", ".message.function_call", ".message.reasoning", ".error.code", ".error.message")


def test_answers_have_the_documented_fields_and_no_others(http: httpx.Client, document: Json) -> None:
    schemas: Json = document["components"]["schemas"]
    seen: set[str] = set()
    asked: set[str] = set()
    ids = IDS.copy()
    for method, path, body in CALLS:
        answer = http.request(method, path.format(**ids), json=body)
        described = document["paths"][path][method.lower()]["responses"][str(answer.status_code)]
        schema = described["content"][answer.headers["content-type"]]["schema"]
        if path == "/v1/responses":
            ids["response_id"] = answer.json()["id"]
        root = closed(copy.deepcopy(schema)) | {"components": {"schemas": closed(schemas)}}
        jsonschema.validate(answer.json(), root)
        for reference in references(schema):
            name = reference.rpartition("/")[2]
            asked.add(name)
            seen |= set(fields(answer.json(), name))
    described_answers = [o["responses"] for _, _, o in operations(document)]
    answers = {r.rpartition("/")[2] for r in references(described_answers) if r.startswith("#/components/schemas/")}
    assert answers == asked
    for name in asked:
        unseen = {place for place in documented_fields(schemas[name], name) if place not in seen}
        assert not {place for place in unseen if not any(rare in place for rare in RARE)}


def test_a_call_of_each_kind_is_refused_as_documented(http: httpx.Client, document: Json) -> None:
    for path, method, operation in operations(document):
        answer = http.request(method, path.format(name="none", response_id="resp_none"), content=b"{")
        assert str(answer.status_code) in operation["responses"], (path, method, answer.text)
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in operation["responses"][str(answer.status_code)]["content"], (path, method)
