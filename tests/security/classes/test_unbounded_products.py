"""n, logprobs, min_tokens and their products: what is too much is refused at the door, before any of it runs."""

from typing import Any

import grpc
import httpx
import pytest

from diptych.proto import inference_pb2 as pb
from diptych.proto import inference_pb2_grpc

from ...support.front import Echo, served

USER = [{"role": "user", "content": "x"}]
HUGE = 10**9
BODIES: list[dict[str, Any]] = [
    {"n": HUGE},
    {"n": 129},
    {"n": -1},
    {"n": 0},
    {"prompt": ["x"] * 129},
    {"prompt": ["x"] * 65, "n": 2},
    {"logprobs": HUGE},
    {"logprobs": -1},
    {"prompt_logprobs": HUGE},
    {"max_tokens": HUGE},
    {"max_tokens": 2**63},
    {"max_tokens": -1},
    {"min_tokens": HUGE},
    {"min_tokens": -1},
    {"min_tokens": 9, "max_tokens": 8},
    {"top_k": -(2**40)},
    {"stop": ["a" * 100_000]},
    {"stop": ["a"] * 1000},
    {"stop_token_ids": list(range(100_000))},
    {"logit_bias": {str(i): 1 for i in range(5000)}},
    {"timeout_s": 1e308},
    # Products, of values that are each allowed.
    {"n": 128, "max_tokens": 500, "logprobs": 20},
    {"prompt": [[7] * 400] * 40, "n": 2, "prompt_logprobs": 20, "max_tokens": 1},
]


@pytest.mark.parametrize("fields", BODIES, ids=" ".join)
def test_a_body_that_asks_for_too_much_is_refused(fields: dict[str, Any]) -> None:
    source = Echo(laps=1)
    with served(source) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        refused = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, **fields})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["message"] and not source.requests
        assert http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4}).status_code == 200


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": HUGE, "logprobs": True}, {"n": HUGE}, {"max_completion_tokens": HUGE}]
)
def test_a_chat_that_asks_for_too_much_is_refused(fields: dict[str, Any]) -> None:
    source = Echo(laps=1)
    with served(source) as server:
        refused = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": USER, **fields})
        assert refused.status_code == 400 and not source.requests


@pytest.mark.parametrize(
    ("n", "sampling"),
    [
        (2**32 - 1, pb.SamplingParams()),
        (1, pb.SamplingParams(logprobs=2**31 - 1)),
        (1, pb.SamplingParams(prompt_logprobs=2**31 - 1)),
        (1, pb.SamplingParams(max_tokens=2**31 - 1)),
        (1, pb.SamplingParams(min_tokens=2**31 - 1)),
        (1, pb.SamplingParams(stop_token_ids=range(100_000))),
    ],
)
def test_a_grpc_message_that_asks_for_too_much_is_refused(n: int, sampling: pb.SamplingParams) -> None:
    source = Echo(laps=1)
    with served(source) as server, grpc.insecure_channel(server.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(text="x", n=n, sampling=sampling), timeout=60
        )
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT and not source.requests
