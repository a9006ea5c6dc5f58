"""Chances that were calibrated come true; sequences that fail are tried again, more and more rarely."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.workers.speculation.acceptance import LONGEST_WAIT, MAX_CHANCE, Acceptance

VERIFIED = st.lists(st.tuples(st.integers(0, 3), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.data()))


def verify(acceptance: Acceptance, key: str, rng: random.Random, truth: float, said: float, drafts: int = 200) -> None:
    for i in range(drafts):
        num_accepted = next((j for j in range(4) if rng.random() >= truth), 4)
        acceptance.add(key, i, [said] * 4, num_accepted)


@pytest.mark.parametrize("truth", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("said", [0.1, 0.6, 1.0])
def test_chances_become_what_is_accepted_whatever_was_said(truth: float, said: float) -> None:
    acceptance = Acceptance()
    verify(acceptance, "a", random.Random(0), truth, said)
    for key, error in (("a", 0.16), ("new", 0.08)):
        assert acceptance.chances(key, [said])[0] == pytest.approx(truth, abs=error)
        assert acceptance.best_chance(key) == pytest.approx(truth, abs=error)


def test_sequences_differ_and_a_new_one_starts_from_what_is_usual() -> None:
    acceptance, rng = Acceptance(), random.Random(0)
    for _ in range(30):
        verify(acceptance, "good", rng, 0.9, 0.5, drafts=10)
        verify(acceptance, "bad", rng, 0.1, 0.5, drafts=10)
    good, new, bad = (acceptance.chances(key, [0.5])[0] for key in ("good", "new", "bad"))
    assert bad < 0.3 < new < 0.8 < good


def test_what_was_surer_stays_surer() -> None:
    acceptance, rng = Acceptance(), random.Random(0)
    for _ in range(300):
        verify(acceptance, "a", rng, 0.2, 0.35, drafts=1)
        verify(acceptance, "a", rng, 0.9, 0.85, drafts=1)
    unsure, sure = acceptance.chances("a", [0.35, 0.85])
    assert unsure == pytest.approx(0.2, abs=0.15)
    assert sure == pytest.approx(0.9, abs=0.15)


def test_one_token_more_accepted_never_lowers_a_chance() -> None:
    for num_accepted in range(4):
        fewer, more = Acceptance(), Acceptance()
        for acceptance, num in ((fewer, num_accepted), (more, num_accepted + 1)):
            acceptance.add("a", 10, [0.5] * 4, num)
        assert more.chances("a", [0.5])[0] > fewer.chances("a", [0.5])[0]


@given(VERIFIED)
def test_chances_stay_probabilities(drafts) -> None:
    acceptance = Acceptance()
    for name, said, data in drafts:
        acceptance.add(str(name), 1, said, data.draw(st.integers(0, len(said))))
        assert all(0 <= chance <= MAX_CHANCE for chance in acceptance.chances(str(name), said))
        assert 0 <= acceptance.best_chance(str(name)) <= MAX_CHANCE


def test_a_sequence_that_fails_is_tried_more_and_more_rarely_and_soon_after_a_success() -> None:
    acceptance, num_tokens, tried = Acceptance(), 0, list[int]()
    assert acceptance.is_due("a", 0)
    while num_tokens < 4096:
        if acceptance.is_due("a", num_tokens):
            tried.append(num_tokens)
            acceptance.add("a", num_tokens, [0.5], 0)
        num_tokens += 1
    waits = [b - a for a, b in itertools.pairwise(tried)]
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_WAIT
    acceptance.add("a", num_tokens, [0.5], 1)
    assert acceptance.is_due("a", num_tokens + 8)


def test_a_sequence_that_ended_is_forgotten() -> None:
    acceptance = Acceptance()
    verify(acceptance, "other", random.Random(0), 0.5, 0.5)
    acceptance.add("a", 10, [0.5] * 4, 0)
    acceptance.ended("a")
    acceptance.ended("never seen")
    assert acceptance.chances("a", [0.5]) == acceptance.chances("new", [0.5])
    assert acceptance.is_due("a", 0)
