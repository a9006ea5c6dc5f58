"""One rule for fields: served, refused by name, or unknown and named."""

import json
import logging
from collections.abc import Callable, Generator
from inspect import signature
from typing import Any

import anthropic
import httpx
import openai
import pytest

from diptych.cluster.front.anthropic.body import CountBody, MessagesBody
from diptych.cluster.front.limits import RequestLimits
from diptych.cluster.front.openai.embeddings import EmbeddingsBody
from diptych.cluster.front.openai.fields import (
    HEADER,
    MAX_NAMES,
    NO_EFFECT,
    NOT_SERVED,
    Known,
    UnknownFields,
    header_value,
)
from diptych.cluster.front.openai.types import ChatBody, CompletionBody, parse
from diptych.cluster.front.responses.body import ResponsesBody
from diptych.workers.common.errors import InvalidRequest

from ....support.front import Echo, Served, served
from ....support.logs import messages_of

USER: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {"completions": {"prompt": "hi"}, "chat/completions": {"messages": USER}}


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1)) as it:
        yield it


@pytest.fixture
def strict() -> Generator[Served]:
    with served(Echo(laps=1), limits=RequestLimits(strict=True)) as it:
        yield it


def post(server: Served, path: str = "chat/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=BODIES[path] | body, timeout=60)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_field_is_served_and_named_in_a_header(server: Served, path: str, stream: bool) -> None:
    response = post(server, path, tempature=0.3, min_characters=10, user="me", stream=stream)
    assert response.status_code == 200
    assert response.headers[HEADER] == "tempature, min_characters"
    assert HEADER not in post(server, path, temperature=0.3, stream=stream).headers
    refused = post(server, path, tempature=0.3, temperature=-1)
    assert (refused.status_code, refused.headers[HEADER]) == (400, "tempature")


def test_an_unknown_field_is_logged_once(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="diptych.fields"):
        for _ in range(3):
            post(server, tempature=0.3)
        post(server, messages=[{**USER[0], "colour": i} for i in range(5)])
    assert messages_of(caplog, "diptych.fields") == [
        "a client sent tempature, which is unknown; did the client mean temperature?",
        "a client sent messages[].colour, which is unknown",
    ]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tempature": 0.3}, "tempature", "tempature is unknown: did you mean temperature?"),
        ({"max_token": 3}, "max_token", "max_token is unknown: did you mean max_tokens?"),
        ({"frobnicate": 0.3}, "frobnicate", "frobnicate is unknown: leave it out"),
        (
            {"stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "stream_options.include_usge is unknown: did you mean include_usage?",
        ),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema",
            "response_format.schema is unknown: did you mean json_schema?",
        ),
        (
            {"messages": [*USER, {**USER[0], "contents": "x"}]},
            "messages[1].contents",
            "messages[].contents is unknown: did you mean content?",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
            "messages[0].content[0].cache_control",
            "messages[].content[].cache_control is unknown: leave it out",
        ),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            "messages[0].role",
            "messages[].role=asistant is unknown: did you mean assistant?",
        ),
        (
            {"tool_choice": "none", "tools": [{"function": {"name": "f", "paramters": {}}}]},
            "tools[0].function.paramters",
            "tools[].function.paramters is unknown: did you mean parameters?",
        ),
    ],
)
def test_a_strict_server_refuses_an_unknown_field_and_says_what_was_meant(
    server: Served, strict: Served, body: dict[str, Any], param: str, message: str
) -> None:
    served_response = post(server, **body)
    assert (served_response.status_code, served_response.headers[HEADER]) == (200, message.partition(" is ")[0])
    response = post(strict, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"].partition(" (request")[0]) == (param, message)
    assert strict.source.requests == []


def test_a_strict_server_serves_what_is_known(strict: Served) -> None:
    lists = ("tools", "functions", "documents")  # served
    quiet = {name: values[0] for name, values in NOT_SERVED.items() if values and name not in lists}
    labels = dict.fromkeys(NO_EFFECT, "x")
    assert post(strict, **quiet, **labels).status_code == 200
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "index": 0, "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "assistant", "content": "x", "refusal": None, "audio": None, "annotations": [], "reasoning": None},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "developer", "content": [{"type": "text", "text": "x"}], "name": "d"},
    ]
    assert post(strict, messages=history, response_format={"type": "text"}).status_code == 200


@pytest.mark.parametrize(
    ("kind", "name"),
    # A body's own fields have rules of their own.
    [(kind, name) for kind in (CompletionBody, ChatBody) for name in sorted(NOT_SERVED.keys() - kind.model_fields)],
)
def test_what_is_known_and_not_served_is_refused_by_name(kind: type[CompletionBody], name: str) -> None:
    def ask(value: object) -> None:
        parse(kind, json.dumps({"prompt": "x", "messages": USER, name: value}).encode()).call()

    for value in (None, *NOT_SERVED[name]):
        ask(value)
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported") as caught:
        ask({"some": "thing"})
    assert caught.value.param == name


def test_every_field_of_the_official_client_is_known() -> None:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for kind, params in ((ChatBody, chat_create_params), (CompletionBody, completion_create_params)):
        names = {*params.CompletionCreateParamsBase.__annotations__, "stream"}
        assert names <= {*kind.model_fields, *NOT_SERVED, *NO_EFFECT}


def test_all_parameters_of_the_official_clients_are_known() -> None:
    openais, anthropics = openai.OpenAI(api_key="none"), anthropic.Anthropic(api_key="none")
    calls: list[tuple[Callable[..., object], Known]] = [
        (openais.responses.create, ResponsesBody.known()),
        (openais.responses.input_tokens.count, ResponsesBody.known()),
        (openais.embeddings.create, EmbeddingsBody.known()),
        (anthropics.messages.create, MessagesBody.known()),
        (anthropics.messages.count_tokens, CountBody.known()),
        (anthropics.beta.messages.create, MessagesBody.known()),
        (anthropics.beta.messages.count_tokens, CountBody.known()),
    ]
    for call, known in calls:
        names = set(signature(call).parameters) - {"extra_headers", "extra_query", "extra_body", "timeout"}
        assert names <= {*known.served, *known.not_served, *known.no_effect}, call


def test_names_that_are_logged_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields(strict=False)
    with caplog.at_level(logging.WARNING, logger="diptych.fields"):
        for i in range(400):
            unknown.note(parse(CompletionBody, json.dumps({"prompt": "x", f"name{i}": 1}).encode()).call().unknown)
    assert len(messages_of(caplog, "diptych.fields")) == 256


def test_names_in_the_header_are_bounded() -> None:
    body = {"prompt": "x"} | {f"{'n' * 1000}{i}": 1 for i in range(100)} | {f"{i}{'€' * 1000}": 1 for i in range(100)}
    call = parse(CompletionBody, json.dumps(body).encode()).call()
    header = header_value(call.unknown)
    assert 0 < len(call.unknown) <= MAX_NAMES and len(header) < 2000 and header.isascii()


def test_custom_roles_reach_the_template(server: Served) -> None:
    """Fields that vLLM serves too; only the template gives them a meaning."""
    one = post(server, messages=[{"role": "my-custom-role", "content": "hi"}])
    two = post(server, messages=[{"role": "my-custom-role", "content": [{"type": "text", "text": "hi"}]}])
    assert one.headers[HEADER] == "messages[].role=my-custom-role"
    text = one.json()["choices"][0]["message"]["content"]
    assert text == two.json()["choices"][0]["message"]["content"] == "<|my-custom-role|>hi"


def test_tools_and_their_history_are_in_the_prompt(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="echo",
            messages=[
                {"role": "user", "content": "sun?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "yes"},
            ],
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice="none",
            response_format={"type": "text"},
        )
    call = '[{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]'
    tools = '[{"type": "function", "function": {"name": "f"}}]'
    assert answer.choices[0].message.content == f"{tools}sun?{call}<|tool|>yes"
    assert answer.choices[0].finish_reason == "stop"
