"""The Responses API on a real socket, with the official client. The model repeats its prompt."""

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from diptych.cluster.front.access.key_file import KeyFile
from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.http.edge import AccessPolicy
from diptych.workers.common.errors import Overloaded, Unavailable

from ....support.front import Echo, Served, served
from .events import assert_order

# The roles are not shown, so that the answer has thoughts and calls where its prompt has.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{# <think></think> <tool_call></tool_call> #}"
)
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
NOTE: Any = {"type": "custom", "name": "note", "description": "takes a note"}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
NOTED = '<tool_call>{"name": "note", "arguments": {"input": "hé"}}</tool_call>'
LONG = 300  # tokens, within the context


@pytest.fixture
def server() -> Generator[Served]:
    with served(Echo(laps=1), template=TEMPLATE) as it:
        yield it


def create(client: openai.OpenAI, **body: Any) -> Response:
    """Response that OpenAI's types accept, and that is the same where it is streamed."""
    whole = client.responses.create(model="echo", **body)
    Response.model_validate(whole.model_dump(by_alias=True, warnings=False))
    events = stream(client, **body)
    last: Any = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert comparable(last.response) == comparable(whole)
    return whole


def stream(client: openai.OpenAI, **body: Any) -> list[ResponseStreamEvent]:
    events = list(client.responses.create(model="echo", stream=True, **body))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump(by_alias=True, warnings=False))
    assert_order([event.model_dump(by_alias=True, warnings=False) for event in events])
    return events


def comparable(response: Response) -> Any:
    """`response` without ids and times."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: cut(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "completed_at")}
        return [cut(each) for each in value] if isinstance(value, list) else value

    return cut(response.model_dump(by_alias=True, warnings=False))


def prompts(server: Served) -> list[str]:
    return [bytes(t for t in r.prompt_token_ids if t < 256).decode() for r in server.source.requests]


def test_a_text(client: openai.OpenAI) -> None:
    answer = create(client, input="héllo", metadata={"a": "b"}, user="Ann")
    assert answer.id.startswith("resp_") and (answer.status, answer.error, answer.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert answer.output_text == "héllo" and len(answer.output) == 1
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (6, 7, 13)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.completed_at is not None and answer.completed_at >= answer.created_at
    echo = (answer.metadata, answer.user, answer.temperature, answer.service_tier, answer.truncation, answer.background)
    assert echo == ({"a": "b"}, "Ann", 1.0, "default", "disabled", False)


def test_an_answer_that_max_output_tokens_cuts_is_incomplete(client: openai.OpenAI) -> None:
    answer = create(client, input="hello", max_output_tokens=3)
    assert (answer.status, answer.output_text, answer.completed_at) == ("incomplete", "hel", None)
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    [message] = answer.output
    assert message.type == "message" and message.status == "incomplete"


def test_an_answer_without_text_has_an_empty_message(client: openai.OpenAI, server: Served) -> None:
    server.source.laps = 0
    [message] = create(client, input="hello").output
    assert message.type == "message" and (message.content[0].type, message.status) == ("output_text", "completed")


def test_thoughts_text_and_calls_are_items(client: openai.OpenAI) -> None:
    answer = create(client, input=f"<think>hm</think>so{CALL}{NOTED}", tools=[WEATHER, NOTE])
    thought, message, call, note = answer.output
    assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "hm"
    assert message.type == "message" and answer.output_text == "so"
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"})
    assert note.type == "custom_tool_call" and (note.name, note.input) == ("note", "hé")
    assert call.call_id != note.call_id and answer.status == "completed"
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == len("<think>hm")
    assert [tool.type for tool in answer.tools] == ["function", "custom"]


def test_a_call_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    answer = create(client, input=CALL, tools=[WEATHER], max_output_tokens=50)
    [call] = answer.output
    assert call.type == "function_call" and call.status == "incomplete" and '{"city"'.startswith(call.arguments[:5])


def test_the_clients_own_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="echo", input=f"hi{CALL}", tools=[WEATHER]) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        final = events.get_final_response()
    assert text == final.output_text == "hi"
    assert final.output[1].type == "function_call" and final.output[1].arguments == '{"city": "Ulm"}'


def test_log_probabilities(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer = create(client, input="aé", include=include, top_logprobs=2)
    [message] = answer.output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    assert [each.logprob for each in logprobs] == [-0.97, -1.95, -1.69, -2.56]
    assert (logprobs[0].token, logprobs[0].bytes) == ("a", [97])
    assert [(top.token, top.logprob) for top in logprobs[0].top_logprobs] == [("a", -0.97), ("b", -0.98)]
    deltas = [e for e in stream(client, input="aé", include=include) if e.type == "response.output_text.delta"]
    assert [len(delta.logprobs) for delta in deltas] == [1, 2, 1]


def test_log_probabilities_of_thoughts_and_calls_are_left_out(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer = create(client, input=f"<think>hm</think>so{CALL}", tools=[WEATHER], include=include)
    [message] = [item for item in answer.output if item.type == "message"]
    assert message.content[0].type == "output_text"
    assert "".join(each.token for each in message.content[0].logprobs or []).endswith("so")


def test_items_become_the_conversation(client: openai.OpenAI, server: Served) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "[u]"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "[o]"},
    ]
    create(client, input=items, instructions="[s]", tools=[WEATHER])
    call = '[{"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"a": 1}}}]'
    assert prompts(server)[0] == f"[s][u]{call}[o]"


def test_a_conversation_goes_on_from_a_response(client: openai.OpenAI, server: Served) -> None:
    first = client.responses.create(model="echo", input="[1]", instructions="[s]")
    second = client.responses.create(model="echo", input="[2]", previous_response_id=first.id)
    third = client.responses.create(model="echo", input="[3]", previous_response_id=second.id)
    assert first.output_text == "[s][1]"
    assert second.output_text == "[1][s][1][2]", "instructions are those of each call"
    assert third.output_text == second.output_text.join(("[1][s][1][2]", "[3]"))
    assert (first.previous_response_id, third.previous_response_id) == (None, second.id)
    client.responses.delete(first.id)
    again = client.responses.create(model="echo", input="[3]", previous_response_id=second.id)
    assert again.output_text == third.output_text, "a turn lives as long as others follow it"


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI, server: Served) -> None:
    first = client.responses.create(model="echo", input=CALL, tools=[WEATHER])
    assert first.output[0].type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "[sun]"}
    client.responses.create(model="echo", input=[output], previous_response_id=first.id)
    assert '"arguments": {"city": "Ulm"}' in prompts(server)[-1] and prompts(server)[-1].endswith("[sun]")


def test_a_conversation_goes_on_from_a_call_that_was_cut(client: openai.OpenAI, server: Served) -> None:
    """By its id, and where the call is sent back as it is, the model is shown its arguments as far as they go."""
    first = client.responses.create(model="echo", input=CALL, tools=[WEATHER], max_output_tokens=56)
    [call] = first.output
    assert call.type == "function_call" and call.arguments == '{"city": "Ul'
    client.responses.create(model="echo", input="on", previous_response_id=first.id)
    sent_back: Any = [{"role": "user", "content": "a"}, call, {"role": "user", "content": "on"}]
    client.responses.create(model="echo", input=sent_back)
    assert all('"arguments": {"city": "Ul"}' in prompt for prompt in prompts(server)[-2:])


def test_old_turns_are_left_out_where_they_have_no_room(client: openai.OpenAI, server: Served) -> None:
    """The context has 512 tokens. Instructions stay, and a result of a tool is not left without its call."""
    output: Any = {"type": "function_call_output", "call_id": "1", "output": "sun"}
    call: Any = {"type": "function_call", "call_id": "1", "name": "w", "arguments": "{}"}
    turns: Any = [{"role": "user", "content": f"{i}" * 100} for i in range(4)]
    items: Any = [*turns[:2], call, output, *turns[2:]]
    kept: Any = {"model": "echo", "truncation": "auto", "instructions": "[s]"}
    few = client.responses.create(input=items, max_output_tokens=100, **kept)
    assert few.truncation == "auto" and prompts(server)[-1].startswith("[s]" + "1" * 100)
    assert prompts(server)[-1].endswith("2" * 100 + "3" * 100)
    client.responses.create(input=items, max_output_tokens=250, **kept)
    assert prompts(server)[-1] == "[s]" + "2" * 100 + "3" * 100
    client.responses.create(input=items, **kept)
    assert prompts(server)[-1].startswith("[s]" + "0" * 100)
    client.responses.create(input="on", previous_response_id=few.id, max_output_tokens=300, **kept)
    assert prompts(server)[-1].startswith("[s]3")
    for text, most in (("a" * 600, 1), ("a" * 300, 250)):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
            client.responses.create(input=[*turns, {"role": "user", "content": text}], max_output_tokens=most, **kept)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(model="echo", input=items, max_output_tokens=200)


def test_responses_are_read_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model="echo", input="hi")
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not found"):
            use(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="echo", input="on", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_that_came_to_its_end_cannot_be_cancelled(client: openai.OpenAI) -> None:
    made = client.responses.create(model="echo", input="hi")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response\\."):
        client.responses.cancel(made.id)
    assert client.responses.retrieve(made.id) == made


def test_what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    made = client.responses.create(model="echo", input="hi", store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_another_keys_response_is_not_found(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann: {'a' * 20}\nbob: {'b' * 20}\n")
    file.chmod(0o600)
    access = AccessPolicy(KeyRing(None, KeyFile(file)))
    with (
        served(Echo(laps=1), access=access) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="a" * 20, max_retries=0) as ann,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="b" * 20, max_retries=0) as bob,
    ):
        made = ann.responses.create(model="echo", input="hi")
        for use in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                use(made.id)
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(model="echo", input="on", previous_response_id=made.id)
        assert ann.responses.retrieve(made.id) == made


def test_input_items_are_listed_in_pages(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(i)} for i in range(5)]
    made = client.responses.create(model="echo", input=items)
    page = client.responses.input_items.list(made.id, limit=2, order="asc")
    assert [item.content[0].text for item in page] == ["0", "1", "2", "3", "4"], "the client asks for further pages"  # type: ignore[union-attr]
    newest = client.responses.input_items.list(made.id, limit=1)
    assert newest.has_more and newest.data[0].content[0].text == "4"  # type: ignore[union-attr]
    text = client.responses.create(model="echo", input="hi")
    [only] = client.responses.input_items.list(text.id)
    assert only.type == "message" and only.id.startswith("msg_")


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=none"])
def test_bad_pages(client: openai.OpenAI, server: Served, query: str) -> None:
    made = client.responses.create(model="echo", input="hi")
    answer = httpx.get(
        f"{server.url}/v1/responses/{made.id}/input_items?{query}", headers={"authorization": "Bearer none"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=", maxsplit=1)[0])


def test_a_stream_is_cancelled(client: openai.OpenAI, server: Served) -> None:
    server.source.gate_after = 3
    server.loop.call_soon_threadsafe(server.source.gate.clear)
    events: list[Any] = []
    cancelled: Response | None = None
    for event in client.responses.create(model="echo", input="hello", stream=True):
        events.append(event)
        if event.type == "response.output_text.delta" and event.delta == "l":
            running = client.responses.retrieve(events[0].response.id)
            assert (running.status, running.usage) == ("in_progress", None)
            with pytest.raises(openai.BadRequestError, match="in progress"):
                client.responses.create(model="echo", input="on", previous_response_id=running.id)
            cancelled = client.responses.cancel(running.id)
            assert (cancelled.status, cancelled.output_text) == ("cancelled", "hel")
    assert_order([event.model_dump(by_alias=True) for event in events])
    assert cancelled is not None
    assert events[-1].type == "response.incomplete" and events[-1].response == cancelled
    assert server.source.all_closed.wait(60)
    assert client.responses.cancel(cancelled.id) == cancelled == client.responses.retrieve(cancelled.id)
    server.open_gate()
    assert (
        client.responses.create(model="echo", input="-", previous_response_id=cancelled.id).output_text == "hellohel-"
    )


def test_a_stream_that_nobody_reads_is_cancelled(client: openai.OpenAI, server: Served) -> None:
    server.source.laps, server.source.context = None, 1 << 20
    with client.responses.create(model="echo", input="x" * 200, stream=True) as events:
        first: Any = next(iter(events))
        assert client.responses.cancel(first.response.id).status == "cancelled"
    assert server.source.all_closed.wait(60)


def test_a_client_that_leaves_cancels(client: openai.OpenAI, server: Served) -> None:
    server.source.gate_after = 3
    server.loop.call_soon_threadsafe(server.source.gate.clear)
    with client.responses.create(model="echo", input="hello", stream=True) as events:
        first: Any = next(iter(events))
    assert server.source.all_closed.wait(60)
    deadline = time.monotonic() + 10
    while (status := client.responses.retrieve(first.response.id).status) != "cancelled":
        assert status == "in_progress" and time.monotonic() < deadline


def test_an_error_before_the_first_token_has_its_own_status(client: openai.OpenAI, server: Served) -> None:
    server.source.fail = lambda made: Overloaded("later") if made == 0 else None
    for streamed in (False, True):
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="echo", input="hello", stream=streamed)


def test_an_error_in_the_stream_fails_the_response(client: openai.OpenAI, server: Served) -> None:
    server.source.fail = lambda made: Unavailable("gone: try again") if made == 3 else None
    events: list[Any] = stream(client, input="hello")
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert (last.response.error.code, last.response.error.message) == ("server_error", "gone: try again")
    assert last.response.output_text == "hel"
    assert client.responses.retrieve(last.response.id) == last.response
    with pytest.raises(openai.InternalServerError, match="gone: try again"):
        client.responses.create(model="echo", input="hello")


def test_a_large_body_is_read_elsewhere(client: openai.OpenAI, server: Served) -> None:
    server.source.context = 100_000
    text, extra = "x" * 70_000, {"color": 1}
    made = client.responses.with_raw_response.create(
        model="echo", input=text, max_output_tokens=3, instructions="[s]", tools=[WEATHER, NOTE], extra_body=extra
    )
    assert made.headers["x-diptych-ignored"] == "color"
    first = made.parse()
    assert (first.output_text, first.instructions) == ("[s]", "[s]")
    small = client.responses.create(model="echo", input="[s]", tools=[WEATHER, NOTE])
    assert first.tools == small.tools
    [item] = client.responses.input_items.list(first.id)
    assert item.content[0].text == text  # type: ignore[union-attr]
    client.responses.create(model="echo", input="on", previous_response_id=first.id, max_output_tokens=1)
    assert prompts(server)[-1] == f"{text}[s]on"


def test_the_tokens_of_a_call_are_counted(client: openai.OpenAI) -> None:
    first = client.responses.create(model="echo", input="hello")
    for size in (1, 70_000):
        ask: Any = {"input": "on", "instructions": "[s]", "previous_response_id": first.id}
        ask["extra_body"] = {"user": "u" * size}
        counted = client.responses.input_tokens.count(model="echo", **ask)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", len("[s]hellohelloon"))
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="gpt", input="a")


def test_errors_name_what_was_sent(server: Served) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens must"),
        ({"input": []}, "input is"),
    ]
    for body, words in cases:
        error = httpx.post(f"{server.url}/v1/responses", json=body).json()["error"]
        assert error["message"].startswith(words), error


def test_fields_are_named_as_the_client_knows_them(server: Served) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 1 << 40}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"input": "a", "model": "gpt"}, "model"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text.format"),
    ]
    for body, param in cases:
        answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
        error = answer.json()["error"]
        assert answer.status_code in (400, 404) and error["param"] == param, (body, error)


def test_a_prompt_of_openais_store_is_refused_by_its_own_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt is not supported") as caught:
        client.responses.create(model="echo", input="a", prompt={"id": "pmpt_1"})
    assert caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="echo", input="a" * 1000)
    assert caught.value.param == "input"
