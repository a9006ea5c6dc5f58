"""Answers that continue the conversation's last message, as vLLM and Anthropic do, with the official clients."""

from collections.abc import Generator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from diptych.cluster.front.http.calls import MAX_INLINE_BYTES

from ....support.front import END, Echo, Served, served

USER, ASSISTANT = 258, 259
CHAT: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once "}]
PROMPT = [USER, *b"Hi", END, ASSISTANT, *b"Once "]  # the assistant's message is not ended
SAID = "HiOnce "  # Echo's answer to it
THINKING = "{# <think> #}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
GOES_ON = {"continue_final_message": True}


@pytest.fixture
def it() -> Generator[Served]:
    with served(Echo(laps=1)) as found:
        yield found


@pytest.fixture
def client(it: Served) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_goes_on_with_the_last_message(client: openai.OpenAI, it: Served, stream: bool, echo: bool) -> None:
    extra = GOES_ON | {"add_generation_prompt": False, "echo": echo}
    answer: Any = client.chat.completions.create(model="echo", messages=CHAT, n=2, stream=stream, extra_body=extra)
    assert [list(request.prompt_token_ids) for request in it.source.requests] == [PROMPT, PROMPT]
    expected = ("Once " if echo else "") + SAID
    if stream:
        said = {0: "", 1: ""}
        for chunk in answer:
            said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert said == {0: expected, 1: expected}
    else:
        assert [choice.message.content for choice in answer.choices] == [expected, expected]
        assert [choice.message.role for choice in answer.choices] == ["assistant", "assistant"]


def test_a_prompt_may_end_with_its_messages(client: openai.OpenAI, it: Served) -> None:
    client.chat.completions.create(model="echo", messages=CHAT[:1], extra_body={"add_generation_prompt": False})
    assert list(it.source.requests[-1].prompt_token_ids) == [USER, *b"Hi", END]


def test_a_large_call_is_read_alike(it: Served) -> None:
    """In another process."""
    it.source.context = 2 * MAX_INLINE_BYTES
    chat = [{"role": "user", "content": "x" * MAX_INLINE_BYTES}, CHAT[1]]
    body = {"messages": chat, "max_tokens": 2, "echo": True} | GOES_ON
    answer = httpx.post(f"{it.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Once xx"
    assert bytes(it.source.requests[-1].prompt_token_ids[-5:]) == b"Once "


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_continued(stream: bool) -> None:
    """What the client wrote of it tells that the answer is within it, however long it is."""
    begun = f"<think>{'thinking ' * 20}"
    with (
        served(Echo(laps=1), template=THINKING) as it,
        openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client,
    ):
        said: Any = [{"role": "user", "content": "done</think>Yes"}, {"role": "assistant", "content": begun}]
        answer: Any = client.chat.completions.create(
            model="echo", messages=said, max_tokens=15, stream=stream, extra_body=GOES_ON
        )
        if stream:
            deltas = [chunk.choices[0].delta for chunk in answer]
            thought = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
            text = "".join(delta.content or "" for delta in deltas)
        else:
            message = answer.choices[0].message
            thought, text = message.reasoning, message.content
    assert (thought, text) == ("done", "Yes")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_answer_goes_on_with_the_assistants_last_message(it: Served, stream: bool) -> None:
    with anthropic.Anthropic(base_url=it.url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(model="echo", max_tokens=50, messages=CHAT) as events:
                found = events.get_final_message()
        else:
            found = client.messages.create(model="echo", max_tokens=50, messages=CHAT)
        counted = client.messages.count_tokens(model="echo", messages=CHAT)
    assert list(it.source.requests[-1].prompt_token_ids) == PROMPT
    assert [block.type for block in found.content] == ["text"]
    assert getattr(found.content[0], "text", None) == SAID
    assert counted.input_tokens == len(PROMPT)


def test_a_call_of_a_tool_is_not_continued(it: Served) -> None:
    called = {"type": "tool_use", "id": "c", "name": "time", "input": {}}
    chat = [CHAT[0], {"role": "assistant", "content": [called]}]
    answer = httpx.post(f"{it.url}/v1/messages", json={"max_tokens": 5, "messages": chat})
    assert answer.status_code == 400 and "only a message of text can be continued" in answer.text
    assert not it.source.requests
