"""Chooses how many tokens each sequence drafts in a step, so that the step yields the most tokens per second. Pure.

The j-th token of sequence i's draft is accepted with g(i, j), the product of the chances of it and of those before it.
A step of n rows yields n tokens without drafts. With those m tokens that are likeliest to be accepted it yields

    (n + sum of their g) / seconds(n + m)      tokens per second (goodput of SmartSpec, Liu et al. 2024, §3)

and m is chosen where that is largest. g falls along each draft, so the likeliest tokens are beginnings of drafts. In a
large batch, where each row costs its share of the step, only tokens that are sure to be accepted would pay: m goes to
0.
"""

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # passes of a model that are considered
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
    draft_s: float = 0.0,
) -> list[int]:
    """Return how many tokens a model should draft for each sequence: as `choose_lengths`, where the j-th token of all
    drafts takes one pass of the model. pass_s: seconds of a pass of no sequence, of one, and so on up to all. draft_s:
    seconds that a step takes longer with any draft, beside passes.

    Passes are shared, so the best is sought for each number of passes of `DEPTHS`."""
    best, depths = (1 + MARGIN) * num_rows / seconds[0], [0] * len(chances)
    most = max(map(len, chances), default=0)
    for depth in DEPTHS[: bisect_left(DEPTHS, most) + 1]:
        gains = _gains([each[:depth] for each in chances], min_accept)
        goodput, count = _most_goodput_of_passes(gains, num_rows, seconds, pass_s, draft_s)
        if goodput <= best:
            break
        best, depths = goodput, _lengths(gains[:count], len(chances))
    return depths


def _most_goodput_of_passes(
    gains: SequenceOf[tuple[float, int]],
    num_rows: int,
    seconds: SequenceOf[float],
    pass_s: SequenceOf[float],
    draft_s: float,
) -> tuple[float, int]:
    """The most tokens per second of a step with the first of the gains, and of how many."""
    tokens, passes_s, best, best_count = float(num_rows), draft_s, 0.0, 0
    depths: dict[int, int] = {}  # by sequence
    counts = [0] * (DEPTHS[-1] + 1)  # sequences, by the tokens that they draft at least
    for count, (gain, i) in enumerate(gains[: len(seconds) - 1], 1):
        tokens += gain
        depth = depths[i] = depths.get(i, 0) + 1
        passes_s += pass_s[counts[depth] + 1] - pass_s[counts[depth]]
        counts[depth] += 1
        goodput = tokens / (seconds[count] + passes_s)
        if goodput > best:
            best, best_count = goodput, count
    return best, best_count


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
