"""What is not plain, on the CUDA engine with a fake device: the tokens and log-probabilities of eager_steps.py."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.workers.device.device import Device

from ....support.checkpoints import untied_prompts
from ....support.gpu.serving import DRAWN, GREEDY, early, generate, late, load

SAMPLINGS = [
    replace(GREEDY, repetition_penalty=1.4, logprobs=0),
    GREEDY,
    replace(DRAWN, logprobs=3, frequency_penalty=0.5),
    DRAWN,
    replace(DRAWN, min_tokens=5, presence_penalty=0.5, logit_bias={3: 4.0}),
]


@pytest.mark.parametrize("device", [late, early])
def test_what_changes_logits_and_who_asks_for_logprobs(llama: Path, device: Callable[[], Device]) -> None:
    prompts = [prompt for prompt, _ in untied_prompts(llama, seed=5, lengths=[1, 15, 16, 17, 100], max_tokens=16)]
    expected = generate(load(llama, None), prompts, SAMPLINGS)
    run = generate(load(llama, device()), prompts, SAMPLINGS, arrivals=[0, 3, 0, 5, 1], chunk_tokens=16)
    assert run.token_ids == expected.token_ids
    for found, wanted in zip(run.logprobs, expected.logprobs, strict=True):
        assert [p is None for p in found] == [p is None for p in wanted]
        assert [p for p in found if p is not None] == pytest.approx([p for p in wanted if p is not None], abs=1e-4)
