"""Chooses how many tokens each sequence drafts in a step, so that the step yields the most tokens per second. Pure.

The j-th token of sequence i's draft is accepted with g(i, j), the product of the chances of it and of those before it.
A step of n rows yields n tokens without drafts. With those m tokens that are likeliest to be accepted it yields

    (n + sum of their g) / seconds(n + m)      tokens per second (goodput of SmartSpec, Liu et al. 2024, §3)

and m is chosen where that is largest. g falls along each draft, so the likeliest tokens are beginnings of drafts. In a
large batch, where each row costs its share of the step, only tokens that are sure to be accepted would pay: m goes to
0.
"""

from collections.abc import Sequence as SequenceOf

MARGIN = 0.01  # by which a step must yield more with drafts: what is not in its time, and errors of the estimates


def choose_lengths(
    chances: SequenceOf[SequenceOf[float]],
    num_rows: int,
    seconds: SequenceOf[float],
    min_accept: float = 0.0,
) -> list[int]:
    """Return the number of tokens to draft for each sequence, which has `chances`: of each token, if those before it
    are accepted. seconds: of a step with the `num_rows` (>= 1) rows that it has without drafts, with one more, and so
    on up to all that there is room for. Tokens that are accepted with less than `min_accept` are left out."""
    gains = _gains(chances, min_accept)
    return _lengths(gains[: _most_goodput(gains, num_rows, seconds)], len(chances))


def choose_depths(
    chances: SequenceOf[SequenceOf[float]],
    num_rows: int,
    seconds: SequenceOf[float],
    pass_s: SequenceOf[float],
    min_accept: float = 0.0,
) -> list[int]:
    """Return how many tokens a model should draft for each sequence: as `choose_lengths`, where each token of a draft
    takes a pass of the model. pass_s: seconds of a pass of no sequence, of one, and so on up to all."""
    gains = _gains(chances, min_accept)
    tokens, passes_s = float(num_rows), 0.0
    counts = [0] * max(map(len, chances), default=0)  # sequences that draft a token, one token more, ...
    depths = [0] * len(chances)
    best, best_count = (1 + MARGIN) * tokens / seconds[0], 0
    for count, (gain, i) in enumerate(gains[: len(seconds) - 1], 1):
        tokens += gain
        depth = depths[i]
        passes_s += pass_s[counts[depth] + 1] - pass_s[counts[depth]]
        counts[depth] += 1
        depths[i] += 1
        if tokens > best * (seconds[count] + passes_s):
            best, best_count = tokens / (seconds[count] + passes_s), count
    return _lengths(gains[:best_count], len(chances))


def _most_goodput(gains: SequenceOf[tuple[float, int]], num_rows: int, seconds: SequenceOf[float]) -> int:
    """Count of the gains, which fall, with which a step yields the most tokens per second."""
    tokens = float(num_rows)
    best, best_count = (1 + MARGIN) * tokens / seconds[0], 0
    for count, (gain, _) in enumerate(gains[: len(seconds) - 1], 1):
        tokens += gain
        if tokens > best * seconds[count]:
            best, best_count = tokens / seconds[count], count
    return best_count


def _gains(chances: SequenceOf[SequenceOf[float]], min_accept: float) -> list[tuple[float, int]]:
    """Chances that drafted tokens are accepted, the largest first, each with its sequence."""
    gains: list[tuple[float, int]] = []
    for i, each in enumerate(chances):
        gain = 1.0
        for chance in each:
            gain *= chance
            if gain < min_accept:
                break
            gains.append((gain, i))
    gains.sort(key=_gain, reverse=True)
    return gains


def _lengths(chosen: SequenceOf[tuple[float, int]], num_sequences: int) -> list[int]:
    lengths = [0] * num_sequences
    for _, i in chosen:
        lengths[i] += 1
    return lengths


def _gain(each: tuple[float, int]) -> float:
    return each[0]
