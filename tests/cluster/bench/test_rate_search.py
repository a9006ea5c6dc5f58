"""The search for a rate, against servers that are functions: share of good requests by rate."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from diptych.cluster.bench.rate_search import Bracket, Search, Trial, bracket_of, next_rate, share_at

SENT = 1000


def search_with(good: Callable[[float], int], search: Search) -> list[Trial]:
    """Trials until the search ends. `good`: of SENT requests, by rate."""
    trials: list[Trial] = []
    while (rate := next_rate(trials, search)) is not None:
        trials.append(Trial(rate, good(rate), SENT))
        assert len(trials) < 200
    return trials


def capacity(limit: float) -> Callable[[float], int]:
    """All requests are good up to `limit`, half of them above."""
    return lambda rate: SENT if rate <= limit else SENT // 2


def test_the_steps_are_those_computed_by_hand() -> None:
    # 1 and 2 hold, 4 fails; sqrt(2 * 4) fails, sqrt(2 * 2.828) holds: 2.378 and 2.828 are 19 % apart.
    trials = search_with(capacity(2.5), Search(0.9, 1.0, 0.2))
    rates = [trial.rate for trial in trials]
    assert rates == pytest.approx([1, 2, 4, 2**1.5, 2**1.25, 2**1.25, 2**1.5])
    assert bracket_of(trials, 0.9) == Bracket(rates[4], rates[3])


@pytest.mark.parametrize("limit", [0.03, 0.7, 1.0, 3.3, 40.0])
@pytest.mark.parametrize("width", [0.2, 0.02])
def test_the_limit_is_within_the_width(limit: float, width: float) -> None:
    trials = search_with(capacity(limit), Search(0.99, 1.0, width))
    found = bracket_of(trials, 0.99)
    assert found.holds is not None and found.fails is not None
    assert found.holds <= limit < found.fails <= found.holds * (1 + width) * (1 + 1e-9)
    times = Counter(trial.rate for trial in trials)
    assert times[found.holds] == times[found.fails] == 2


def test_a_share_that_falls_with_the_rate_gives_each_share_its_limit() -> None:
    # good = 1 - rate / 100: 90 % at 10, 99 % at 1.
    def good(rate: float) -> int:
        return round(SENT * (1 - rate / 100))

    for share, limit in ((0.9, 10.0), (0.99, 1.0)):
        found = bracket_of(search_with(good, Search(share, 3.0, 0.05)), share)
        assert found.holds == pytest.approx(limit, rel=0.06)


def test_trials_for_one_share_serve_another() -> None:
    trials = search_with(capacity(2.5), Search(0.9, 1.0, 0.05))
    assert next_rate(trials, Search(0.99, 1.0, 0.05)) is None
    assert bracket_of(trials, 0.9) == bracket_of(trials, 0.99)


def test_no_limit_in_reach_ends_the_search() -> None:
    never = search_with(lambda _: 0, Search(0.9, 1.0, 0.05))
    assert bracket_of(never, 0.9) == Bracket(None, 2.0**-12)
    always = search_with(lambda _: SENT, Search(0.9, 1.0, 0.05))
    assert bracket_of(always, 0.9) == Bracket(2.0**12, None)


def test_trials_of_a_rate_count_together() -> None:
    trials = [Trial(2.0, 95, 100), Trial(2.0, 80, 100), Trial(3.0, 85, 100), Trial(3.0, 97, 100)]
    assert share_at(trials, 2.0) == 0.875 and share_at(trials, 3.0) == 0.91
    # 3 holds, but 2 fails below it.
    assert bracket_of(trials, 0.9) == Bracket(None, 2.0)
    assert bracket_of(trials, 0.8) == Bracket(3.0, None)


def test_a_lucky_trial_is_found_out() -> None:
    # The limit is 2; the first trial at 4 is lucky.
    lucky = [True]

    def good(rate: float) -> int:
        return SENT if rate <= 2 or (rate == 4.0 and lucky and lucky.pop()) else SENT // 2

    found = bracket_of(search_with(good, Search(0.9, 1.0, 0.1)), 0.9)
    assert found.holds == 2.0 and found.fails is not None and found.fails <= 2.2


def test_an_unlucky_trial_is_found_out() -> None:
    # The limit is 6; the first trial at 4 is unlucky, and without a second one the answer were below 4.
    unlucky = [True]

    def good(rate: float) -> int:
        return SENT // 2 if rate > 6 or (rate == 4.0 and unlucky and unlucky.pop()) else SENT

    trials = search_with(good, Search(0.75, 1.0, 0.1))
    found = bracket_of(trials, 0.75)
    assert found.holds is not None and 6 / 1.1 <= found.holds <= 6


def test_noise_neither_hangs_the_search_nor_carries_it_far() -> None:
    for seed in range(200):
        rng = Random(seed)

        def good(rate: float, rng: Random = rng) -> int:
            share = max(0.0, min(1.0, 1.3 - rate / 10 + rng.gauss(0, 0.02)))  # 90 % at 4
            return round(SENT * share)

        found = bracket_of(search_with(good, Search(0.9, 1.0, 0.05)), 0.9)
        assert found.holds is not None and 3.0 <= found.holds <= 4.8


def test_exact_trials_need_no_second_look() -> None:
    rates = [trial.rate for trial in search_with(capacity(2.5), Search(0.9, 1.0, 0.2, num_checks=1))]
    assert rates == pytest.approx([1, 2, 4, 2**1.5, 2**1.25])


def test_a_search_ends_where_it_is_told_to() -> None:
    rates = [trial.rate for trial in search_with(lambda _: 0, Search(0.9, 1.0, 0.05, most_steps=3))]
    assert rates == [1, 0.5, 0.25, 0.125]
