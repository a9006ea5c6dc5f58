"""Tokens that steps with drafts yield are distributed as the target says, whatever is drafted."""

import numpy as np
import pytest
import torch

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.drafting import rows_of, settle
from diptych.workers.core.sequence import DraftEntry, Sequence
from diptych.workers.sampling.sampler import Sampler

NUM_DRAWS, VOCAB_SIZE = 20_000, 12
MOST_CHI_SQUARE = 37.4  # 11 degrees of freedom: above it once in 10,000 seeds


@pytest.mark.parametrize("num_drafted", [1, 2, 3])
def test_the_yield_of_drafts_has_the_distribution_of_the_target(num_drafted: int) -> None:
    """Each of the answers drafts the same likely tokens; the target's next token depends on the position alone."""
    logits = torch.randn(num_drafted + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    wanted = logits.double().softmax(dim=-1).numpy()
    drafted = wanted[:-1].argmax(axis=-1).tolist()
    entries: list[DraftEntry] = []
    for seed in range(NUM_DRAWS):
        request = Request(f"{seed}", (1, 2), SamplingParams(seed=seed, max_tokens=9), 60.0)
        sequence = Sequence(f"0/{seed}", request, [1, 2, 7], 2, deadline=1e9, arrival=seed, num_computed=2)
        entries.append(DraftEntry(sequence, 1 + num_drafted, drafted, "fixed"))
    sampled = Sampler(()).sample(logits.repeat(NUM_DRAWS, 1), rows_of(entries))
    yielded = settle(entries, sampled)
    assert len(yielded) == sum(len(entry.yielded) for entry in entries)
    for position in range(num_drafted + 1):
        tokens = [entry.yielded[position] for entry in entries if len(entry.yielded) > position]
        share = wanted[:position, :][range(position), drafted[:position]].prod()
        spread = (NUM_DRAWS * share * (1 - share)) ** 0.5
        assert abs(len(tokens) - NUM_DRAWS * share) <= 4 * spread  # so often those before were accepted
        counts, expected = np.bincount(tokens, minlength=VOCAB_SIZE), wanted[position] * len(tokens)
        assert ((counts - expected) ** 2 / expected).sum() < MOST_CHI_SQUARE
