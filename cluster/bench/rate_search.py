"""Searches for the highest request rate at which a share of the requests meets the service level. Pure: takes the
trials measured so far, and returns the rate to measure next.

double or halve the first rate   ──>   bisect until the two rates are   ──>   measure either rate  ──>  done, or bisect
until one holds and one fails          within a relative width                once more                 again

A trial is noisy, so trials at the same rate count together, and a rate holds on the share of all of them. The limit is
the highest rate that holds below the lowest one that fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

MOST_STEPS = 12
NUM_CHECKS = 2
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Trial:
    """Requests sent at a rate (per second), and how many of them met the service level."""

    rate: float
    good: int
    sent: int


@dataclass(frozen=True, slots=True)
class Search:
    """Search for one share, 0 to 1. `first`: rate to begin with; `width`: (fails - holds) / holds at which it ends;
    `num_checks`: trials of each of the two final rates, 1 where trials are exact; `most_steps`: doublings or halvings
    of the first rate."""

    share: float
    first: float
    width: float
    num_checks: int = NUM_CHECKS
    most_steps: int = MOST_STEPS


@dataclass(frozen=True, slots=True)
class Bracket:
    """Highest rate known to hold and lowest known to fail; None where there is none."""

    holds: float | None
    fails: float | None


def bracket_of(trials: Sequence[Trial], share: float) -> Bracket:
    rates = sorted({trial.rate for trial in trials})
    failing = [rate for rate in rates if not _holds(trials, rate, share)]
    fails = failing[0] if failing else None
    holding = [rate for rate in rates if fails is None or rate < fails]
    return Bracket(holding[-1] if holding else None, fails)


def next_rate(trials: Sequence[Trial], search: Search) -> float | None:
    """Rate of the next trial; None when the search has ended."""
    at = bracket_of(trials, search.share)
    if at.holds is None or at.fails is None:
        return _wider(at, search)
    if at.fails / at.holds - 1 > search.width:
        return sqrt(at.holds * at.fails)
    return next((rate for rate in (at.holds, at.fails) if len(_trials_at(trials, rate)) < search.num_checks), None)


def share_at(trials: Sequence[Trial], rate: float) -> float:
    """Share of good requests of all trials at that rate."""
    found = _trials_at(trials, rate)
    return sum(trial.good for trial in found) / sum(trial.sent for trial in found)


def _wider(at: Bracket, search: Search) -> float | None:
    """Twice the rate that holds, half the one that fails, or the first; None where no limit is in reach."""
    rate = search.first
    if at.holds is not None:
        rate = at.holds * 2
    elif at.fails is not None:
        rate = at.fails / 2
    reach = 2.0**search.most_steps
    return rate if search.first / reach <= rate <= search.first * reach else None


def _holds(trials: Sequence[Trial], rate: float, share: float) -> bool:
    return share_at(trials, rate) >= share - EPSILON


def _trials_at(trials: Sequence[Trial], rate: float) -> list[Trial]:
    return [trial for trial in trials if trial.rate == rate]
