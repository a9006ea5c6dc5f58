"""Prompts: their lengths, their seeds and their shared prefixes; arrival times."""

from array import array
from pathlib import Path

import numpy as np
import pytest

from diptych.cluster.bench.text import TextSource, TokenText, WordText
from diptych.cluster.bench.workloads import (
    Lengths,
    arrivals,
    multi_turn_sessions,
    random_sessions,
    shared_prefix_sessions,
)
from diptych.cluster.tokens.tokenizer import Tokenizer
from diptych.workers.common.errors import ConfigError

TINY = Path(__file__).parents[3] / "examples" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ids(text: object) -> list[int]:
    assert isinstance(text, array)
    return text.tolist()


def test_lengths() -> None:
    assert Lengths.parse("128", "--x") == Lengths(128, 128)
    assert Lengths.parse("4-6", "--x") == Lengths(4, 6)
    generator = rng()
    assert {Lengths(4, 6).draw(generator) for _ in range(100)} == {4, 5, 6}


@pytest.mark.parametrize("text", ["", "x", "0", "6-4", "-4", "4-", "1.5", "99999999999"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--x must be"):
        Lengths.parse(text, "--x")


def test_random_sessions_repeat_with_the_seed_alone() -> None:
    def made(seed: int) -> list[list[int]]:
        sessions = random_sessions(20, Lengths(5, 9), Lengths(3, 4), TokenText(500), rng(seed))
        assert all(5 <= s.turns[0].num_tokens == len(ids(s.turns[0].text)) <= 9 for s in sessions)
        assert {s.turns[0].max_tokens for s in sessions} == {3, 4}
        return [ids(s.turns[0].text) for s in sessions]

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert all(10 <= i < 500 for prompt in made(1) for i in prompt)
    assert len({tuple(prompt) for prompt in made(1)}) == 20


def test_shared_prefixes_are_shared_evenly() -> None:
    source = TokenText(500)
    plain = random_sessions(12, Lengths(5, 5), Lengths(3, 3), source, rng())
    sessions = shared_prefix_sessions(plain, 3, 40, source, rng())
    prefixes = [tuple(ids(s.turns[0].text)[:40]) for s in sessions]
    assert sorted(prefixes.count(p) for p in set(prefixes)) == [4, 4, 4]
    assert len({tuple(ids(s.turns[0].text)[40:]) for s in sessions}) == 12
    assert {s.turns[0].num_tokens for s in sessions} == {45}


def test_conversations_have_turns() -> None:
    sessions = multi_turn_sessions(30, Lengths(2, 4), (Lengths(5, 5), Lengths(7, 7)), TokenText(500), rng())
    assert {len(s.turns) for s in sessions} == {2, 3, 4}
    assert {(t.num_tokens, t.max_tokens) for s in sessions for t in s.turns} == {(5, 7)}


def test_words_are_as_many_tokens(tokenizer: Tokenizer) -> None:
    source = WordText(tokenizer)
    for num in (1, 2, 17, 300):
        text = source.make(num, rng(num))
        assert isinstance(text, str)
        assert len(tokenizer.encode(text, special=False)) == num
    first, second = source.make(30, rng(1)), source.make(9, rng(2))
    joined = source.join([first, second])
    assert isinstance(first, str) and isinstance(joined, str)
    beginning = tokenizer.encode(first, special=False)
    assert tokenizer.encode(joined, special=False)[:30] == beginning
    cut = source.cut(joined, 30)
    assert cut == first


@pytest.mark.parametrize("kind", ["ids", "words"])
def test_both_sources_cut_and_join(kind: str, tokenizer: Tokenizer) -> None:
    source: TextSource = TokenText(500) if kind == "ids" else WordText(tokenizer)
    parts = [source.make(4, rng(i)) for i in range(3)]
    joined = source.join(parts)
    assert source.cut(joined, 12) == joined
    assert source.cut(joined, 8) == source.join(parts[:2])


def test_a_vocabulary_too_small_is_named() -> None:
    with pytest.raises(ConfigError, match="--vocab-size must be above"):
        TokenText(10)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, variation: float) -> None:
    """Of a gamma distribution the coefficient of variation is 1 / sqrt(shape)."""
    instants = arrivals(20_001, 8.0, burstiness, rng())
    gaps = np.diff(instants)
    assert instants[0] == 0.0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert arrivals(5, 8.0, burstiness, rng(3)) == arrivals(5, 8.0, burstiness, rng(3))
    assert arrivals(1, 8.0, burstiness, rng()) == [0.0]
