"""The sampler: every parameter's effect, the distribution it draws from, and that a batch changes nothing."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.load import library
from diptych.kernels.cpu.sample import RowSampler
from diptych.workers.common.request import Request, SamplingParams, ThoughtBudget
from diptych.workers.core.sequence import SampledToken, Sequence
from diptych.workers.sampling.grammar_masks import GrammarMasks
from diptych.workers.sampling.sampler import Sampler

from ...support.grammars import compiled as compiled_grammar
from ...support.grammars import regex

EOS = 0


def sequence(sampling: SamplingParams, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = ()) -> Sequence:
    request = Request("request", prompt, sampling, timeout_s=60.0)
    return Sequence("0/0", request, [*prompt, *output], len(prompt), deadline=1e9, arrival=0)


@cache
def compiled() -> RowSampler | None:
    found = library()
    return None if found is None else RowSampler(Team(found, 1))


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    """Choice with torch; the compiled kernels, if present, choose the same."""
    tokens = Sampler((EOS,)).sample(logits.clone(), sequences)
    if (rows := compiled()) is not None:
        others = Sampler((EOS,), rows).sample(logits.clone(), sequences)
        for token, other in zip(tokens, others, strict=True):
            assert (other.sequence, other.token_id) == (token.sequence, token.token_id)
            assert other.logprob == pytest.approx(token.logprob)
            assert [p for _, p in other.top] == pytest.approx([p for _, p in token.top])
    return tokens


def draws(logits: list[float], num: int, **sampling: object) -> list[int]:
    """`num` tokens drawn from one row of logits, each under its own seed."""
    sequences = [sequence(SamplingParams(seed=seed, **sampling)) for seed in range(num)]  # type: ignore[arg-type]
    return [t.token_id for t in sample(torch.tensor([logits] * num), sequences)]


def adjusted(logits: list[float], seq: Sequence) -> torch.Tensor:
    """The logits of a greedy choice, found by the bias with which each token wins."""
    rows = torch.tensor([logits])
    Sampler((EOS,)).sample(rows, [seq])
    return rows[0]


def chi_square(tokens: list[int], probabilities: list[float]) -> float:
    expected = [p * len(tokens) for p in probabilities]
    return sum((tokens.count(t) - e) ** 2 / e for t, e in enumerate(expected) if e > 0)


def softmax(logits: list[float]) -> list[float]:
    return torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()


LOGITS = [1.5, -0.3, 0.9, 2.0, -2.0, 0.1, 1.0, -1.0]


def test_greedy_takes_the_lowest_of_equals() -> None:
    rows = torch.tensor([[0.0, 5.0, 5.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    tokens = sample(rows, [sequence(SamplingParams(temperature=0.0))] * 2)
    assert [t.token_id for t in tokens] == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_softmax(temperature: float) -> None:
    tokens = draws(LOGITS, 20_000, temperature=temperature)
    statistic = chi_square(tokens, softmax([x / temperature for x in LOGITS]))
    assert statistic < 29.9  # 7 degrees of freedom: exceeded once in 10,000 seeds


def test_draws_at_successive_positions_follow_softmax() -> None:
    sampling = SamplingParams(seed=11)
    sequences = [sequence(sampling, output=(1,) * i) for i in range(20_000 // 8)]
    tokens = [t.token_id for t in sample(torch.tensor([LOGITS] * len(sequences)), sequences)]
    assert chi_square(tokens, softmax(LOGITS)) < 29.9


def test_a_filtered_draw_follows_the_renormalised_softmax() -> None:
    tokens = draws(LOGITS, 20_000, top_k=3)
    kept = [x if x in sorted(LOGITS)[-3:] else -math.inf for x in LOGITS]
    assert chi_square(tokens, softmax(kept)) < 18.4  # 2 degrees of freedom
    assert set(tokens) == {0, 3, 6}


@pytest.mark.parametrize(
    ("filters", "members"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {0, 3}),
        ({"top_k": 100}, set(range(8))),
        # softmax(LOGITS), largest first: tokens 3 .38, 0 .23, 6 .14, 2 .13, ...
        ({"top_p": 0.37}, {3}),
        ({"top_p": 0.45}, {0, 3}),
        ({"top_p": 0.70}, {0, 3, 6}),
        ({"top_p": 0.9999999}, set(range(8))),
        # Relative to the largest: 1, .61, .37, .33, .15, ...
        ({"min_p": 0.5}, {0, 3}),
        ({"min_p": 0.35}, {0, 3, 6}),
        ({"min_p": 1.0}, {3}),
        # Of the two that top-k leaves, the first has .62 of the mass.
        ({"top_k": 2, "top_p": 0.6}, {3}),
        ({"top_k": 2, "top_p": 0.65}, {0, 3}),
        # Of the three that min-p leaves, the first two have .81.
        ({"min_p": 0.35, "top_p": 0.8}, {0, 3}),
        ({"min_p": 0.35, "top_p": 0.83}, {0, 3, 6}),
        ({"min_p": 0.5, "top_k": 3, "top_p": 0.99}, {0, 3}),
        ({"min_p": 0.35, "temperature": 0.5}, {0, 3}),
    ],
)
def test_filters_leave_exactly_their_members(filters: dict[str, float], members: set[int]) -> None:
    assert set(draws(LOGITS, 3000, **filters)) == members


def test_ties_with_the_last_one_kept_are_kept() -> None:
    logits = [1.0, 3.0, 1.0, 1.0, 0.0]
    assert set(draws(logits, 500, top_k=2)) == {0, 1, 2, 3}
    assert set(draws([2.0] * 5, 500, top_p=0.1)) == set(range(5))


def test_top_p_of_a_flat_distribution_over_a_large_vocabulary() -> None:
    """The nucleus has more tokens than the first search considers."""
    logits = -torch.arange(6000) * 1e-4
    probabilities = logits.double().softmax(0)
    num_kept = int((probabilities.cumsum(0) < 0.7).sum()) + 1
    tokens = draws(logits.tolist(), 400, top_p=0.7)
    assert max(tokens) < num_kept
    assert max(tokens) > 0.9 * num_kept


def test_rows_with_different_filters_do_not_mix() -> None:
    samplings = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=1),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, top_p=0.39),
        SamplingParams(seed=4, min_p=1.0),
        SamplingParams(seed=5, top_k=4, top_p=0.99, min_p=0.01, temperature=1.5),
        SamplingParams(seed=6, logprobs=3),
        SamplingParams(seed=7, repetition_penalty=1.3, presence_penalty=0.5),
    ]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(samplings), 2000, generator=generator) * 3
    sequences = [sequence(s, (1, 2, 3), tuple(range(i))) for i, s in enumerate(samplings)]
    alone = [sample(rows[i : i + 1], [s])[0].token_id for i, s in enumerate(sequences)]
    for seed in range(5):
        order = random.Random(seed).sample(range(len(samplings)), len(samplings))
        together = sample(rows[order], [sequences[i] for i in order])
        assert [t.token_id for t in together] == [alone[i] for i in order]
    best = rows.argmax(dim=-1).tolist()
    assert [alone[i] for i in (1, 2, 4)] == [best[i] for i in (1, 2, 4)]


def test_a_draw_depends_on_seed_and_position() -> None:
    rows = torch.zeros(1, 1000)
    by_seed = {sample(rows, [sequence(SamplingParams(seed=s))])[0].token_id for s in range(50)}
    by_position = {sample(rows, [sequence(SamplingParams(), output=(1,) * n)])[0].token_id for n in range(50)}
    assert min(len(by_seed), len(by_position)) > 40
    # The position counts prompt and output together, so a resumed request continues with the same noise.
    resumed = sequence(SamplingParams(seed=3), (1, 2, 3))
    whole = sequence(SamplingParams(seed=3), (1,), (2, 3))
    assert sample(rows, [resumed])[0].token_id == sample(rows, [whole])[0].token_id


def test_logit_bias() -> None:
    row = adjusted([0.0, 1.0, 2.0, 3.0], sequence(SamplingParams(temperature=0.0, logit_bias={1: 10.0, 3: -2.5})))
    assert row.tolist() == [0.0, 11.0, 2.0, 0.5]


class ReadOnce(dict[int, float]):
    """A bias that may be read until it is `closed`."""

    closed = False

    def _check(self) -> None:
        assert not self.closed, "entries were read again"

    def __iter__(self) -> Iterator[int]:
        self._check()
        return super().__iter__()

    def keys(self) -> Any:
        self._check()
        return super().keys()

    def values(self) -> Any:
        self._check()
        return super().values()

    def items(self) -> Any:
        self._check()
        return super().items()


def test_a_step_reads_no_logit_bias_entry_by_entry() -> None:
    """1,024 entries of 64 siblings are 65,536 a step: they are made into arrays once, with the request."""
    generator = torch.Generator().manual_seed(3)
    rows, given = torch.randn(64, 4096, generator=generator), torch.rand(1024, generator=generator) * 20 - 10
    entries = ReadOnce({4 * i: bias for i, bias in enumerate(given.tolist())})
    sampling = SamplingParams(temperature=0.0, logit_bias=entries)
    entries.closed = True
    # As the front door makes siblings: each with its own seed.
    siblings = [sequence(replace(sampling, seed=i)) for i in range(64)]
    biased = rows.clone()
    biased[:, ::4] += given
    for _ in range(3):
        assert [t.token_id for t in sample(rows, siblings)] == biased.argmax(dim=-1).tolist()


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_all_seen_tokens() -> None:
    seq = sequence(SamplingParams(temperature=0.0, repetition_penalty=2.0), (1, 1, 2), (3, 3))
    assert adjusted([4.0, 4.0, -4.0, 2.0, -1.0], seq).tolist() == [4.0, 2.0, -8.0, 1.0, -1.0]


def test_presence_and_frequency_penalties_see_the_output_only() -> None:
    sampling = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted([1.0] * 4, sequence(sampling, (0, 1), (1, 2, 2, 2))).tolist() == [1.0, 0.25, -0.25, 1.0]
    assert adjusted([1.0] * 4, sequence(sampling, (0, 1))).tolist() == [1.0] * 4


def test_min_tokens_bans_end_and_stop_ids_until_reached() -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=5, stop_token_ids=(2,), logit_bias={2: 100.0})
    logits = [9.0, 1.0, 5.0, 2.0]
    chosen = [sample(torch.tensor([logits]), [sequence(sampling, output=(3,) * num)])[0].token_id for num in range(4)]
    assert chosen == [3, 3, 2, 2]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = [1.0, 2.0, 3.0, 0.5]
    expected = torch.tensor(logits).log_softmax(0).tolist()
    plain = sequence(SamplingParams(temperature=0.0, logprobs=2))
    changed = sequence(SamplingParams(temperature=0.3, top_k=1, logprobs=4, logit_bias={0: 50.0}))
    silent = sequence(SamplingParams(temperature=0.0))
    none_but_own = sequence(SamplingParams(temperature=0.0, logprobs=0))
    tokens = sample(torch.tensor([logits] * 4), [plain, silent, changed, none_but_own])
    assert [t.token_id for t in tokens] == [2, 2, 0, 2]
    assert tokens[0].logprob == pytest.approx(expected[2])
    assert [i for i, _ in tokens[0].top] == [2, 1]
    assert [p for _, p in tokens[0].top] == pytest.approx([expected[2], expected[1]])
    assert (tokens[1].logprob, tokens[1].top) == (None, ())
    assert tokens[2].logprob == pytest.approx(expected[0])
    assert [i for i, _ in tokens[2].top] == [2, 1, 0, 3]
    assert (tokens[3].logprob, tokens[3].top) == (pytest.approx(expected[2]), ())


def test_more_logprobs_than_tokens() -> None:
    [token] = sample(torch.zeros(1, 3), [sequence(SamplingParams(temperature=0.0, logprobs=20))])
    assert len(token.top) == 3


def test_extreme_parameters_stay_in_range() -> None:
    samplings = [
        SamplingParams(temperature=1e-30, seed=1),
        SamplingParams(temperature=100.0, top_p=1e-9),
        SamplingParams(min_p=1.0, top_k=1, top_p=1e-9, temperature=1e-9),
        SamplingParams(repetition_penalty=100.0, presence_penalty=2.0, frequency_penalty=-2.0, seed=2**64 - 1),
    ]
    rows = torch.tensor([LOGITS] * 4) * 1000
    tokens = [t.token_id for t in sample(rows, [sequence(s, output=(1, 2)) for s in samplings])]
    assert tokens[:3] == [3, 3, 3]
    assert 0 <= tokens[3] < 8


def test_sequences_are_answered_in_order() -> None:
    sequences = [sequence(SamplingParams(temperature=float(i % 2), logprobs=i % 3 or None)) for i in range(9)]
    assert [t.sequence for t in sample(torch.zeros(9, 16), sequences)] == sequences


def test_the_largest_logit_is_all_that_plain_greedy_rows_need() -> None:
    greedy = SamplingParams(temperature=0.0)
    others = [
        SamplingParams(),
        replace(greedy, logprobs=0),
        replace(greedy, logit_bias={1: 1.0}),
        replace(greedy, min_tokens=1),
        replace(greedy, repetition_penalty=1.5),
        replace(greedy, presence_penalty=0.5),
        replace(greedy, frequency_penalty=0.5),
    ]
    sampler = Sampler((EOS,))
    begun = sequence(replace(greedy, min_tokens=1), output=(3,))
    assert all(sampler.is_argmax([sequence(greedy), begun], with_masks=masks) for masks in (False, True))
    for other in others:
        assert not any(sampler.is_argmax([begun, sequence(other)], with_masks=masks) for masks in (False, True))
    for masked in (replace(greedy, grammar=regex("a+"), min_tokens=1), replace(greedy, thought=ThoughtBudget(9, 1, 2))):
        assert sampler.is_argmax([begun, sequence(masked)], with_masks=True)
        assert not sampler.is_argmax([begun, sequence(masked)], with_masks=False)


def with_grammar(pattern: str, **given: Any) -> Sequence:
    seq = sequence(SamplingParams(**{"temperature": 0.0, **given}, grammar=regex(pattern)))
    seq.matcher = compiled_grammar(regex(pattern)).matcher(lambda error: pytest.fail(error.message))
    return seq


def sample_masked(logits: torch.Tensor, make: Callable[[], list[Sequence]]) -> list[SampledToken]:
    """Choice with torch; the compiled kernels, if present, choose the same."""
    tokens = Sampler((EOS,), masks=GrammarMasks(1000, (EOS,))).sample(logits.clone(), make())
    if (rows := compiled()) is not None:
        others = Sampler((EOS,), rows, GrammarMasks(1000, (EOS,))).sample(logits.clone(), make())
        assert [token.token_id for token in others] == [token.token_id for token in tokens]
        assert [token.logprob for token in others] == pytest.approx([token.logprob for token in tokens])
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_grammars_row_gets_a_token_that_it_allows_and_other_rows_what_they_would(
    temperature: float, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 1000, generator=generator)
    logits[:, 500] = 20.0

    def make() -> list[Sequence]:
        given: Any = {"temperature": temperature, "top_k": top_k}
        return [
            with_grammar("[a-e]", seed=i, **given) if i % 2 else sequence(SamplingParams(seed=i, **given))
            for i in range(6)
        ]

    tokens = sample_masked(logits, make)
    allowed = {ord(letter) + 1 for letter in "abcde"}
    assert all(token.token_id in allowed for token in tokens[1::2])
    assert [token.token_id for token in tokens[::2]] == [500] * 3


def test_log_probabilities_are_those_of_logits_that_no_grammar_has_masked() -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(6))
    [token] = sample_masked(logits, lambda: [with_grammar("b", logprobs=2)])
    assert token.token_id == ord("b") + 1
    assert token.logprob == pytest.approx(logits[0].log_softmax(-1)[token.token_id].item(), abs=1e-5)
    assert [i for i, _ in token.top] == logits[0].topk(2).indices.tolist()


def test_penalties_and_biases_choose_among_what_a_grammar_allows() -> None:
    a, b = ord("a") + 1, ord("b") + 1
    logits = torch.zeros(1, 1000)
    logits[0, a], logits[0, b] = 2.0, 1.0
    [token] = sample_masked(logits, lambda: [with_grammar("[abc]", logit_bias={a: -3.0, 7: 100.0})])
    assert token.token_id == b


def test_min_tokens_bans_the_end_unless_a_grammar_allows_nothing_else() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, EOS] = 9.0
    [token] = sample_masked(logits, lambda: [with_grammar("a?", min_tokens=2, max_tokens=4)])
    assert token.token_id == ord("a") + 1
    [token] = sample_masked(logits, lambda: [with_grammar("", min_tokens=2, max_tokens=4)])
    assert token.token_id == EOS
