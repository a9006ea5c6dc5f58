"""Tools and thoughts in chats: the answer is the last message again, so a test writes what the model says."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from diptych.workers.common.request import GrammarKind

from ....support.front import END, Echo, Served, served

TEMPLATE = "{# <tool_call> <think> #}{{ messages[-1].content }}{% if enable_thinking %}<think>{% endif %}"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
SAID = f"<think>\nWhich city?\n</think>\n\nLet me see.\n{CALL}\n{SECOND}"


@pytest.fixture(scope="module")
def it() -> Iterator[Served]:
    with served(Echo(laps=1), template=TEMPLATE) as found:
        yield found


@pytest.fixture(scope="module")
def client(it: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, said: str, **fields: Any) -> Any:
    return client.chat.completions.create(model="echo", messages=[{"role": "user", "content": said}], **fields)


def streamed(client: openai.OpenAI, said: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """Message that a client puts together from chunks, and why it ended."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": []}
    finish = None
    for chunk in ask(client, said, stream=True, **fields):
        [choice] = chunk.choices
        assert finish is None, "nothing follows the end"
        finish = choice.finish_reason
        delta = choice.delta.model_dump(exclude_none=True)
        for name in ("content", "reasoning", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                assert call["function"]["arguments"] == ""
                message["calls"].append(call["function"])
            else:
                assert call["index"] == len(message["calls"]) - 1 and set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                message["calls"][-1]["arguments"] += call["function"]["arguments"]
    assert finish is not None
    return message, finish


def calls_of(message: ChatCompletionMessage) -> list[dict[str, str]]:
    found = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        found.append({"name": call.function.name, "arguments": call.function.arguments})
    return found


def test_thoughts_text_and_calls_come_apart_streamed_and_not(client: openai.OpenAI) -> None:
    answer = ask(client, SAID, tools=[WEATHER, TIME])
    [choice] = answer.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert message.reasoning == message.reasoning_content == "Which city?"
    assert calls_of(message) == [
        {"name": "weather", "arguments": '{"city": "Paris"}'},
        {"name": "time", "arguments": "{}"},
    ]
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2 and all(i.startswith("call_") for i in ids)
    found, finish = streamed(client, SAID, tools=[WEATHER, TIME])
    assert finish == "tool_calls"
    assert (found["content"], found["reasoning"]) == (message.content, message.reasoning)
    assert found["reasoning_content"] == found["reasoning"]
    assert found["calls"] == calls_of(message)


def test_arguments_come_as_the_model_writes_them(client: openai.OpenAI) -> None:
    """A token is a byte here: no two of their characters come together."""
    pieces = [
        call.function.arguments
        for chunk in ask(client, CALL, tools=[WEATHER], stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert pieces == ["", *'{"city": "Paris"}']


def test_an_answer_without_a_call_is_as_without_tools(client: openai.OpenAI) -> None:
    for said in ("Hello", "Hello <tool_call> is a mark", " two spaces  "):
        for fields in ({}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}):
            [choice] = ask(client, said, **fields).choices
            assert (choice.message.content, choice.finish_reason) == (said, "stop")
            assert choice.message.tool_calls is None
    [choice] = ask(client, CALL, tools=[WEATHER], tool_choice="none").choices
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_content_is_null_beside_calls_alone(it: Served) -> None:
    body = {"messages": [{"role": "user", "content": CALL}], "tools": [WEATHER]}
    message = httpx.post(f"{it.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_a_large_body_is_read_in_another_process_with_its_tools(client: openai.OpenAI) -> None:
    [choice] = ask(client, SAID, tools=[WEATHER, TIME], metadata={"a": "x" * 100_000}).choices
    assert [call["name"] for call in calls_of(choice.message)] == ["weather", "time"]


def test_a_call_that_the_length_cut_says_so(client: openai.OpenAI) -> None:
    [choice] = ask(client, CALL, tools=[WEATHER], max_tokens=60).choices
    assert choice.finish_reason == "length"
    assert calls_of(choice.message) == [{"name": "weather", "arguments": '{"city": "Paris'[: 60 - 45]}]


def test_of_calls_that_may_not_be_parallel_only_one_comes(client: openai.OpenAI) -> None:
    [choice] = ask(client, CALL + SECOND, tools=[WEATHER, TIME], parallel_tool_calls=False).choices
    assert [call["name"] for call in calls_of(choice.message)] == ["weather"]
    found, _ = streamed(client, CALL + SECOND, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert [call["name"] for call in found["calls"]] == ["weather"]


def test_older_functions(it: Served, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"functions": [WEATHER["function"]], "function_call": "auto"}
    [choice] = ask(client, CALL, **fields).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call.name == "weather"
    assert choice.message.function_call.arguments == '{"city": "Paris"}'
    deltas = [chunk.choices[0].delta.function_call for chunk in ask(client, CALL, stream=True, **fields)]
    assert "".join(delta.name or "" for delta in deltas if delta) == "weather"
    assert "".join(delta.arguments or "" for delta in deltas if delta) == '{"city": "Paris"}'
    ask(client, CALL, functions=fields["functions"], function_call={"name": "weather"})
    assert it.source.requests[-1].sampling.grammar is not None


def test_a_custom_tool_has_an_input(client: openai.OpenAI) -> None:
    tool = {"type": "custom", "custom": {"name": "sql", "description": "Runs it."}}
    said = '<tool_call>{"name": "sql", "arguments": {"input": "SELECT \\"a\\""}}</tool_call>'
    [choice] = ask(client, said, tools=[tool]).choices
    [call] = choice.message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "sql", 'SELECT "a"')
    pieces = [
        call.model_dump()["custom"]
        for chunk in ask(client, said, tools=[tool], stream=True)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert pieces == [{"name": "sql", "input": ""}, {"input": 'SELECT "a"'}]


@pytest.mark.parametrize(
    ("num", "said"), [(-10, ""), (-3, ""), (0, ""), (2, "SE"), (4, "SEL"), (5, 'SEL"'), (6, 'SEL"E')]
)
def test_the_input_of_a_custom_tool_is_sent_as_far_as_it_goes(client: openai.OpenAI, num: int, said: str) -> None:
    tool = {"type": "custom", "custom": {"name": "sql"}}
    text = '<tool_call>{"name": "sql", "arguments": {"input": "SEL\\"ECT"}}</tool_call>'
    [choice] = ask(client, text, tools=[tool], max_tokens=text.index("SEL") + num).choices
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.custom.input) == ("length", said)


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_leaves_no_mark(it: Served, stream: bool) -> None:
    """Wherever `max_tokens` cuts it: in its first mark, in its head, in its arguments, in its last mark."""
    body = {"messages": [{"role": "user", "content": CALL}], "tools": [WEATHER], "tool_choice": "required"}
    with openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client:
        for num in range(1, len(CALL)):
            asked: Any = body | {"model": "echo", "max_tokens": num, "stream": stream}
            made = client.chat.completions.create(**asked)
            if stream:
                deltas = [chunk.choices[0].delta for chunk in made]
                text, num_calls = "".join(d.content or "" for d in deltas), sum(len(d.tool_calls or ()) for d in deltas)
            else:
                message = made.choices[0].message
                text, num_calls = message.content, len(message.tool_calls)
            assert text == "", num
            assert num_calls > 0 or num <= CALL.index('"arguments"') + len('"arguments": '), num


def test_a_call_that_has_ended_leaves_no_part_of_its_last_mark(it: Served) -> None:
    for cut in range(1, len("</tool_call>")):
        body = {"messages": [{"role": "user", "content": CALL}], "tools": [WEATHER], "max_tokens": len(CALL) - cut}
        [choice] = httpx.post(f"{it.url}/v1/chat/completions", json=body).json()["choices"]
        assert (choice["message"]["content"], len(choice["message"]["tool_calls"])) == (None, 1), cut


def test_forced_calls_have_an_empty_content_and_a_list_of_calls(it: Served) -> None:
    """As vLLM's clients expect it."""
    for said, num in (("Hello", 0), (CALL, 1)):
        body = {"messages": [{"role": "user", "content": said}], "tools": [WEATHER], "max_tokens": 200}
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = httpx.post(f"{it.url}/v1/chat/completions", json=body | {"tool_choice": choice}).json()
            message = answer["choices"][0]["message"]
            assert (message["content"], len(message["tool_calls"])) == ("" if num else said, num)


@pytest.mark.parametrize("hidden", [False, True])
def test_usage_counts_the_tokens_of_thoughts(client: openai.OpenAI, hidden: bool) -> None:
    said, num = "<think>Which city?</think>Paris", len("<think>Which city?")
    extra = {"include_reasoning": not hidden}
    answer = ask(client, said, n=2, extra_body=extra)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * num
    chunks = list(ask(client, said, stream=True, stream_options={"include_usage": True}, extra_body=extra))
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == num
    assert ask(client, "Paris").usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("fields", "reason"), [({}, None), ({"stop": ["x", "tem"]}, "tem"), ({"stop_token_ids": [5, END]}, END)]
)
def test_what_ended_a_choice_is_told(it: Served, fields: dict[str, Any], reason: str | int | None) -> None:
    for said in ("A tempest, yes", f"<think>Hm</think>A tempest, yes{CALL}"):
        chat = {"messages": [{"role": "user", "content": said}], "tools": [WEATHER]}
        for path, asked in (("chat/completions", chat), ("completions", {"prompt": said})):
            body = {**asked, "max_tokens": 200, **fields}
            [choice] = httpx.post(f"{it.url}/v1/{path}", json=body).json()["choices"]
            assert choice["stop_reason"] == reason
            lines = httpx.post(f"{it.url}/v1/{path}", json=body | {"stream": True}).text.split("\n\n")
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            assert chunks[-1]["choices"][0]["stop_reason"] == reason
            assert all("stop_reason" not in chunk["choices"][0] for chunk in chunks[:-1])


def test_halves_of_characters_in_a_call_do_not_end_the_answer(it: Served) -> None:
    said = '<tool_call>{"name": "\\ud800", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>'
    body = {"messages": [{"role": "user", "content": said}], "tools": [WEATHER], "max_tokens": 200}
    message = httpx.post(f"{it.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "\ufffd", "arguments": '{"a": "\ufffd"}'}
    streamed = httpx.post(f"{it.url}/v1/chat/completions", json=body | {"stream": True}).text
    assert "error" not in streamed and streamed.endswith("data: [DONE]\n\n")
    tool = {"type": "custom", "custom": {"name": "sql"}}
    said = '<tool_call>{"name": "sql", "arguments": {"input": "\\ud83d\\ude00\\ud83d"}}</tool_call>'
    body |= {"messages": [{"role": "user", "content": said}], "tools": [tool]}
    message = httpx.post(f"{it.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["custom"]["input"] == "😀\ufffd"


def test_a_call_in_an_open_thought_is_one(client: openai.OpenAI) -> None:
    said = f"<think>I call it.\n{CALL}"
    [choice] = ask(client, said, tools=[WEATHER]).choices
    assert (choice.finish_reason, choice.message.reasoning) == ("tool_calls", "I call it.")
    assert calls_of(choice.message) == [{"name": "weather", "arguments": '{"city": "Paris"}'}]
    found, finish = streamed(client, said, tools=[WEATHER])
    assert (finish, found["calls"]) == ("tool_calls", calls_of(choice.message))


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, True),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}}},
            True,
        ),
        ({"parallel_tool_calls": False}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tool_choice": "none"}, False),
    ],
)
def test_calls_follow_a_grammar_where_the_client_wants_them(
    it: Served, client: openai.OpenAI, fields: dict[str, Any], constrained: bool
) -> None:
    ask(client, "Hello", tools=[WEATHER, TIME], **fields)
    grammar = it.source.requests[-1].sampling.grammar
    assert (grammar is not None) == constrained
    if grammar is not None:
        assert grammar.kind is GrammarKind.GRAMMAR
        is_only_time = isinstance(fields.get("tool_choice"), dict)
        assert ("weather" in grammar.text) == (not is_only_time)


def test_a_strict_tool_follows_its_schema(it: Served, client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    ask(client, "Hello", tools=[strict])
    grammar = it.source.requests[-1].sampling.grammar
    assert grammar is not None and '"city"' in grammar.text and "lenient" not in grammar.text


def test_a_schema_that_cannot_be_enforced_is_refused_by_name(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {"type": "string"}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hello", tools=[tool])
    assert caught.value.code == "invalid_grammar" and caught.value.param == "tools"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "date"}}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TIME], "functions": [TIME["function"]]}, "functions"),
        ({"functions": [TIME["function"]], "function_call": {"name": "date"}}, "function_call"),
    ],
)
def test_wrong_tools_are_refused_by_name(it: Served, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
    answer = httpx.post(f"{it.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_model_without_a_known_format_refuses_tools() -> None:
    with served(Echo(laps=1)) as plain:
        body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [TIME]}
        answer = httpx.post(f"{plain.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "router.tool_parser" in answer.json()["error"]["message"]
        assert httpx.post(f"{plain.url}/v1/chat/completions", json=body | {"tool_choice": "none"}).is_success


def test_thoughts_can_be_left_out_or_left_in(client: openai.OpenAI) -> None:
    said = "<think>Hm</think>Yes"
    [choice] = ask(client, said, extra_body={"include_reasoning": False}).choices
    assert choice.message.content == "Yes" and not hasattr(choice.message, "reasoning")
    [choice] = ask(client, said, extra_body={"separate_reasoning": False}).choices
    assert choice.message.content == said
    found, _ = streamed(client, said, extra_body={"include_reasoning": False})
    assert (found["content"], found["reasoning"]) == ("Yes", "")


def test_a_thought_that_the_prompt_begins_is_one(client: openai.OpenAI) -> None:
    said = "Hm</think>Yes"
    [choice] = ask(client, said, extra_body={"chat_template_kwargs": {"enable_thinking": True}}).choices
    assert choice.message.reasoning == "Hm" and choice.message.content.startswith("Yes")
    [choice] = ask(client, said, reasoning_effort="high").choices
    assert choice.message.reasoning == "Hm"
    assert ask(client, said).choices[0].message.content == said


def test_usage_logprobs_token_ids_and_n_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    answer = ask(client, SAID, tools=[WEATHER, TIME], n=2, logprobs=True, extra_body=extra)
    for choice in answer.choices:
        assert len(calls_of(choice.message)) == 2
        assert bytes(i for i in choice.token_ids if i < 256).decode() == SAID
        assert len(choice.logprobs.content) == len(choice.token_ids)
    chunks = list(ask(client, SAID, tools=[WEATHER, TIME], stream=True, logprobs=True, extra_body=extra))
    ids = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", None) or ()]
    assert ids == answer.choices[0].token_ids
    entries = [e for chunk in chunks for e in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())]
    assert len(entries) == len(ids)


def test_earlier_calls_are_shown_to_the_template() -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "sql", "input": "x"}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "time", "arguments": "{}"}},
        {"role": "function", "name": "time", "content": "noon"},
    ]
    source = Echo(laps=1)
    source.context = 4096
    with served(source, template="{{ messages | tojson }}") as plain:
        body = {"messages": messages}
        shown = httpx.post(f"{plain.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    _, custom, function, _ = json.loads(shown)
    assert custom["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "sql", "arguments": {"input": "x"}}}
    ]
    assert function["tool_calls"] == [{"type": "function", "function": {"name": "time", "arguments": {}}}]
