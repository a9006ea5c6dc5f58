"""Libraries that people put between themselves and an OpenAI server, on the cluster of test_clients.py: text, tools and
structured answers, streamed and not. Those that bring much with them are in the extra `clients`.
"""

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from ..support.cluster_harness import MODEL, Served

ASKED = "What is Diptych?"
GREEDY = {"temperature": 0}
MESSAGES = [{"role": "user", "content": ASKED}]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore"),  # theirs
]


class Forecast(BaseModel, extra="forbid"):
    """Weather of a day."""

    city: Annotated[str, Field(max_length=12)]
    unit: Literal["C", "F"]


@pytest.fixture(scope="module")
def served(running: Callable[[], Served]) -> Iterator[Served]:
    cluster = running()
    yield cluster
    cluster.assert_nothing_is_held()


@pytest.fixture(scope="module")
def url(served: Served) -> str:
    return f"{served.http_address}/v1"


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor_over_chats(url: str, mode: str) -> None:
    import instructor

    ask: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 400, "response_model": Forecast}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        whole = client.chat.completions.create(**ask, max_retries=0)
        assert isinstance(whole, Forecast)
        partial = list(client.chat.completions.create_partial(**ask, max_retries=0))
    assert len(partial) > 2  # it asks with another schema
    Forecast.model_validate(partial[-1].model_dump())


def test_instructor_over_responses_and_messages(served: Served, url: str) -> None:
    import instructor

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
        assert isinstance(
            client.responses.create(
                model=MODEL, input=ASKED, temperature=0, response_model=Forecast, max_output_tokens=400, max_retries=0
            ),
            Forecast,
        )
    with anthropic.Anthropic(base_url=served.http_address, api_key="none", max_retries=0) as plain_messages:
        own: Any = instructor.from_anthropic(plain_messages)
        found = own.messages.create(
            model=MODEL, max_tokens=400, messages=MESSAGES, response_model=Forecast, max_retries=0, extra_body=GREEDY
        )
        assert isinstance(found, Forecast)


@pytest.mark.long
@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
async def test_pydantic_ai(url: str, api: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.settings import ModelSettings

    model = getattr(models, api)(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    settings = ModelSettings(max_tokens=400, temperature=0)
    kinds: tuple[tuple[Any, type], ...] = (
        (str, str),
        (ToolOutput(Forecast), Forecast),
        (NativeOutput(Forecast), Forecast),
    )
    for output, kind in kinds:
        agent: Any = Agent(model, output_type=output, model_settings=settings)
        whole = (await agent.run(ASKED)).output
        assert isinstance(whole, kind)
        async with agent.run_stream(ASKED) as stream:
            assert await stream.get_output() == whole


@pytest.mark.long
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(url: str, responses: bool) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: Annotated[str, Field(max_length=8)], unit: Literal["C", "F"]) -> str:
        """Get the weather."""
        return f"{city} {unit}"

    settings: Any = {"base_url": url, "api_key": "none", "max_retries": 0, "temperature": 0, "max_tokens": 400}
    chat = ChatOpenAI(model=MODEL, use_responses_api=responses, stream_usage=True, **settings)
    whole, pieces = chat.invoke(ASKED), list(chat.stream(ASKED))
    assert whole.text and "".join(piece.text for piece in pieces) == whole.text
    counted = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert whole.usage_metadata and counted[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]
    for method in ("json_schema", "function_calling"):
        shaped = chat.with_structured_output(Forecast, method=method, strict=True)
        found = shaped.invoke(ASKED)
        assert isinstance(found, Forecast) and list(shaped.stream(ASKED))[-1] == found
    bound = chat.bind_tools([weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    [call] = bound.invoke(ASKED).tool_calls
    streamed = "".join(chunk["args"] or "" for piece in bound.stream(ASKED) for chunk in piece.tool_call_chunks)
    assert call["name"] == "weather" and json.loads(streamed) == call["args"]
    assert weather.invoke(call).content == f"{call['args']['city']} {call['args']['unit']}"


@pytest.mark.long
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic", "text-completion-openai"])
def test_litellm(served: Served, url: str, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the Internet
    import litellm

    base = served.http_address if provider == "anthropic" else url
    ask: Any = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "num_retries": 0}
    ask |= {"messages": MESSAGES, "temperature": 0, "max_tokens": 400}

    def text(**more: Any) -> str:
        return litellm.completion(**ask, **more).choices[0].message.content

    def streamed(**more: Any) -> Any:
        chunks = list(litellm.completion(**ask, **more, stream=True))
        built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        assert built is not None
        return built.choices[0].message

    assert text() and streamed().content == text()
    if provider == "text-completion-openai":
        return
    shaped = text(response_format=Forecast)
    Forecast.model_validate_json(shaped)
    assert json.loads(streamed(response_format=Forecast).content) == json.loads(shaped)
    if provider == "hosted_vllm":  # leaves `strict` and `additionalProperties` out, so that the model may write more
        return
    function = {"name": "weather", "parameters": Forecast.model_json_schema(), "strict": True}
    tools: Any = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    [call] = litellm.completion(**ask, **tools, parallel_tool_calls=False).choices[0].message.tool_calls
    [same] = streamed(**tools, parallel_tool_calls=False).tool_calls
    assert call.function.name == same.function.name == "weather"
    assert json.loads(same.function.arguments) == json.loads(call.function.arguments)


@pytest.mark.long
def test_litellm_over_responses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    ask: Any = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "input": ASKED, "temperature": 0}
    whole: Any = litellm.responses(**ask)
    events = [event.type.value for event in litellm.responses(**ask, stream=True)]
    assert whole.output[0].content[0].text and whole.status == "completed"
    assert events[0] == "response.created" and events[-1] == "response.completed"
