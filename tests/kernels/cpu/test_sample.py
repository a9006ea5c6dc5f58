"""The compiled choice of tokens against its twin, workers/sampling/choice.py, over seeds and settings."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.sample import Draw, RowSampler
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.sequence import Sequence
from diptych.workers.sampling.choice import choose, choose_compiled

VOCAB = 1007
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=30.0),
    SamplingParams(temperature=1e-9),
    SamplingParams(min_p=0.02),
    SamplingParams(top_k=1),
    SamplingParams(top_k=50),
    SamplingParams(top_k=VOCAB + 5, temperature=3.0),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=0.999, temperature=20.0),
    SamplingParams(top_k=50, top_p=0.9),
    SamplingParams(min_p=0.01, top_k=300, top_p=0.8, temperature=1.3),
]


def sequence(sampling: SamplingParams) -> Sequence:
    request = Request("request", (1,), sampling, timeout_s=60.0)
    return Sequence("0/0", request, [1, 2], 1, deadline=1e9, arrival=0)


def draw(**of: float | int) -> Draw:
    return Draw(**{"temperature": 1.0, "log_min_p": -math.inf, "top_p": 1.0, **of})


@cache
def cases() -> tuple[torch.Tensor, list[Sequence], list[int]]:
    """Logits surrounded by values that must not be read, and the reference's tokens."""
    torch.manual_seed(0)
    sequences = [sequence(replace(s, seed=seed)) for seed in range(24) for s in SETTINGS]
    padded = torch.full((len(sequences), VOCAB + 9), torch.nan)
    logits = padded[:, :VOCAB]
    logits.copy_(torch.randn(logits.shape) * torch.rand(len(logits), 1) * 6)
    logits[1::2] = logits[1::2].bfloat16().float()  # many ties
    logits[2::3, ::5] = -torch.inf
    return logits, sequences, choose(logits.clone(), sequences).tolist()


def test_is_its_twin(team: Team) -> None:
    logits, sequences, expected = cases()
    before = logits.clone()
    assert choose_compiled(RowSampler(team), logits, sequences) == expected
    assert torch.equal(logits, before)


def test_a_row_is_drawn_the_same_in_any_batch(team: Team) -> None:
    logits, sequences, expected = cases()
    sampler = RowSampler(team)
    some = range(0, len(sequences), 17)
    assert [choose_compiled(sampler, logits[i : i + 1], [sequences[i]])[0] for i in some] == [expected[i] for i in some]
    order = [40, 3, 77]
    assert choose_compiled(sampler, logits[order], [sequences[i] for i in order]) == [expected[i] for i in order]


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 33])
def test_small_vocabularies(team: Team, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    sequences = [sequence(replace(s, seed=seed)) for seed in range(3) for s in SETTINGS]
    logits = torch.randn(len(sequences), vocab_size)
    expected = choose(logits.clone(), sequences).tolist()
    assert choose_compiled(RowSampler(team), logits, sequences) == expected


def test_the_lowest_id_among_equals(team: Team) -> None:
    sampler = RowSampler(team)
    logits = torch.zeros(3, 100)
    logits[1, [40, 41, 99]] = 2.0
    logits[2] = -torch.inf
    assert sampler.sample(logits, [Draw()] * 3) == [0, 40, 0]


def test_every_tie_with_the_last_one_kept_is_kept(team: Team) -> None:
    logits = torch.full((400, 64), -1.0)
    logits[:, 10:20] = 0.0
    draws = [draw(top_k=3, key=key) if key % 2 else draw(top_p=0.01, key=key) for key in range(400)]
    assert set(RowSampler(team).sample(logits, draws)) == set(range(10, 20))


def test_rows_without_a_likely_token_still_give_one_in_range(team: Team) -> None:
    logits = torch.zeros(4, 40)
    logits[0], logits[1], logits[2, 7], logits[3, 7] = torch.nan, -torch.inf, torch.inf, torch.nan
    for of in (Draw(), draw(), draw(top_k=3, top_p=0.5, log_min_p=-2.0)):
        assert all(0 <= token < 40 for token in RowSampler(team).sample(logits, [of] * 4))


@pytest.mark.parametrize("vocab_size", [5, 64, VOCAB])
def test_logsumexp_top_k(team: Team, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    padded = torch.full((6, vocab_size + 3), torch.nan)
    logits = padded[:, :vocab_size]
    logits.copy_(torch.randn(6, vocab_size) * 5)
    logits[1, 0] = -torch.inf
    rows, num_top = [4, 1, 0], min(20, vocab_size)
    totals, ids, values = RowSampler(team).logsumexp_top_k(logits, rows, num_top)
    torch.testing.assert_close(totals, logits[rows].logsumexp(dim=-1))
    top = logits[rows].topk(num_top, dim=-1)
    assert torch.equal(ids, top.indices) and torch.equal(values, top.values)
    alone = RowSampler(team).logsumexp_top_k(logits[1:2], [0], num_top)
    assert torch.equal(alone[0][0], totals[1]) and torch.equal(alone[1][0], ids[1])


def test_the_largest_are_ordered_by_id_among_equals(team: Team) -> None:
    logits = torch.zeros(1, 50)
    logits[0, [9, 30]] = 1.0
    assert RowSampler(team).logsumexp_top_k(logits, [0], 5)[1].tolist() == [[9, 30, 0, 1, 2]]
    assert RowSampler(team).logsumexp_top_k(logits, [0], 0)[1].shape == (1, 0)
