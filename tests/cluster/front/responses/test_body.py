"""Bodies of the Responses API: every field is served, has no effect, or is refused by its name."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from diptych.cluster.front.openai.types import ChatBody, parse
from diptych.cluster.front.responses.body import MAX_ECHO_BYTES, ResponseCall, ResponsesBody
from diptych.cluster.front.responses.items import output_messages
from diptych.cluster.tokens.prompt_encoding import MAX_MESSAGES, ChatPrompt
from diptych.workers.common.errors import InvalidRequest

USER: dict[str, Any] = {"role": "user", "content": "hi"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
IMAGE = {"type": "input_image", "image_url": "x"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}


def read(**body: Any) -> ResponseCall:
    return parse(ResponsesBody, json.dumps({"input": "hi"} | body).encode()).call()


def messages(*items: dict[str, Any]) -> Any:
    return json.loads(f"[{read(input=list(items)).messages}]")


def echo(**body: Any) -> Any:
    return json.loads(f"{{{read(**body).echo}}}")


@pytest.mark.parametrize(
    "body, param",
    [
        ({"input": 5}, "input"),
        ({"input": ["a"]}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [USER, {"type": "web_search_call", "id": "x"}]}, "input[1].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"], **USER}]}, "input[0].type"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [USER] * (MAX_MESSAGES + 1)}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [FUNCTION | {"name": "a b"}]}, "tools"),
        ({"tools": [FUNCTION | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "xml"}}]}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"include": "all"}, "include"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"user": 5}, "user"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "old"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"personality": "friendly"}, "personality"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"instructions": "a" * (MAX_ECHO_BYTES + 1)}, "instructions"),
        ({"tools": [FUNCTION | {"description": "a" * (MAX_ECHO_BYTES + 1)}]}, "tools"),
        ({"chat_template_kwargs": {"a": "a" * (MAX_ECHO_BYTES + 1)}}, "chat_template_kwargs"),
    ],
)
def test_bad_fields_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    assert caught.value.param == param
    assert param.partition("[")[0].rpartition(".")[2] in caught.value.message


def test_input_is_needed() -> None:
    with pytest.raises(InvalidRequest, match="input is missing"):
        parse(ResponsesBody, b"{}")


@pytest.mark.parametrize("instead", ["conversation", "prompt"])
def test_what_stands_in_place_of_the_input_is_refused_by_name(instead: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{instead} is not supported") as caught:
        parse(ResponsesBody, json.dumps({instead: {"id": "p"}}).encode())
    assert caught.value.param == instead


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
def test_numbers_that_json_does_not_have_are_refused(number: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(ResponsesBody, f'{{"input": [{{"role": "user", "content": "a", "x": {number}}}]}}'.encode()).call()


def test_values_without_effect_are_accepted() -> None:
    call = read(
        background=False,
        truncation="disabled",
        conversation=None,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        text={"verbosity": "medium", "format": {"type": "text"}},
        stream_options={"include_obfuscation": False},
        max_tool_calls=3,
        prompt_cache_key="k",
        safety_identifier="s",
        prompt_cache_retention="24h",
    )
    assert call.parsed.unknown == () and call.parsed.spec.sampling.grammar is None


def test_unknown_fields_are_named() -> None:
    call = read(color=1, input=[USER | {"weight": 2}, CALL | {"size": 3}], tools=[FUNCTION | {"tint": 4}])
    assert {field.name for field in call.parsed.unknown} == {"color", "input[].weight", "input[].size", "tools[].tint"}


def test_items_of_one_turn_become_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    part = {"type": "output_text", "text": "so", "annotations": []}
    text = {"type": "message", "role": "assistant", "content": [part]}
    note = {"type": "custom_tool_call", "call_id": "d", "name": "n", "input": "é"}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "42"}]}
    found = messages(USER, thought, text, CALL, note, result, thought, thought, text, text)
    calls = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "d", "type": "function", "function": {"name": "n", "arguments": {"input": "é"}}},
    ]
    hm = {"reasoning": "hm", "reasoning_content": "hm"}
    assert found == [
        USER,
        {"role": "assistant", "content": "so", **hm, "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "assistant", "content": "", **hm},
        {"role": "assistant", "content": "so", **hm},
        {"role": "assistant", "content": "so"},
    ]


def test_an_answer_becomes_the_message_that_the_same_items_make() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "so"},
        CALL,
    ]
    assert output_messages(items) == messages(*items)
    cut = CALL | {"arguments": '{"a": "b'}
    [message] = output_messages([cut])
    assert [message] == messages(cut)
    function = {"name": "f", "arguments": {"a": "b"}}
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": function}]


def test_a_call_is_that_of_the_same_chat() -> None:
    """Tools, their choice, the effort, the grammar and the parameters mean the same in both APIs."""
    schema = {"name": "x", "schema": SCHEMA, "strict": False}
    common = {"temperature": 0.5, "top_p": 0.25, "seed": 7, "top_k": 3, "stop": ["x"], "service_tier": "auto"}
    syntax = {"syntax": "regex", "definition": "a+"}
    custom = {"type": "custom", "name": "g", "description": "d"}
    given = read(
        **common,
        instructions="be",
        max_output_tokens=9,
        text={"format": {"type": "json_schema", **schema}},
        tools=[FUNCTION | {"strict": True}, custom | {"format": {"type": "grammar", **syntax}}],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        parallel_tool_calls=False,
        reasoning={"effort": "none"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    nested = {"name": "g", "description": "d", "format": {"type": "grammar", "grammar": syntax}}
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    body = common | {
        "messages": [{"role": "system", "content": "be"}, USER],
        "max_completion_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "tools": [{"type": "function", "function": function}, {"type": "custom", "custom": nested}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
        "parallel_tool_calls": False,
        "reasoning_effort": "none",
        "logprobs": True,
        "top_logprobs": 2,
    }
    chat = parse(ChatBody, json.dumps(body).encode()).call()
    [prompt] = chat.spec.prompts
    assert isinstance(prompt, ChatPrompt)
    written = json.loads(f'{{"messages":[{given.system},{given.messages}],{given.template}}}')
    assert ChatPrompt(**written) == prompt
    spec = given.parsed.spec
    assert {name: getattr(spec, name) for name in ("tools", "sampling", "stop", "seed", "max_tokens", "level")} == {
        name: getattr(chat.spec, name) for name in ("tools", "sampling", "stop", "seed", "max_tokens", "level")
    }


@pytest.mark.parametrize(
    ("given", "strict", "lenient"),
    [
        ({}, True, True),
        ({"strict": None}, True, True),
        ({"strict": True}, True, False),
        ({"strict": False}, False, False),
    ],
)
def test_a_function_is_strict_unless_it_says_otherwise(given: dict[str, Any], strict: bool, lenient: bool) -> None:
    """Other than in chats. What cannot be enforced is refused only where it says that it is strict."""
    use = read(tools=[FUNCTION | given]).parsed.spec.tools
    assert use is not None and use.is_constrained == strict
    assert (use.tools[0].strict, use.tools[0].lenient) == (strict, lenient)
    assert echo(tools=[FUNCTION | given])["tools"][0]["strict"] == strict


def test_the_answer_repeats_the_call() -> None:
    found = echo(
        tools=[FUNCTION, {"type": "custom", "name": "g"}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        reasoning={"effort": "low"},
        metadata={"a": "b"},
        store=False,
    )
    assert found["tools"] == [
        FUNCTION | {"description": None, "strict": True},
        {"type": "custom", "name": "g", "description": None, "format": {"type": "text"}},
    ]
    assert found["tool_choice"] == {"type": "function", "name": "f"}
    assert found["text"]["format"] == {"type": "json_schema", "name": "x", "schema": SCHEMA}
    assert (found["reasoning"]["effort"], found["metadata"], found["store"]) == ("low", {"a": "b"}, False)
    assert (echo()["temperature"], echo(temperature=0.0)["temperature"], echo()["store"]) == (1.0, 0.0, True)


def test_items_are_listed_with_ids() -> None:
    call = read(input=[USER, CALL | {"id": "fc_1"}, CALL | {"id": "x" * 65}])
    listed = [json.loads(text) for _, text in call.items]
    assert [name for name, _ in call.items] == [item["id"] for item in listed]
    assert listed[0]["content"] == [{"type": "input_text", "text": "hi"}] and listed[0]["type"] == "message"
    assert listed[1]["id"] == "fc_1" and len(listed[2]["id"]) < 64
    assert all(item["status"] == "completed" for item in listed)


def test_a_call_passes_between_processes() -> None:
    call = read(input=[USER, CALL], instructions="é", tools=[FUNCTION], text={"format": {"type": "json_object"}})
    kind = TypeAdapter(ResponseCall)
    passed = kind.validate_json(kind.dump_json(call))
    spec = replace(passed.parsed.spec, prompts=())
    assert replace(passed, parsed=replace(passed.parsed, spec=spec)) == call


TYPES = ("message", "function", "custom", "function_call", "reasoning", "json_schema", "grammar", "allowed_tools")
WORDS = st.sampled_from((*TYPES, "", "user", "auto", "required", "{}", "\0"))
LEAVES = st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats(allow_nan=False, allow_infinity=False) | WORDS
KEYS = st.sampled_from(
    ("type", "role", "content", "name", "call_id", "arguments", "format", "schema", "tools", "text", "x")
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=8)
FIELDS = st.sampled_from((*ResponsesBody.model_fields, "conversation", "unknown"))


@settings(max_examples=500)
@given(st.dictionaries(FIELDS, VALUES, max_size=4))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        json.loads(f"{{{read(**body).echo}}}")
    except InvalidRequest as e:
        assert e.message
