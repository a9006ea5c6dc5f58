"""Anthropic's API with its official client: the answer is the last message again: a test writes what the model says."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx
import pytest

from diptych.cluster.front.answer_plan import AskedBudget
from diptych.cluster.front.anthropic.body import CountBody, MessagesBody
from diptych.cluster.tokens.prompt_encoding import ChatPrompt
from diptych.workers.common.errors import Overloaded

from ....support.front import CONTEXT, Echo, Served, served

TEMPLATE = "{# <tool_call> <think> #}{{ messages[-1].content }}"
SHOWING = (
    "{# <tool_call> <think> #}{{ messages | tojson }}{{ tools | tojson }}{{ enable_thinking }}{{ reasoning_effort }}"
)
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = f"<think>\nWhich city?\n</think>\n\nLet me see.\n{CALL}"
LACKING: list[tuple[dict[str, Any], str]] = [  # blocks of the assistant, and what they lack
    ({"type": "tool_use", "id": "1", "name": "weather"}, "input"),
    ({"type": "tool_use", "id": "", "name": "weather", "input": {}}, "id"),
    ({"type": "tool_use", "id": "1", "name": "", "input": {}}, "name"),
    ({"type": "redacted_thinking"}, "data"),
]
CACHED = 3  # tokens of a prompt, as Echo says
ASK: dict[str, Any] = {"model": "echo", "max_tokens": 200}


@pytest.fixture(scope="module")
def it() -> Iterator[Served]:
    with served(Echo(laps=1), template=TEMPLATE) as found:
        yield found


@pytest.fixture(scope="module")
def client(it: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=it.url, api_key="none", max_retries=0) as found:
        yield found


def user(said: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": said}]


def _assistants(block: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [block]}, *user("a")]


def test_its_client_reads_the_models(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert (page.first_id, page.last_id, page.has_more) == ("echo", "echo", False)
    (model,) = page.data
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == ("echo", "model", "echo", CONTEXT)
    assert 0 <= (datetime.now(UTC) - model.created_at).total_seconds() < 86400
    assert client.models.retrieve("echo").model_dump() == model.model_dump()


def message(client: anthropic.Anthropic, said: str, *, stream: bool, **fields: Any) -> Any:
    """Whole answer; of a stream, as the client's own library puts it together."""
    ask: dict[str, Any] = ASK | {"messages": user(said)} | fields
    if not stream:
        return client.messages.create(**ask)
    with client.messages.stream(**ask) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_text(client: anthropic.Anthropic, stream: bool) -> None:
    found = message(client, "Grüße 🎉", stream=stream)
    assert (found.type, found.role, found.model) == ("message", "assistant", "echo")
    assert found.id.startswith("msg_")
    [block] = found.content
    assert (block.type, block.text) == ("text", "Grüße 🎉")
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    num = len("Grüße 🎉".encode())
    usage = found.usage
    assert usage.cache_read_input_tokens == CACHED and usage.cache_creation_input_tokens == 0
    assert (usage.input_tokens + CACHED, usage.output_tokens) == (num, num + 1)


def test_what_a_prompt_added_to_the_cache_is_counted_apart(
    it: Served, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first event of a stream has all of the prompt, as with vLLM; the last one divides it."""
    monkeypatch.setattr(it.source, "num_stored", 8)
    asked: dict[str, Any] = ASK | {"messages": user("Hello, world!")}
    whole = client.messages.create(**asked).usage
    events = list(client.messages.create(**asked, stream=True))
    assert isinstance(events[0], anthropic.types.RawMessageStartEvent)
    assert isinstance(events[-2], anthropic.types.RawMessageDeltaEvent)
    for usage in (whole, events[-2].usage):
        counted = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
        assert counted == (len("Hello, world!") - 11, CACHED, 8)
    first = events[0].message.usage
    counted = (first.input_tokens, first.cache_read_input_tokens, first.cache_creation_input_tokens)
    assert counted == (len("Hello, world!"), None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_text_and_calls_are_blocks(client: anthropic.Anthropic, stream: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    found = message(client, SAID, stream=stream, tools=[WEATHER], thinking=thinking)
    thought, text, call = found.content
    assert (thought.type, thought.thinking) == ("thinking", "Which city?")
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
    assert call.id and found.stop_reason == "tool_use"


def test_a_budget_of_the_thought(client: anthropic.Anthropic) -> None:
    """A model whose marks are several tokens takes no notice of one; a negative one is refused."""
    thinking: dict[str, Any] = {"type": "enabled", "budget_tokens": 3}
    assert message(client, SAID, stream=False, thinking=thinking).content[0].thinking == "Which city?"
    body = MessagesBody.model_validate(ASK | {"messages": user("x"), "thinking": thinking})
    assert body.call().spec.thought == AskedBudget(3, "thinking.budget_tokens", is_hint=True)
    with pytest.raises(anthropic.BadRequestError, match=r"thinking\.budget_tokens must be at least 0"):
        message(client, SAID, stream=False, thinking=thinking | {"budget_tokens": -1})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_thoughts_come_only_where_they_are_asked_for(client: anthropic.Anthropic, stream: bool, thinking: Any) -> None:
    fields = {} if thinking is None else {"thinking": thinking}
    found = message(client, SAID, stream=stream, tools=[WEATHER], **fields)
    assert [block.type for block in found.content] == ["text", "tool_use"]


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ends(client: anthropic.Anthropic, stream: bool) -> None:
    found = message(client, "one two three", stream=stream, max_tokens=5)
    assert (found.stop_reason, found.content[0].text) == ("max_tokens", "one t")
    found = message(client, "one two three", stream=stream, stop_sequences=["six", " th"])
    assert (found.stop_reason, found.stop_sequence, found.content[0].text) == ("stop_sequence", " th", "one two")
    cut = message(client, CALL, stream=stream, tools=[WEATHER], max_tokens=60)
    assert cut.stop_reason == "max_tokens" and cut.content[0].type == "tool_use"


def test_events_come_in_order(client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = ASK | {"messages": user(SAID), "tools": [WEATHER], "thinking": {"type": "adaptive"}}
    kinds: list[str] = []
    indices: list[int] = []
    for event in client.messages.create(**ask, stream=True):
        if event.type == "content_block_delta":
            name = event.delta.type
            assert event.index == indices[-1]
        else:
            name = event.type
        if event.type == "content_block_start":
            indices.append(event.index)
        if not kinds or kinds[-1] != name:
            kinds.append(name)
    assert indices == [0, 1, 2]
    block = ("content_block_start", "content_block_stop")
    expected = ["message_start"]
    for kind in ("thinking_delta", "text_delta", "input_json_delta"):
        expected += [block[0], kind, block[1]]
    assert kinds == [*expected, "message_delta", "message_stop"]
    raw = httpx.post(f"{client.base_url}/v1/messages", json=ASK | {"messages": user("a"), "stream": True}).text
    assert [line for line in raw.splitlines() if line.startswith("event: ")][:2] == [
        "event: message_start",
        "event: ping",
    ]
    usages = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ") and "usage" in line]
    begin, end = usages[0]["message"]["usage"]["output_tokens"], usages[-1]["usage"]["output_tokens"]
    assert (begin, end) == (0, 2), "none is sent before the first block"


def test_a_conversation_reaches_the_template() -> None:
    source = Echo(laps=1)
    source.context = 4096
    conversation = [
        *user([{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "x"},
                {"type": "text", "text": "Wait"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        *user(
            [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "c0", "content": "no", "is_error": True},
                {"type": "text", "text": "And?"},
            ]
        ),
    ]
    ask: dict[str, Any] = {
        "model": "echo",
        "messages": conversation,
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
    }
    with served(source, template=SHOWING) as it, anthropic.Anthropic(base_url=it.url, api_key="none") as other:
        num = other.messages.count_tokens(**ask).input_tokens
        large = other.messages.count_tokens(**ask, extra_body={"metadata": "x" * 70_000}).input_tokens
        found: Any = other.messages.create(**ask, max_tokens=3000)
    assert num == large == found.usage.input_tokens + CACHED == len(source.requests[-1].prompt_token_ids)
    [block] = found.content
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    function = {"name": "weather", "description": "of a city", "parameters": WEATHER["input_schema"]}
    decoder = json.JSONDecoder()
    messages, end = decoder.raw_decode(block.text)
    tools, end = decoder.raw_decode(block.text, end)
    assert block.text[end:] == "Falselow"
    assert messages == [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Wait", "tool_calls": [call], "reasoning": "Hm", "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"},
        {"role": "tool", "tool_call_id": "c0", "content": "Error: no"},
        {"role": "user", "content": "And?"},
    ]
    assert tools == [{"type": "function", "function": function}]


def test_choices_of_tools_and_formats_become_grammars(it: Served, client: anthropic.Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        message(client, CALL, stream=False, tools=[WEATHER], tool_choice=choice)
        assert it.source.requests[-1].sampling.grammar is not None
    message(client, CALL, stream=False, tools=[WEATHER], tool_choice={"type": "auto"})
    assert it.source.requests[-1].sampling.grammar is None
    two = message(
        client,
        CALL + CALL,
        stream=False,
        tools=[WEATHER],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.type for block in two.content] == ["tool_use"]
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    message(client, "{}", stream=False, output_config=config)
    assert it.source.requests[-1].sampling.grammar is not None


def test_a_large_body_is_read_in_another_process(client: anthropic.Anthropic) -> None:
    found = message(client, SAID, stream=False, tools=[WEATHER], metadata={"user_id": "x" * 100_000})
    assert [block.type for block in found.content] == ["text", "tool_use"]


def test_a_conversation_beyond_the_context_is_counted(client: anthropic.Anthropic) -> None:
    for size in (10, 70_000):
        ask: Any = {"messages": user("x" * (CONTEXT + 1)), "extra_body": {"metadata": "x" * size}}
        assert client.messages.count_tokens(model="echo", **ask).input_tokens == CONTEXT + 1


@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_the_context_has_end_with_it(stream: bool) -> None:
    with served(Echo(), template=TEMPLATE) as it, anthropic.Anthropic(base_url=it.url, api_key="none") as client:
        found = message(client, "ab", stream=stream, max_tokens=2 * CONTEXT)
        assert (found.stop_reason, found.usage.output_tokens) == ("model_context_window_exceeded", CONTEXT - 2)
        assert message(client, "ab", stream=stream, max_tokens=CONTEXT - 2).stop_reason == "max_tokens"


def test_a_billing_header_is_left_out() -> None:
    """It differs from call to call, so that no cached prefix would be found."""
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b;"}
    text = {"type": "text", "text": "Be brief."}
    with served(Echo(laps=1), template=SHOWING) as it, anthropic.Anthropic(base_url=it.url, api_key="none") as client:
        for system, kept in (
            ([header, text], ["Be brief."]),
            ([header], []),
            (header["text"], []),
            (f"{header['text']}\nBe brief.", ["Be brief."]),
        ):
            ask: dict[str, Any] = ASK | {"messages": [*user("a"), {"role": "system", "content": [header]}, *user("b")]}
            client.messages.create(**ask, system=system)  # type: ignore[arg-type]
            shown = bytes(t for t in it.source.requests[-1].prompt_token_ids if t < 256).decode()
            found = json.loads(shown.partition("]")[0] + "]")
            assert [m["content"] for m in found if m["role"] == "system"] == kept and len(found) == 2 + len(kept)


def test_options_of_the_template_are_passed_to_it() -> None:
    fields: dict[str, Any] = {"messages": user("x"), "thinking": {"type": "adaptive"}}
    options = {"enable_thinking": False, "style": "brief"}
    for kind in (MessagesBody, CountBody):
        [prompt] = kind.model_validate(ASK | fields | {"chat_template_kwargs": options}).call().spec.prompts
        assert isinstance(prompt, ChatPrompt) and prompt.template_options == options


def test_a_salt_separates_cached_prefixes(it: Served) -> None:
    for fields, salt in (({}, b""), ({"cache_salt": "Ann"}, b"Ann")):
        assert httpx.post(f"{it.url}/v1/messages", json=ASK | {"messages": user("a")} | fields).status_code == 200
        assert it.source.requests[-1].cache_salt == salt


def nested(depth: int) -> Any:
    """Content of blocks within blocks."""
    content: Any = "a"
    for _ in range(depth):
        content = [{"type": "tool_result", "tool_use_id": "c", "content": content}]
    return content


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": user([{"type": "image", "source": {}}])}, "messages[0].content[0].type"),
        ({"messages": user([{"type": "tool_result", "content": "a"}])}, "messages[0].content[0].tool_use_id"),
        ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text"),
        ({"messages": user(nested(60))}, "messages[0].content[0].content[0].type"),
        ({"messages": user(nested(250))}, "not valid JSON"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "deep"}}, "thinking"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": "5"}, "top_k"),
        ({"stop_sequences": ["x"] * 17}, "stop strings"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"container": "c"}, "container"),
        ({"compaction": {"type": "summary"}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"cache_salt": ""}, "cache_salt"),
        *(({"messages": _assistants(block)}, f"messages[0].content[0].{field}") for block, field in LACKING),
    ],
)
def test_what_is_wrong_is_named(it: Served, fields: dict[str, Any], named: str) -> None:
    body = {name: value for name, value in (ASK | {"messages": user("a")} | fields).items() if value is not None}
    answer = httpx.post(f"{it.url}/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]
    assert error["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_tool_runner_goes_on_without_a_thread(client: anthropic.Anthropic, stream: bool) -> None:
    """It asks the server to hold the conversation, until the server says that it cannot."""
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "rain"

    runner: Any = client.beta.messages.tool_runner(**ASK, messages=user(CALL), tools=[weather], stream=stream)
    answers = [each.get_final_message() if stream else each for each in runner]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
    assert asked == ["Paris"] and answers[-1].content[0].text == "rain"


def test_errors_have_anthropics_form() -> None:
    source = Echo(laps=1)
    with served(source, api_key="secret-key") as it:
        with anthropic.Anthropic(base_url=it.url, api_key="secret-key", max_retries=0) as client:
            assert message(client, "a", stream=False).content  # by x-api-key
            with pytest.raises(anthropic.NotFoundError):
                message(client, "a", stream=False, model="gpt-9")
            source.admit_error = Overloaded("full: try again", retry_after_s=2.5)
            with pytest.raises(anthropic.RateLimitError) as raised:
                message(client, "a", stream=False)
            assert raised.value.response.headers["retry-after"] == "3"
            source.admit_error = None
            source.fail = lambda made: Overloaded("full: try again") if made == 2 else None
            with pytest.raises(anthropic.APIStatusError, match="full"):
                message(client, "abcdef", stream=True)
        with anthropic.Anthropic(base_url=it.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                message(client, "a", stream=False)
            assert refused.value.response.json()["error"]["type"] == "authentication_error"
        with anthropic.Anthropic(base_url=it.url, auth_token="secret-key", max_retries=0) as client:
            source.fail = lambda _: None
            assert message(client, "a", stream=False).content
