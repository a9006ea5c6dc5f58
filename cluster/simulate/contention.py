"""Fits steps that take longer while another worker of the machine computes: caches, memory and the processes that serve
are shared. Pure.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...workers.costs.step_cost import Weights
from .timing import fit_weights, seconds_of

NUM_ROUNDS = 12
Steps = npt.NDArray[np.float64]  # [n, 6]: a row for each step, columns as step_log_format.COLUMNS
Floats = npt.NDArray[np.float64]


def fit_with_contention(logs: Sequence[Steps], overlaps: Sequence[Floats]) -> tuple[Weights, float]:
    """Weights of steps on a machine that does nothing else, and the share by which a step takes longer beside another
    worker's. `overlaps`: of each step, the share of its time in which another worker computed.

    Weights, contention and a level of each log, which differ by role and by what else ran at the time, are found in
    turn, each with the least squares of relative errors; the levels are 1 on average."""
    steps, overlap = np.concatenate(logs), np.concatenate(overlaps)
    lengths = [len(log) for log in logs]
    levels, contention = np.ones(len(steps)), 0.0
    weights = fit_weights(steps[:, 1:])
    for _ in range(NUM_ROUNDS if overlap.max(initial=0.0) > 0 else 0):
        ratios = steps[:, 5] / predicted(steps, weights)
        parts = np.split(ratios / (1 + contention * overlap), np.cumsum(lengths)[:-1])
        levels = np.repeat([part.mean() for part in parts], lengths)
        levels /= levels.mean()
        ratios = ratios / levels - 1
        contention = max(float((ratios * overlap).sum() / (overlap * overlap).sum()), 0.0)
        alone = steps[:, 1:].copy()
        alone[:, 4] /= levels * (1 + contention * overlap)
        weights = fit_weights(alone)
    return weights, contention


def predicted(steps: Steps, weights: Weights) -> Floats:
    """Seconds of each step, without contention."""
    return seconds_of(steps[:, 1:], np.array(weights))


def overlap_of(steps: Steps, others: Sequence[Steps]) -> Floats:
    """Share of each step's time in which at least one of the others computed, as far as their logs tell."""
    began, seconds = steps[:, 0], steps[:, 5]
    found = np.zeros(len(steps))
    for other in others:
        found = np.maximum(found, (_busy_s(other, began + seconds) - _busy_s(other, began)) / seconds)
    return np.clip(found, 0.0, 1.0)


def _busy_s(steps: Steps, at: Floats) -> Floats:
    """Seconds that a worker has computed until each of some times."""
    began, ends = steps[:, 0], steps[:, 0] + steps[:, 5]
    index = np.searchsorted(began, at)
    total = np.concatenate([[0.0], np.cumsum(steps[:, 5])])[index]
    last_end = np.concatenate([[-np.inf], ends])[index]
    return total - np.maximum(last_end - at, 0.0)
