"""Answers of a beam search equal those of transformers: float32, one worker and 1P1D."""

from typing import Any

import pytest
import torch

from ..support.asgi import http_client
from ..support.checkpoints import random_prompts, reference_model
from ..support.harness import TINY
from .test_exactness import TOPOLOGIES, routed, services

pytestmark = pytest.mark.e2e

PROMPTS = random_prompts(3, [5, 64], vocab_size=500)
SEARCHES = [(4, 1.0), (3, 0.0)]  # width and length penalty
MAX_TOKENS = 10


def answers(model: Any, prompt: list[int], width: int, penalty: float, end_id: int) -> list[list[int]]:
    """Token ids of transformers' answers."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            early_stopping="never",
            eos_token_id=end_id,
            pad_token_id=0,
        )
    rows: list[list[int]] = found[:, len(prompt) :].tolist()
    return [row[: row.index(end_id) + 1] if end_id in row else row for row in rows]


@pytest.mark.parametrize("topology", ["alone", "1P1D"])
async def test_beams_equal_transformers(topology: str) -> None:
    model = reference_model(TINY)
    num_ended = 0
    async with (
        services(TINY, TOPOLOGIES[topology], "grpc", 16) as infos,
        routed(infos) as router,
        http_client(router, TINY) as client,
    ):
        for prompt in PROMPTS:
            for width, penalty in SEARCHES:
                end_id = answers(model, prompt, width, penalty, -1)[-1][5]  # a token on the way of one of them
                body = {
                    "prompt": prompt,
                    "n": width,
                    "max_tokens": MAX_TOKENS,
                    "use_beam_search": True,
                    "length_penalty": penalty,
                    "return_token_ids": True,
                    "ignore_eos": True,
                    "stop_token_ids": [end_id],
                }
                answer = await client.post("/v1/completions", json=body, timeout=120)
                assert answer.status_code == 200, answer.text
                choices = answer.json()["choices"]
                assert [choice["token_ids"] for choice in choices] == answers(model, prompt, width, penalty, end_id)
                num_ended += sum(choice["finish_reason"] == "stop" for choice in choices)
    assert num_ended
