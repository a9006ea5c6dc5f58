"""What lm-eval's loglikelihood tasks ask for, through the front door: log-probabilities of prompts equal transformers'.

float32, in chunks, one worker and 1P1D (a hand-off where more than one token is made), the prefix cache cold and warm.
"""

from typing import Any

import httpx
import pytest
import torch

from ..support.asgi import http_client
from ..support.checkpoints import random_prompts, reference_model
from ..support.harness import TINY
from .test_exactness import TOPOLOGIES, routed, services

pytestmark = pytest.mark.e2e

PROMPTS = random_prompts(7, [2, 17, 64, 200], vocab_size=500)


async def ask(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": PROMPTS, "temperature": 0, "seed": 1234, "ignore_eos": True, **fields}
    answer = await client.post("/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def own_of(logprobs: torch.Tensor, prompt: list[int]) -> torch.Tensor:
    return logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def assert_loglikelihoods(choices: list[dict[str, Any]], expected: list[torch.Tensor], num_tokens: int) -> None:
    """Of each token of the prompts, and of the most likely one in its place: lm-eval asks whether they are equal."""
    for choice, prompt, logprobs in zip(choices, PROMPTS, expected, strict=True):
        found = choice["logprobs"]["token_logprobs"]
        assert found[0] is None and len(found) == len(prompt) + num_tokens
        own = torch.tensor(found[1 : len(prompt)])
        torch.testing.assert_close(own, own_of(logprobs, prompt), atol=1e-4, rtol=0)
        best = torch.tensor([max(top.values()) for top in choice["logprobs"]["top_logprobs"][1 : len(prompt)]])
        torch.testing.assert_close(best, logprobs.amax(dim=1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [16, 0])
@pytest.mark.parametrize("topology", ["alone", "1P1D"])
async def test_loglikelihoods_equal_transformers(topology: str, chunk_tokens: int) -> None:
    model = reference_model(TINY)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1) for prompt in PROMPTS]
    async with (
        services(TINY, TOPOLOGIES[topology], "grpc", chunk_tokens) as infos,
        routed(infos) as router,
        http_client(router, TINY) as client,
    ):
        for _ in ("cold", "warm"):
            for num_tokens in (0, 1, 8):
                choices = await ask(client, echo=True, logprobs=1, max_tokens=num_tokens)
                assert_loglikelihoods(choices, expected, num_tokens)
            choices = await ask(client, prompt_logprobs=2, max_tokens=2)
            for choice, prompt, logprobs in zip(choices, PROMPTS, expected, strict=True):
                listed = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
                own = torch.tensor([found[str(i)]["logprob"] for found, i in listed])
                torch.testing.assert_close(own, own_of(logprobs, prompt), atol=1e-4, rtol=0)
