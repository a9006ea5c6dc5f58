"""Sampling with tensors of settings against the sampler of a worker, which takes sequences."""

from dataclasses import replace

import numpy as np
import torch

from diptych.kernels.sampling.logits_processors import IN_PROMPT, LogitsProcessors, count_tokens, process_logits
from diptych.kernels.sampling.logsumexp import logsumexp_top_k
from diptych.kernels.sampling.sampling import Draws, sample
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.sequence import Sequence
from diptych.workers.sampling.choice import draw_of
from diptych.workers.sampling.sampler import Sampler

VOCAB, EOS = 1007, 3
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, min_p=0.02),
    SamplingParams(temperature=1e-9),
    SamplingParams(top_k=50, temperature=3.0),
    SamplingParams(top_k=VOCAB + 5, top_p=0.9),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.01, top_k=300, top_p=0.8, temperature=1.3),
    SamplingParams(repetition_penalty=1.7, temperature=0.0),
    SamplingParams(repetition_penalty=0.6, presence_penalty=0.3, frequency_penalty=-0.2, top_p=0.95),
    SamplingParams(frequency_penalty=1.1, logit_bias={5: 9.0, EOS: 50.0, 77: -100.0}, min_tokens=9, max_tokens=10),
]


def sequences() -> list[Sequence]:
    found: list[Sequence] = []
    for seed in range(12):
        numbers = np.random.default_rng(seed)
        for sampling in SETTINGS:
            prompt = tuple(numbers.integers(VOCAB, size=20).tolist())
            request = Request("request", prompt, replace(sampling, seed=seed), timeout_s=60.0)
            output = numbers.integers(VOCAB, size=seed).tolist() * 2
            found.append(Sequence("0/0", request, [*prompt, *output], len(prompt), deadline=1e9, arrival=0))
    return found


def changes_of(rows: list[Sequence]) -> LogitsProcessors:
    """What an engine would keep on its device."""
    samplings = [s.request.sampling for s in rows]
    bias_ids: list[int] = []
    biases: list[float] = []
    starts = [0]
    counts = torch.zeros(len(rows), VOCAB, dtype=torch.int32)
    for row, (sequence, sampling) in enumerate(zip(rows, samplings, strict=True)):
        asked = dict(sampling.logit_bias)
        if sequence.num_output < sampling.min_tokens:
            asked[EOS] = -torch.inf
        bias_ids += asked
        biases += asked.values()
        starts.append(len(biases))
        prompt, output = (torch.tensor(ids) for ids in (sequence.request.prompt_token_ids, sequence.output_token_ids))
        for ids, amount in ((prompt, IN_PROMPT), (output.long(), 1)):
            count_tokens(counts, torch.full((len(ids),), row, dtype=torch.int32), ids, amount)
    none = torch.full((len(rows),), -1, dtype=torch.int32)
    return LogitsProcessors(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(bias_ids, dtype=torch.int32),
        torch.tensor(biases),
        none,
        torch.zeros(0, -(-VOCAB // 32), dtype=torch.int32),
        torch.arange(len(rows), dtype=torch.int32),
        counts,
        torch.tensor([s.repetition_penalty for s in samplings]),
        torch.tensor([s.presence_penalty for s in samplings], dtype=torch.float64),
        torch.tensor([s.frequency_penalty for s in samplings], dtype=torch.float64),
    )


def test_a_device_samples_what_a_worker_samples() -> None:
    rows = sequences()
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    logits[1::2] = logits[1::2].bfloat16().float()  # many ties
    expected = logits.clone()
    tokens = [token.token_id for token in Sampler((EOS,)).sample(expected, rows)]
    process_logits(logits, changes_of(rows))
    how = [draw_of(sequence, sequence.num_tokens) for sequence in rows]
    draws = Draws(
        torch.tensor([d.temperature for d in how]),
        torch.tensor([d.log_min_p for d in how]),
        torch.tensor([d.top_p for d in how]),
        torch.tensor([d.top_k for d in how], dtype=torch.int32),
        torch.from_numpy(np.array([d.key for d in how], dtype=np.uint64).view(np.int64)),
    )
    assert sample(logits, draws).tolist() == tokens


def test_logsumexp_top_k() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).round()
    totals, ids, values = logsumexp_top_k(logits, 6)
    assert torch.equal(values, logits.gather(1, ids)) and torch.equal(totals, logits.logsumexp(-1))
    for row in range(5):
        order = sorted(range(40), key=lambda i: (-float(logits[row, i]), i))
        assert ids[row].tolist() == order[:6]
