"""Random calls at every port that a stranger or a peer that lies can reach: no crash, no fault of ours, no lost
block.
"""

import asyncio
import json
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from diptych.proto import inference_pb2, inference_pb2_grpc, kv_pb2, worker_pb2, worker_pb2_grpc
from diptych.workers.common.channel import open_channel
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner

from ..support.front import Echo, Served, served
from ..support.random_messages import random_message

FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))]
CALL_S = 20.0
STREAMS = [each for each in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods if each.server_streaming]
JSON_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1 << 70,
    0.5,
    1e308,
    "",
    "a",
    "é\0",
    [],
    [1],
    ["a"],
    {},
    {"a": 1},
    [[3]],
)
SAMPLING = {
    "temperature": (0.0, 1.0),
    "top_p": (0.9,),
    "min_p": (0.0,),
    "top_k": (0, 5),
    "repetition_penalty": (1.0, 1.5),
    "presence_penalty": (0.5,),
    "frequency_penalty": (0.5,),
    "max_tokens": (1, 5, 20),
    "min_tokens": (0, 1),
    "n": (1, 2),
    "timeout_s": (0.2, 20.0),
    "wait_s": (0.0, 0.1),
    "ttft_s": (1.0,),
    "tpot_s": (1.0,),
    "logprobs": (0, 2),
    "prompt_logprobs": (0, 1),
    "dimensions": (1, 2),
    "stop_token_ids": (1, 2),
    "ids": (5, 70, 100),
    "model": ("", "echo"),
    "role": ("user",),
    "service_tier": ("",),
    "cache_salt": ("", "a"),
    "prediction": (1, 2, 3),
    "truncate_prompt_tokens": (-1, 5),
    "truncation_side": (0, 1, 2),
    "allowed_token_ids": (5, 70, 100),
    "bad_words": ("x",),
}


def mutated(random: Random, value: Any, depth: int = 0) -> Any:
    """JSON value with some parts replaced, dropped, repeated or moved."""
    if random.random() < 0.1 * (depth + 1):
        return random.choice(JSON_VALUES)
    if isinstance(value, dict):
        return {key: mutated(random, inner, depth + 1) for key, inner in value.items() if random.random() < 0.97}
    if isinstance(value, list):
        return [mutated(random, inner, depth + 1) for inner in value for _ in range(random.choice((1, 1, 1, 2)))]
    return value


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
FLAT = {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
# Values of fields that are often accepted, so that a call comes further than its first check.
USUAL: dict[str, tuple[Any, ...]] = {name: values for name, values in SAMPLING.items() if name != "ids"} | {
    "stream": (True, False),
    "max_tokens": (1, 3),
    "max_completion_tokens": (2,),
    "max_output_tokens": (2,),
    "stop": ("a", ["b", "c"]),
    "logit_bias": ({"5": 1.5},),
    "stream_options": ({"include_usage": True, "continuous_usage_stats": True},),
    "tools": ([TOOL], [{"name": "f", "input_schema": SCHEMA}], [FLAT, {"type": "function", "name": "f"}]),
    "tool_choice": ("auto", "required", {"type": "function", "function": {"name": "f"}}, {"type": "any"}),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    ),
    "structured_outputs": ({"choice": ["a", "b"]}, {"regex": "a+"}),
    "text": ({"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},),
    "output_config": ({"format": {"type": "json_schema", "schema": SCHEMA}},),
    "system": ("s", [{"type": "text", "text": "s"}]),
    "prediction": (
        {"type": "content", "content": "ab"},
        {"type": "content", "content": [{"type": "text", "text": "a"}]},
    ),
    "speculation": (True, False),
    "messages": (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "c"}]}],
        [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]}],
    ),
    "input": (
        [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
        [{"type": "function_call_output", "call_id": "c", "output": "o"}, {"type": "reasoning", "content": []}],
    ),
    "prompt": ("a", [65, 66], ["a", "b"], [[65], [66]]),
}


def random_bodies(random: Random, document: dict[str, Any], number: int) -> list[tuple[str, bytes]]:
    """Paths and bodies: examples with further documented fields, and then with mistakes."""
    found: list[tuple[str, bytes]] = []
    described = [(path, methods["post"]) for path, methods in document["paths"].items() if "post" in methods]
    bodies = [(path, operation["requestBody"]["content"]["application/json"]) for path, operation in described
              if "requestBody" in operation]  # fmt: skip
    for _ in range(number):
        path, content = random.choice(bodies)
        names = list(document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]["properties"])
        body = dict(content["example"])
        for name in random.sample(names, min(random.choice((0, 1, 2, 4)), len(names))):
            body[name] = random.choice(USUAL.get(name, JSON_VALUES))
        text = json.dumps(mutated(random, body) if random.random() < 0.5 else body).encode()
        if random.random() < 0.05:
            at = random.randrange(len(text) + 1)
            text = text[:at] + random.choice((b"", b"\0", b"\xff", b"\\ud800", b"NaN", b"[" * 3000)) + text[at + 1 :]
        found.append((path, text))
    return found


def is_well(server: Served) -> bool:
    """Whether it answers, and no request is left open."""
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}, timeout=CALL_S)
    source = server.source
    return answer.status_code == 200 and source.all_closed.wait(CALL_S) and len(source.closed) == len(source.requests)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_bodies_get_an_answer_that_is_no_fault_of_ours(seed: int) -> None:
    random, statuses = Random(seed), Counter[int]()
    with served(Echo(laps=2)) as server, httpx.Client(base_url=server.url, timeout=CALL_S) as http:
        for path, body in random_bodies(random, http.get("/openapi.json").json(), 400):
            if b'"ignore_eos": true' in body:  # the answers are finite
                continue
            answer = http.post(path, content=body, headers={"content-type": "application/json"})
            is_late = "deadline_exceeded" in answer.text and b"timeout_s" in body
            assert answer.status_code < 500 or is_late, (path, body, answer.text)
            assert "internal_error" not in answer.text
            statuses[answer.status_code] += 1
        assert is_well(server)
    assert statuses[200] > 40 and statuses[400] > 40, statuses


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_grpc_calls_get_an_answer_that_is_no_fault_of_ours(seed: int) -> None:
    random, codes = Random(seed), Counter[tuple[str, grpc.StatusCode]]()
    with served(Echo(laps=2)) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            for method in random.choices(STREAMS, k=600):
                request = random_message(random, GetMessageClass(method.input_type), SAMPLING)
                if method.name == "Generate":
                    request.sampling.ClearField("ignore_eos")  # the answers are finite
                    for name in ("allowed_token_ids", "bad_words"):  # a call has one grammar, and most have none
                        if random.random() < 0.8:
                            request.ClearField(name)
                call = getattr(stub, method.name)(request, timeout=CALL_S)
                with suppress(grpc.aio.AioRpcError):
                    while await call.read() is not grpc.aio.EOF and random.random() > 0.05:
                        pass
                call.cancel()  # some before their end
                codes[method.name, await call.code()] += 1
                assert await call.code() not in FAULTS, await call.details()
        assert is_well(server)
    for method in STREAMS:
        assert codes[method.name, grpc.StatusCode.OK] + codes[method.name, grpc.StatusCode.CANCELLED] > 4, codes
        assert codes[method.name, grpc.StatusCode.INVALID_ARGUMENT] > 10, codes


async def random_link(random: Random, channel: grpc.aio.Channel, known: dict[str, Any], codes: Counter[Any]) -> None:
    """Send messages of a router that lies, and hang up."""
    stub: Any = worker_pb2_grpc.WorkerStub(channel)
    call = stub.Link(timeout=CALL_S)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for _ in range(20):
            await call.write(random_message(random, worker_pb2.RouterMessage, known))
            await call.read()
    call.cancel()
    code = await call.code()
    codes[code] += 1
    assert code not in FAULTS, await call.details()


async def random_kv_call(random: Random, channel: grpc.aio.Channel, known: dict[str, Any], codes: Counter[Any]) -> None:
    """Make a call of a sink that lies."""
    service = kv_pb2.DESCRIPTOR.services_by_name["KVHandoff"]
    method = random.choice(list(service.methods))
    asked: type[Message] = GetMessageClass(method.input_type)
    answered: Any = GetMessageClass(method.output_type)
    path, answers = f"/{service.full_name}/{method.name}", answered.FromString
    request = random_message(random, asked, known).SerializeToString()
    if random.random() < 0.1:
        request = random.randbytes(random.randrange(200))
    if method.server_streaming:
        call: Any = channel.unary_stream(path, response_deserializer=answers)(request, timeout=0.3)
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
    else:
        call = channel.unary_unary(path, response_deserializer=answers)(request, timeout=CALL_S)
    code = await call.code()
    codes[code] += 1
    # What the library says of a message that is no protobuf.
    assert code not in FAULTS or "DecodeError" in await call.details(), (path, await call.details())


@pytest.mark.parametrize("seed", [37, *SEEDS[:37], *SEEDS[38:]])  # 37 used a handle again and ended the engine
async def test_random_messages_to_a_worker_lose_no_block(seed: int) -> None:
    random, codes = Random(seed), Counter[Any]()
    service = WorkerService(WorkerConfig.of(model="fake", transports=("grpc",)), FakeRunner(num_blocks=64))
    where = await service.start()
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    known: dict[str, Any] = SAMPLING | {
        "handle": (1, 2, 3, 4, 5),
        "handoff_id": ("h1", "h2", "h3"),
        "source_incarnation": (where.incarnation,),
        "sink_incarnation": ("s1", "s2"),
        "incarnation": (where.incarnation,),
        "address": (where.address, "127.0.0.1:1"),
        "prompt_token_ids": (1, 2, 3),
        "transports": ("grpc",),
        "tokens": (1, 5),
        "num_tokens": (0, 4, 64),
        "block_ids": (0, 1, 2, 63),
        "generations": (0, 1),
    }
    async with open_channel(where.address) as channel:
        for _ in range(6):
            links = [random_link(random, channel, known, codes) for _ in range(2)]
            await asyncio.gather(*links, *(random_kv_call(random, channel, known, codes) for _ in range(25)))
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        while True:
            state = await stub.GetState(worker_pb2.GetStateRequest(), timeout=CALL_S)
            load = state.load
            if not (load.num_running or load.num_waiting or load.num_leased_blocks or load.num_quarantined_blocks):
                break
    assert not running.done()
    stop.set()
    await running
    await service.stop(grace_s=0.0)
    assert state.num_unaccounted_blocks == 0 and load.num_free_blocks == load.num_blocks == 64
    assert codes[grpc.StatusCode.NOT_FOUND] + codes[grpc.StatusCode.OK] > 10, codes
