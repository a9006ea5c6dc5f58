import math
import random
from collections.abc import Sequence
from itertools import product

import pytest

from diptych.cluster.front.beams.search import Beam, BeamSearch

VOCAB, END = 4, 3


def next_logprobs(seed: int, token_ids: tuple[int, ...]) -> list[float]:
    """Log-probabilities of the tokens after these."""
    rng = random.Random(f"{seed} {token_ids}")
    weights = [rng.random() + 0.01 for _ in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def search(seed: int, found: BeamSearch) -> list[Beam]:
    while not found.is_over:
        tops: list[Sequence[tuple[int, float]]] = []
        for beam in found.running:
            best = sorted(enumerate(next_logprobs(seed, beam.token_ids)), key=lambda each: -each[1])
            tops.append(best[: found.num_next])
        found.extend(tops)
    return found.best()


def all_answers(seed: int, max_tokens: int, min_tokens: int, penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    answers: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_tokens + 1):
        for ids in product(range(VOCAB), repeat=length):
            ends = ids[-1] == END and length >= min_tokens
            if END not in ids[:-1] and (ends or (length == max_tokens and ids[-1] != END)):
                total = sum(next_logprobs(seed, ids[:i])[token] for i, token in enumerate(ids))
                answers.append((total / length**penalty, ids))
    return sorted(answers, reverse=True)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("min_tokens", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_with_room_for_all_beams_the_best_answers_are_found(seed: int, min_tokens: int, penalty: float) -> None:
    width = 3**4 * 4
    found = search(seed, BeamSearch(width, 4, {END}, penalty, min_tokens, num_top=1))
    expected = all_answers(seed, 4, min_tokens, penalty)
    assert [beam.token_ids for beam in found] == [ids for _, ids in expected][:width]
    for beam in found:
        assert beam.has_ended == (beam.token_ids[-1] == END)
        assert beam.total == pytest.approx(sum(entry.logprob for entry in beam.logprobs))
        assert [entry.token_id for entry in beam.logprobs] == list(beam.token_ids)
        assert all(len(entry.top) == 1 for entry in beam.logprobs)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0, -2.0])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_what_ends_early_would_have_found_nothing_better(
    width: int, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = [search(seed, BeamSearch(width, 12, {END}, penalty)) for seed in range(20)]
    steps: list[int] = []
    monkeypatch.setattr(BeamSearch, "_best_possible", lambda self: steps.append(1) or math.inf)
    assert [search(seed, BeamSearch(width, 12, {END}, penalty)) for seed in range(20)] == early
    assert steps


def test_an_end_outside_the_best_is_none() -> None:
    found = BeamSearch(1, 8, {END}, 0.0)
    found.extend([[(0, -0.1), (END, -2.0)]])
    assert [beam.token_ids for beam in found.running] == [(0,)]
    found.extend([[(END, -0.1), (1, -0.2)]])
    assert found.is_over and [beam.token_ids for beam in found.best()] == [(0, END)]
