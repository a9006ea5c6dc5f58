"""One cluster on the shipped model as its clients know it: OpenAI's library, gRPC stubs, many at once, bad input."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import grpc
import httpx
import jsonschema
import openai
import pydantic
import pytest
import torch

from diptych import Client
from diptych.cluster.front.choice_seed import choice_seed
from diptych.cluster.tokens.tokenizer import Tokenizer
from diptych.proto import inference_pb2, inference_pb2_grpc
from diptych.workers.common.errors import Overloaded
from diptych.workers.core.embedding import Pooling

from ..support.cluster_harness import MODEL, Served, diptych
from ..support.embedders import reference_embeddings
from ..support.harness import TINY

QUESTION = [{"role": "user", "content": "What is Diptych?"}]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "time", "strict": True}},
]

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


@pytest.fixture(scope="module")
def served(running: Callable[[], Served]) -> Iterator[Served]:
    cluster = running()
    yield cluster
    cluster.assert_nothing_is_held()  # a block that a test lost is lost for good


@pytest.fixture(autouse=True)
def it_goes_on(served: Served) -> Iterator[None]:
    """After each test the cluster answers."""
    yield
    with httpx.Client(base_url=served.http_address) as client:
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 200


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_phases_of_a_hand_off_sum_to_what_the_client_saw(served: Served) -> None:
    """The first: later the router may have learned to compute so short a prompt where it is decoded."""
    body = {"prompt": "Once upon a time there was a hinge. " * 8, "max_tokens": 2, "ignore_eos": True, "timings": True}
    began = time.monotonic()
    answer = httpx.post(f"{served.http_address}/v1/completions", json=body, timeout=60)
    took_s = time.monotonic() - began
    (timings,) = answer.json()["timings"]
    assert timings["handoff_bytes"] > 0 and timings["transport"] and timings["num_attempts"] == 1
    row = ("queue", "prefill", "deliver_first", "last_segment", "commit", "first_decode", "deliver_second")
    assert sum(timings[f"{phase}_s"] for phase in row) == pytest.approx(timings["total_s"], abs=1e-6)
    assert 0 < timings["total_s"] < took_s
    told_ms = dict(re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"]))
    assert sum(float(told_ms[phase]) for phase in row) == pytest.approx(float(told_ms["total"]), abs=0.01)
    links: list[dict[str, Any]] = []
    while not links:  # its worker reports them
        links = served.status()["links"]
    [(sink, source)] = {(link["sink"], link["source"]) for link in links}
    assert {w["worker_id"]: w["pool"] for w in served.status()["workers"]} == {sink: "decode", source: "prefill"}
    assert links[0]["num_bytes"] >= timings["handoff_bytes"] and links[0]["num_failed"] == 0
    assert f"<- {source}" in diptych(served.home, "status").stdout
    metrics = httpx.get(f"{served.http_address}/metrics").text
    assert "diptych_link_bytes_total{" in metrics and "diptych_handoff_pull_seconds_count" in metrics


def test_chat_streamed_and_not_say_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    text, finish, usage = "", None, None
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert "prefill" in text.lower()
    assert finish == whole.choices[0].finish_reason == "stop"
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_of_tools_follow_their_schemas_streamed_and_not(client: openai.OpenAI, choice: Any) -> None:
    """The model was not trained to call any: the grammar makes it."""
    for seed in range(3):
        ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": choice}
        ask |= {"seed": seed, "max_tokens": 400, "parallel_tool_calls": False}
        [whole] = client.chat.completions.create(**ask).choices
        [call] = whole.message.tool_calls or ()
        assert whole.finish_reason == "tool_calls" and whole.message.content == ""
        assert call.type == "function"
        if call.function.name == "weather":
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        else:
            assert choice == "required" and (call.function.name, json.loads(call.function.arguments)) == ("time", {})
        with client.chat.completions.stream(**ask) as stream:
            [final] = stream.get_final_completion().choices
        [streamed] = final.message.tool_calls or ()
        assert final.finish_reason == "tool_calls"
        assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)


class Forecast(pydantic.BaseModel):
    city: Annotated[str, pydantic.Field(max_length=12)]
    unit: Literal["C", "F"]


class AskForecast(pydantic.BaseModel):
    city: Annotated[str, pydantic.Field(max_length=12)]


def test_embeddings_are_the_models_hidden_states(served: Served, client: openai.OpenAI) -> None:
    """The client's default is base64. What is computed alone, with others and by another worker is the same."""
    tokenizer = Tokenizer.load(TINY)
    texts = ["Once upon a time", "there was a hinge. " * 30, "What is Diptych?"]
    ids = [list(tokenizer.encode(text)) for text in texts]
    expected = [state / state.norm() for state in reference_embeddings(TINY, ids, Pooling.LAST)]
    together = client.embeddings.create(model=MODEL, input=texts)
    assert together.usage.prompt_tokens == together.usage.total_tokens == sum(map(len, ids))
    own = [client.embeddings.create(model="chat", input=of, encoding_format="float").data[0] for of in (*texts, ids[2])]
    found = [*(each.embedding for each in together.data), *(each.embedding for each in own)]
    for vector, reference in zip(found, [*expected, *expected, expected[2]], strict=True):
        torch.testing.assert_close(torch.tensor(vector), reference, atol=2e-2, rtol=0)  # bfloat16
        assert torch.dot(torch.tensor(vector), reference) > 0.999
    with Client(served.grpc_address) as by_grpc:
        alike = by_grpc.embed([texts[0], texts[1], ids[2]])
    assert alike.usage.prompt_tokens == together.usage.prompt_tokens
    for vector, reference in zip(alike.vectors, expected, strict=True):
        torch.testing.assert_close(torch.tensor(vector), reference, atol=2e-2, rtol=0)
    with pytest.raises(openai.BadRequestError, match="does not say that its embeddings may be cut"):
        client.embeddings.create(model=MODEL, input="a", dimensions=8)
    with pytest.raises(openai.BadRequestError, match="the input has"):
        client.embeddings.create(model=MODEL, input=[3] * 5000)
    many = client.embeddings.create(model=MODEL, input=[[3 + i % 400, 5] for i in range(300)])
    assert [each.index for each in many.data] == list(range(300))


def test_a_response_is_the_answer_of_the_same_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    whole = client.responses.create(model=MODEL, input="What is Diptych?", temperature=0)
    assert whole.output_text == chat.choices[0].message.content and whole.status == "completed"
    assert whole.usage is not None and chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    with client.responses.stream(model=MODEL, input="What is Diptych?", temperature=0) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events.get_final_response().output_text == whole.output_text
    again = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    chat = client.chat.completions.create(model=MODEL, messages=again, temperature=0, max_tokens=20)
    followed = client.responses.create(
        model=MODEL, input="Why?", previous_response_id=whole.id, temperature=0, max_output_tokens=20
    )
    assert followed.output_text == chat.choices[0].message.content
    assert client.responses.retrieve(followed.id) == followed


def test_responses_are_parsed_streamed_and_not(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": "What is Diptych?", "max_output_tokens": 200}
    tools = [openai.pydantic_function_tool(AskForecast, name="ask")]
    flat: Any = [{"type": "function", **tool["function"]} for tool in tools]
    for seed in range(3):
        ask["extra_body"] = {"seed": seed}
        whole = client.responses.parse(**ask, text_format=Forecast)
        with client.responses.stream(**ask, text_format=Forecast) as events:
            streamed = events.get_final_response()
        assert isinstance(whole.output_parsed, Forecast) and streamed.output_parsed == whole.output_parsed
        called = client.responses.parse(**ask, tools=flat, tool_choice="required", parallel_tool_calls=False)
        [call] = called.output
        assert call.type == "function_call" and call.name == "ask"
        AskForecast.model_validate_json(call.arguments)


def test_a_streamed_response_is_cancelled(served: Served, client: openai.OpenAI) -> None:
    status = None
    for _ in range(10):  # the whole answer may be there before a client that has to wait for its core asks to end it
        stream = client.responses.create(
            model=MODEL, input="Go on", max_output_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        with stream as events:
            first: Any = next(iter(events))
            try:
                ended = client.responses.cancel(first.response.id)
            except openai.BadRequestError as error:
                assert "This one has ended" in error.message
                continue
            last: Any = list(events)[-1]
        assert last.type == "response.incomplete" and last.response == ended
        if (status := ended.status) != "incomplete":
            break
    assert status == "cancelled"
    served.assert_nothing_is_held()


def test_an_anthropic_client_gets_text_and_calls_streamed_and_not(served: Served) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "extra_body": {"temperature": 0}}
    tools = [{"name": "weather", "input_schema": WEATHER, "strict": True}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    call: dict[str, Any] = {"tools": tools, "tool_choice": choice, "max_tokens": 400}
    with anthropic.Anthropic(base_url=served.http_address, api_key="none", max_retries=0) as client:
        for fields in ({}, call):
            whole: Any = client.messages.create(**ask | fields)
            with client.messages.stream(**ask | fields) as stream:
                streamed: Any = stream.get_final_message()
            assert streamed.stop_reason == whole.stop_reason
            [block], [same] = whole.content, streamed.content
            assert block.type == same.type
            if fields:
                jsonschema.validate(block.input, WEATHER)
                assert (same.name, same.input) == (block.name, block.input) and whole.stop_reason == "tool_use"
            else:
                assert same.text == block.text != ""
        several = [{"role": "user", "content": "What is a hand-off? " * 20}]  # blocks of tokens
        counted = client.messages.count_tokens(model=MODEL, messages=several)  # type: ignore[arg-type]
        ask |= {"messages": several, "max_tokens": 4, "extra_body": {"cache_salt": "of this call"}}
        first, again = (client.messages.create(**ask).usage for _ in range(2))
    assert first.cache_read_input_tokens == again.cache_creation_input_tokens == 0
    assert 0 < again.cache_read_input_tokens <= first.cache_creation_input_tokens, "the last token is computed again"
    assert counted.input_tokens == first.input_tokens + first.cache_creation_input_tokens
    assert counted.input_tokens == again.input_tokens + again.cache_read_input_tokens


def test_completions_with_n_stop_seed_and_logprobs(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "n": 3, "logprobs": 2}
    first, second = client.completions.create(**ask), client.completions.create(**ask)
    texts = [c.text for c in first.choices]
    assert texts == [c.text for c in second.choices]
    assert len(set(texts)) > 1
    for choice in first.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
        assert all(p <= 0 for p in choice.logprobs.token_logprobs or [])
    greedy = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**greedy).choices[0].text
    stop = text[8:12]
    stopped = client.completions.create(**greedy, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")


def test_n_completions_are_those_of_n_calls(client: openai.OpenAI) -> None:
    """They share the prompt's blocks, and each copies the last, which is not full."""
    ask = {"model": MODEL, "prompt": [3 + 5 * i % 400 for i in range(70)], "max_tokens": 40}
    together = client.completions.create(**ask, seed=7, n=4, extra_body={"cache_salt": "together"})
    alone = [
        client.completions.create(**ask, seed=choice_seed(7, i), extra_body={"cache_salt": f"alone {i}"})
        for i in range(4)
    ]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]
    assert len({c.text for c in together.choices}) > 1
    assert together.usage is not None and together.usage.prompt_tokens == 70


def test_other_salts_never_share_blocks(served: Served, client: openai.OpenAI) -> None:
    """Routes depend on measured times: what both workers have computed is cached wherever a request goes."""
    prompt = [3 + 7 * i % 400 for i in range(80)]

    def cached_over_http(**extra: str) -> int:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0, extra_body=extra)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    def cached_over_grpc(salt: str) -> int:
        return grpc_client.generate(prompt, max_tokens=4, cache_salt=salt).usage.cached_tokens

    with Client(served.grpc_address) as grpc_client:
        assert cached_over_http(cache_salt="Ann") == 0
        assert max(cached_over_http(cache_salt="Ann") for _ in range(2)) >= 64
        assert max(cached_over_grpc("Ann") for _ in range(2)) >= 64, "the same salt"
        assert cached_over_grpc("Bob") == 0
        assert cached_over_http() == 0
        assert max(cached_over_http(cache_salt="Bob") for _ in range(2)) >= 64


def test_who_asks_for_it_is_refused_what_cannot_be_in_time(served: Served, client: openai.OpenAI) -> None:
    ask = {"model": "chat", "prompt": [3 + 11 * i % 400 for i in range(90)], "max_tokens": 12, "temperature": 0}
    whole = {"extra_body": {"ignore_eos": True}}
    level = {"x-diptych-ttft-ms": "1", "x-diptych-tpot-ms": "0.1"}

    def refused() -> openai.RateLimitError | None:
        try:
            client.completions.create(**ask, **whole, extra_headers=level | {"x-diptych-admission": "refuse"})
        except openai.RateLimitError as error:
            return error
        return None

    error = next(filter(None, (refused() for _ in range(1000))))  # once the workers have measured their steps
    assert 1 <= int(error.response.headers["retry-after"]) <= 60
    assert "ms are asked for" in error.message
    for headers in ({}, {"x-diptych-admission": "wait"}):
        waited = client.completions.create(**ask, **whole, extra_headers=level | headers)
        assert waited.usage is not None and waited.usage.completion_tokens == 12
    with Client(served.grpc_address) as grpc_client:
        own = {
            "model": "chat",
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "ttft_s": 0.001,
            "tpot_s": 0.0001,
        }
        with pytest.raises(Overloaded, match="ms are asked for") as caught:
            grpc_client.generate(ask["prompt"], admission="refuse", **own)
        assert 1 <= caught.value.retry_after_s <= 60
        assert grpc_client.generate(ask["prompt"], admission="wait", **own).text == waited.choices[0].text
    counts = httpx.get(f"{served.http_address}/metrics").text
    for outcome in ("refused", "missed_both"):
        assert f'diptych_level_requests_total{{model="chat",outcome="{outcome}",tier="default"}}' in counts


def test_an_answer_names_its_tier(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=QUESTION, max_tokens=4, service_tier="priority")
    assert (answer.model, answer.service_tier) == ("chat", "priority")
    with pytest.raises(openai.BadRequestError, match="send auto or default or priority"):
        client.chat.completions.create(model="chat", messages=QUESTION, service_tier="flex")


def test_models_health_and_metrics(served: Served, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL, "chat"]
    with httpx.Client(base_url=served.http_address) as plain:
        assert plain.get("/health").status_code == 200
        assert "diptych_" in plain.get("/metrics").text


def test_plain_grpc_stubs(served: Served) -> None:
    with grpc.insecure_channel(served.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        model = stub.GetModel(inference_pb2.GetModelRequest())
        assert model.name == MODEL
        request = inference_pb2.GenerateRequest(
            chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**QUESTION[0])]),
            sampling=inference_pb2.SamplingParams(temperature=0.0),
        )
        answers = list(stub.Generate(request, timeout=60))
        assert answers[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
        assert "prefill" in "".join(a.text for a in answers).lower()
        assert answers[-1].usage.completion_tokens == sum(len(a.token_ids) for a in answers)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(inference_pb2.GenerateRequest(text="word " * 100_000), timeout=60))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_two_hundred_streams_at_once_lose_nothing(served: Served) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.completions.create(
            model=MODEL,
            prompt=[3 + (number * 7 + i) % 400 for i in range(1 + number)],
            max_tokens=32,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        finish, usage = None, 0
        async for chunk in stream:
            if chunk.choices:
                finish = chunk.choices[0].finish_reason or finish
            if chunk.usage:
                usage = chunk.usage.completion_tokens
        assert finish == "length"
        return usage

    async def main() -> list[int]:
        url = f"{served.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
            return await asyncio.gather(*(one(client, number) for number in range(200)))

    assert asyncio.run(main()) == [32] * 200


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_bench_measures_a_running_cluster(served: Served, scheme: str, tmp_path: Path) -> None:
    url = served.http_address if scheme == "http" else f"grpc://{served.grpc_address}"
    load = ("--workload", "multi-turn", "--tokenizer", MODEL, "--num-requests", "8", "--turns", "2")
    run = diptych(served.home, "bench", "--url", url, *load, "--output-tokens", "16", "--json", "a.json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    row = json.loads((tmp_path / "a.json").read_text())
    assert (row["completed"], row["failed"], row["total_output_tokens"]) == (16, 0, 256)
    assert row["total_input_tokens"] >= 8 * 128 + 8 * (128 + 16 + 128)
    assert row["total_cached_tokens"] > 0, "a second turn finds the first"
    assert 0 < row["p50_ttft_ms"] < row["p99_e2el_ms"]
    assert row["output_throughput"] > 0
    assert "time to first token" in run.stdout


def test_bad_input_is_told_by_name(served: Served) -> None:
    cases: list[tuple[object, int, str | None]] = [
        ('{"model": "tiny", "prompt": ', 400, None),
        ("[]", 400, None),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [3] * 5000}, 400, "prompt"),
        ({"prompt": "word " * 100_000}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": 1_000_000}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -0.5}, 400, "temperature"),
        ('{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, None),
        ({"prompt": "a", "n": 10_000}, 400, "n"),
        ({"prompt": [999_999]}, 400, "prompt"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "model"),
    ]
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=served.http_address, timeout=60) as plain:
        for body, status, param in cases:
            content = json.dumps({"model": MODEL} | body) if isinstance(body, dict) else str(body)
            answer = plain.post("/v1/completions", content=content, headers=headers)
            error = answer.json()["error"]
            assert answer.status_code == status, (body, error)
            assert error["message"], body
            assert error["type"], body
            assert param is None or error["param"] == param, (body, error)


def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=served.http_address, timeout=60) as plain:
        for _ in range(4):
            with plain.stream("POST", "/v1/completions", json=body) as answer:
                assert "data:" in next(answer.iter_lines())
    served.assert_nothing_is_held()
