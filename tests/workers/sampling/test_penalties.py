"""Penalties by counts that follow a sequence, against counts that are made anew."""

import random
from weakref import ReferenceType, ref

import pytest
import torch

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.sequence import DraftedRow, SampledRow, Sequence
from diptych.workers.sampling import penalties as penalties_module
from diptych.workers.sampling.penalties import Penalties, TokenCounts

VOCAB = 50
SAMPLING = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)


def make(prompt: list[int], output: list[int], sampling: SamplingParams = SAMPLING) -> Sequence:
    request = Request("request", tuple(prompt), sampling, timeout_s=60.0)
    return Sequence("0/0", request, [*prompt, *output], len(prompt), deadline=1e9, arrival=0)


def plain(logits: torch.Tensor, row: SampledRow) -> torch.Tensor:
    """The row's logits, token by token. The powers of two in SAMPLING make the result exact."""
    found = logits.clone()
    for token_id in range(VOCAB):
        if token_id in row.token_ids:
            found[token_id] = found[token_id] / 1.5 if found[token_id] > 0 else found[token_id] * 1.5
        if num := row.output_token_ids.count(token_id):
            found[token_id] -= 0.5 + 0.25 * num
    return found


def test_follow_sequences_and_their_drafts() -> None:
    choose, penalties = random.Random(0), Penalties()
    sequences = [make(choose.choices(range(VOCAB), k=20), choose.choices(range(VOCAB), k=num)) for num in (0, 1, 30)]
    for step in range(12):
        drafts = [[choose.randrange(VOCAB) for _ in range(num + step % 3)] for num in range(3)]
        rows: list[SampledRow] = [*sequences, *(DraftedRow(*pair) for pair in zip(sequences, drafts, strict=True))]
        logits = torch.randn(len(rows), VOCAB)
        expected = torch.stack([plain(*pair) for pair in zip(logits, rows, strict=True)])
        penalties.apply(logits, rows)
        assert torch.equal(logits, expected)
        for sequence in sequences[step % 2 :]:  # another number of tokens each, as runs and drafts bring
            sequence.token_ids += choose.choices(range(VOCAB), k=step)


def test_a_step_reads_no_token_that_was_counted_before() -> None:
    """A long context would take longer with every token that it gains."""
    penalties, sequence, logits = Penalties(), make([1, 2, 2], [3, 3]), torch.randn(2, 1, VOCAB)
    penalties.apply(logits[0], [sequence])
    expected = plain(logits[1][0], make([1, 2, 2], [3, 3, 4]))
    sequence.token_ids[:] = [5, 5, 5, 5, 5, 4]
    penalties.apply(logits[1], [sequence])
    assert torch.equal(logits[1][0], expected)


def test_counts_live_as_long_as_their_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ReferenceType[TokenCounts]] = []

    def count(first: int) -> TokenCounts:
        made.append(ref(found := TokenCounts(first)))
        return found

    monkeypatch.setattr(penalties_module, "TokenCounts", count)
    penalties, sequences = Penalties(), [make([1], [2]) for _ in range(3)]
    penalties.apply(torch.randn(3, VOCAB), sequences)
    assert [counts() is not None for counts in made] == [True] * 6  # of all tokens, and of the output
    del sequences[1:]
    assert [counts() is not None for counts in made] == [True] * 2 + [False] * 4
