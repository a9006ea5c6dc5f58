"""JSON to GenerationSpec: served fields, ignored fields, and the errors for invalid ones."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.cluster.front.answer_plan import AskedBudget
from diptych.cluster.front.openai.types import ChatBody, CompletionBody, parse
from diptych.cluster.tokens.prompt_encoding import ChatPrompt
from diptych.workers.common.errors import InvalidRequest
from diptych.workers.common.request import SamplingParams

USER = [{"role": "user", "content": "hi"}]
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def calling(arguments: object) -> dict[str, Any]:
    """An assistant's turn that is one call of a tool."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [CALL | {"function": function}]}


def completion(**body: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"prompt": "x"} | body).encode())


def chat(**body: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": USER} | body).encode())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        ([], []),
        ([[]], [()]),
    ],
)
def test_the_four_kinds_of_prompt(prompt: object, prompts: list[object]) -> None:
    assert list(completion(prompt=prompt).call().spec.prompts) == prompts


def test_defaults_are_openais() -> None:
    spec = completion().call().spec
    assert spec.sampling == SamplingParams()
    assert (spec.n, spec.stop, spec.seed, spec.max_tokens, spec.default_max_tokens) == (1, (), None, None, 16)
    assert chat().call().spec.default_max_tokens is None


def test_sampling_parameters() -> None:
    spec = chat(
        temperature=0, top_p=0.5, presence_penalty=1, frequency_penalty=-1, logit_bias={"5": -100, "6": 1.5}, seed=-3,
        n=2, stop="x", top_k=4, min_p=0.1, repetition_penalty=1.2, min_tokens=2, stop_token_ids=[7], ignore_eos=True,
        logprobs=True, top_logprobs=3, timeout_s=4.5, model="m", cache_salt="Ann",
    ).call().spec  # fmt: skip
    assert spec.sampling == SamplingParams(
        temperature=0, top_k=4, top_p=0.5, min_p=0.1, repetition_penalty=1.2, presence_penalty=1, frequency_penalty=-1,
        logit_bias={5: -100.0, 6: 1.5}, min_tokens=2, stop_token_ids=(7,), ignore_eos=True, logprobs=3,
    )  # fmt: skip
    assert (spec.n, spec.stop, spec.seed, spec.timeout_s, spec.model) == (2, ("x",), -3, 4.5, "m")
    assert (spec.cache_salt, completion(cache_salt="Bob").call().spec.cache_salt) == ("Ann", "Bob")


def test_null_means_not_given() -> None:
    names = [name for name in ChatBody.model_fields if name != "messages"]
    assert chat(**dict.fromkeys(names)).call().spec == chat().call().spec


@pytest.mark.parametrize("top_k", [0, -1, None])
def test_top_k_off(top_k: int | None) -> None:
    assert completion(top_k=top_k).call().spec.sampling.top_k == 0


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5).call().spec.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).call().spec.max_tokens == 7


def test_messages() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
    ]
    (prompt,) = chat(messages=messages, chat_template_kwargs={"enable_thinking": False}).call().spec.prompts
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": "c"},
    ]
    assert prompt.template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "no"), ("", "no"), ("well", "well\nno"), ([{"type": "text", "text": "a"}], "a\nno")],
)
def test_a_refusal_is_text_of_the_assistant(content: object, expected: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content, "refusal": "no"}, *USER]
    (prompt,) = chat(messages=messages).call().spec.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == {"role": "assistant", "content": expected}


def test_a_thought_alone_is_a_turn_of_the_assistant() -> None:
    messages = [*USER, {"role": "assistant", "content": None, "reasoning": "hm"}, *USER]
    (prompt,) = chat(messages=messages).call().spec.prompts
    assert isinstance(prompt, ChatPrompt)
    expected = {"role": "assistant", "content": "", "reasoning": "hm", "reasoning_content": "hm"}
    assert prompt.messages[1] == expected


def test_histories_with_tool_calls() -> None:
    turns = [calling('{"city": "Bonn", "days": [1]}'), calling(""), calling({"a": 1}), calling(None)]
    messages = [*USER, *turns, {"role": "tool", "tool_call_id": "c1", "content": "sun"}]
    (prompt,) = chat(messages=messages).call().spec.prompts
    assert isinstance(prompt, ChatPrompt)
    *_, answer = prompt.messages
    calls = [m["tool_calls"] for m in prompt.messages if m["role"] == "assistant"]
    expected: list[object] = [{"city": "Bonn", "days": [1]}, {}, {"a": 1}, {}]
    assert calls == [[CALL | {"function": {"name": "f", "arguments": arguments}}] for arguments in expected]
    assert prompt.messages[1]["content"] == ""
    assert answer == {"role": "tool", "tool_call_id": "c1", "content": "sun"}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"city": "Bonn", "days": [1, 2', {"city": "Bonn", "days": [1, 2]}),
        ('{"city": "Bo', {"city": "Bo"}),
        ('{"city": "Bonn", "da', {"city": "Bonn"}),
        ("{", {}),
        ("{city: Bonn}", {}),
        ("[" * 100_000, {}),
        ('{"heat": NaN}', {}),
    ],
)
def test_a_call_may_be_sent_back_as_the_model_wrote_it(written: str, read: dict[str, Any]) -> None:
    (prompt,) = chat(messages=[*USER, calling(written), {"role": "tool", "content": "no"}]).call().spec.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1]["tool_calls"] == [CALL | {"function": {"name": "f", "arguments": read}}]


def test_other_parts_and_fields_of_histories() -> None:
    messages = [
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning_content": "hm"},
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [],
            "audio": None,
            "annotations": [],
            "function_call": None,
        },
    ]
    call = chat(messages=messages).call()
    (prompt,) = call.spec.prompts
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == [
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": "no", "reasoning": "hm", "reasoning_content": "hm"},
        {"role": "assistant", "content": "x"},
    ]
    assert call.unknown == ()


def test_tools_that_are_not_called_are_shown_to_the_template() -> None:
    function = {"parameters": {"type": "object"}, "description": None, "name": "f", "strict": True}
    call = chat(tools=[{"function": function, "type": "function"}], tool_choice="none").call()
    (prompt,) = call.spec.prompts
    assert isinstance(prompt, ChatPrompt)
    (tool,) = prompt.tools
    # In the order that templates print, whatever the client's.
    assert json.dumps(tool) == json.dumps(
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    )


def test_the_effort_of_reasoning_is_told_to_the_template() -> None:
    def options(**body: Any) -> object:
        (prompt,) = chat(**body).call().spec.prompts
        assert isinstance(prompt, ChatPrompt)
        return prompt.template_options

    assert options() == {}
    assert options(reasoning_effort="high") == {"reasoning_effort": "high", "enable_thinking": True}
    assert options(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    given = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    assert options(**given) == {"reasoning_effort": "none", "enable_thinking": True}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_token_budget": 0}, AskedBudget(0, "thinking_token_budget")),
        ({"thinking_budget": 7}, AskedBudget(7, "thinking_budget")),
        ({"custom_params": {}}, None),
        ({"custom_params": {"thinking_budget": 7}}, AskedBudget(7, "custom_params.thinking_budget")),
    ],
)
def test_the_names_of_a_thoughts_budget(body: dict[str, Any], expected: AskedBudget | None) -> None:
    assert chat(**body).call().spec.thought == expected


def test_what_nobody_knows_is_ignored_and_what_does_no_harm_accepted() -> None:
    harmless = {"user": "me", "store": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    assert chat(**harmless, frobnicate={"a": [1]}, modalities=["text"]).call().spec == chat().call().spec
    assert completion(suffix=None, best_of=2, n=2).call().spec == completion(n=2).call().spec


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"cache_salt": ""}, "cache_salt", "non-empty"),
        ({"prompt_token_ids": [1, 5]}, "prompt_token_ids", "not supported"),
        ({"cache_salt": 5}, "cache_salt", "string"),
        ({"best_of": 2}, "best_of", "not supported beyond n"),
        ({"echo": True, "logprobs": 21}, "logprobs", "must be in"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=false"),
        ({"use_beam_search": True, "stream": True}, "stream", "stream=false"),
        ({"early_stopping": True}, "early_stopping", "not supported"),
        ({"length_penalty": 0.5}, "length_penalty", "needs use_beam_search"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        ({"prompt": 5}, "prompt", "must be a string, an array of strings, an array of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "must be"),
        ({"prompt": [True]}, "prompt", "must be"),
        ({"prompt": [1.5]}, "prompt", "must be"),
        ({"prompt": None}, "prompt", "must be"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"top_p": float("inf")}, "top_p", "finite"),
        ({"n": 1.0}, "n", "valid integer"),
        ({"n": "1"}, "n", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"seed": 1 << 64}, "seed", "less than"),
        ({"seed": -(1 << 63) - 1}, "seed", "greater than"),
        ({"stop": [1]}, "stop", "a string or an array of strings"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "object of token ids"),
        ({"logit_bias": {"1": 1, "bad 1": 1, "2": "x", "b\n": 0}}, "logit_bias", "but is not at bad%201, 2, b%0A$"),
        ({"logit_bias": {f"k{i}": 1 for i in range(40)}}, "logit_bias", "k15 and 24 more$"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "object of token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "object of token ids"),
        ({"logit_bias": {"1": True}}, "logit_bias", "object of token ids"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias", r"in \[-100, 100\]"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias", r"in \[-100, 100\]"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ({"logit_bias": [1]}, "logit_bias", "object of token ids"),
        ({"stream_options": 5, "stream": True}, "stream_options", "stream_options"),
        ({"model": 5}, "model", "valid string"),
    ],
)
def test_what_is_wrong_with_a_completion_is_named(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        completion(**body).call()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "names no tool"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "a string or an object"),
        ({"tools": [{"type": "custom"}], "tool_choice": "none"}, "tools[0].custom", "required"),
        ({"tools": [{"type": "other"}]}, "tools[0].type", "'function' or 'custom'"),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "'high'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"thinking_token_budget": 1, "thinking_budget": 2}, "thinking_budget", "mean the same"),
        ({"thinking_token_budget": True}, "thinking_token_budget", "valid integer"),
        ({"custom_params": {"thinking_budget": "7"}}, "custom_params.thinking_budget", "valid integer"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor", "not supported"),
        ({"functions": [{}]}, "functions[0].name", "required"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"chat_template": "{{ x }}"}, "chat_template", "not supported"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude each"),
        ({"messages": [calling("{}")], "continue_final_message": True}, "continue_final_message", "calls tools"),
        ({"echo": True}, "echo", "send continue_final_message"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
        ({"truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", r"in \[0, 20\], got 21"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", r"in \[0, 20\], got -1"),
        ({"logprobs": 5}, "logprobs", "valid boolean"),
        ({"messages": "hi"}, "messages", "valid array"),
        ({"messages": [5]}, "messages[0]", "object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "string"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content", "messages"),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]}, "messages[0].tool_calls", "assistant"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "messages[0].tool_calls[0]", "obj"),
        ({"messages": [calling(5)]}, "messages[0].tool_calls[0].function.arguments", "string"),
        ({"messages": [{**USER[0], "refusal": "no"}]}, "messages[0].refusal", "not supported"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "missing"),
    ],
)
def test_what_is_wrong_with_a_chat_is_named(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        chat(**body).call()
    assert caught.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": "\\ud800"}', b"\xff\xfe", b"nan", b"[" * 100_000, b'"a" "b"'])
def test_what_is_no_json(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse(CompletionBody, body)


@pytest.mark.parametrize("body", [b"5", b"null", b"[]", b'"prompt"', b"NaN"])
def test_what_is_no_object(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        parse(CompletionBody, body)


@pytest.mark.parametrize(("kind", "param"), [(CompletionBody, "prompt"), (ChatBody, "messages")])
def test_what_is_missing(kind: type[CompletionBody], param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{param} is missing") as caught:
        parse(kind, b"{}")
    assert caught.value.param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from([CompletionBody, ChatBody]))
def test_any_values_are_understood_or_refused(data: st.DataObject, kind: type[CompletionBody]) -> None:
    names = [*kind.model_fields, "tools", "response_format", "suffix", "audio", "unheard_of"]
    body = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=4))
    try:
        parse(kind, json.dumps({"prompt": "x", "messages": USER} | body).encode()).call()
    except InvalidRequest as e:
        assert e.message
