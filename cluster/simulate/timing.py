"""Time of a worker's step: the protocol, and the model whose weights a profile holds (profile.py). Pure."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...workers.costs.step_cost import HIDDEN, LEAST_S, NUM_WEIGHTS, StepCost, StepWork, Weights, step_seconds

NUM_ROUNDS = 8  # of a fit
_HIDDEN_SHARES = (0.0, 0.25, 0.5, 0.75)  # of the steps, whose prompts are thought to be hidden at first
_SAMPLE_DECODES, _SAMPLE_CONTEXTS = (1, 4, 16, 64, 256), (128, 1024, 8192)
_SAMPLE_CHUNKS, _SAMPLE_STARTS = (0, 16, 128, 512, 2048), (0, 4096)


class StepTimer(Protocol):
    """Knows how long a step takes. For a given number of decodes the time rises linearly with their context, or nearly
    so: runs of steps that only decode are summed by that."""

    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class FittedTimer:
    """Time of a step by the six weights of workers/costs/step_cost.py, in seconds."""

    weights: Weights

    def seconds(self, work: StepWork) -> float:
        return step_seconds(self.weights, work)


class KnownCost(StepCost):
    """Step cost that a worker has learned before the simulation begins: one for all workers of a pool."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._weights = list(weights)

    @property
    def is_measured(self) -> bool:
        return True

    @property
    def decode_is_measured(self) -> bool:
        return True

    def add(self, work: StepWork, seconds: float, *, borrowed: bool = False) -> None:
        """Learn nothing more."""


@lru_cache(maxsize=256)  # a plan simulates each of its pools at many rates
def fit_timer(timer: StepTimer) -> Weights:
    """The weights that are nearest to a timer, over steps of many sizes."""
    works: list[StepWork] = []
    for num_decodes in (0, *_SAMPLE_DECODES):
        for context in _SAMPLE_CONTEXTS if num_decodes else (0,):
            decodes = StepWork(num_decodes, num_decodes * context)
            chunks = [decodes.with_chunk(start, n) for n in _SAMPLE_CHUNKS if n for start in _SAMPLE_STARTS]
            works += [decodes, *chunks] if num_decodes else chunks
    rows = [(w.num_decodes, w.num_context, w.num_prefill, w.num_pairs, timer.seconds(w)) for w in works]
    return fit_weights(np.array(rows))


def fit_weights(steps: npt.NDArray[np.float64], *, hides: bool = True) -> Weights:
    """Weights from 0 on, with the least sum of squared errors relative to what they predict. `steps` [n, 5]:
    num_decodes, num_context, num_prefill, num_pairs, seconds. `hides`: some prompts may not make a step longer.

    Which steps those are is assumed, in several ways, and found anew with each fit; the best fit is taken.

    Errors relative to the measured time would favour the fastest steps. So each of a few rounds weighs them by what the
    round before predicts, which leaves no bias where noise is multiplicative (McCullagh and Nelder, Generalized Linear
    Models, §9.2, with a variance that is the square of the mean)."""
    num_prefill = steps[:, 2]
    best, least = np.zeros(NUM_WEIGHTS), np.inf
    for share in _HIDDEN_SHARES if hides else (0.0,):
        weights = _fit_from(steps, num_prefill > np.quantile(num_prefill, share), hides=hides)
        error = float(((steps[:, 4] / np.maximum(seconds_of(steps, weights), LEAST_S) - 1) ** 2).sum())
        if error < least * (1 - 1e-9):
            best, least = weights, error
    fixed, decode, context, prefill, pair, hidden = best.tolist()
    return fixed, decode, context, prefill, pair, hidden


def _fit_from(
    steps: npt.NDArray[np.float64], shows_prompts: npt.NDArray[np.bool_], *, hides: bool
) -> npt.NDArray[np.float64]:
    """Weights, beginning with the assumption which steps are longer for their prompts."""
    seconds, num_prefill = steps[:, 4], steps[:, 2]
    expected, weights = seconds, np.zeros(NUM_WEIGHTS)
    for _ in range(NUM_ROUNDS):
        decodes = np.column_stack([np.ones(len(steps)), steps[:, :2]])
        prompts = np.column_stack([steps[:, 2:4], np.full(len(steps), -1.0 * hides)]) * shows_prompts[:, None]
        features = np.column_stack([decodes, prompts])
        weights = _least_squares(features / expected[:, None], seconds / expected)
        weights[HIDDEN] = min(weights[HIDDEN], weights[0])
        expected = np.maximum(seconds_of(steps, weights), LEAST_S)
        shows_prompts = (num_prefill > 0) & (steps[:, 2:4] @ weights[3:5] > weights[HIDDEN])
    return weights


def seconds_of(steps: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Seconds [n] of steps [n, 4 or more], columns as in `fit_weights`. See step_cost.step_seconds."""
    decodes_s = weights[0] + steps[:, :2] @ weights[1:3]
    return decodes_s + np.maximum(steps[:, 2:4] @ weights[3:5] - weights[HIDDEN], 0.0)


def _least_squares(features: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Weights from 0 on. features [n, m], values [n].

    Of the sets of weights that may be above 0 each is solved without bounds: the best solution that keeps them is
    the optimum (the optimality conditions of Lawson and Hanson, Solving Least Squares Problems, §23.3, hold on one)."""
    num = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    scaled = features / scale
    squares, products = scaled.T @ scaled, scaled.T @ values
    best, least = np.zeros(num), 0.0  # error, less that of no weights
    for mask in range(1, 1 << num):
        columns = [i for i in range(num) if mask >> i & 1]
        own = squares[np.ix_(columns, columns)]
        found = np.linalg.lstsq(own, products[columns], rcond=None)[0]
        if (found < 0).any():
            continue
        error = float(found @ own @ found - 2 * found @ products[columns])
        if error < least - 1e-12 * len(values):
            best, least = np.zeros(num), error
            best[columns] = found
    return best / scale


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Steps in a row that only decode the same sequences: step i (from 0) takes first_s + i · slope_s."""

    began: float
    num_steps: int
    first_s: float
    slope_s: float

    @classmethod
    def of(cls, timer: StepTimer, work: StepWork, num_steps: int, began: float) -> "DecodeRun":
        first = timer.seconds(work)
        if num_steps == 1:
            return cls(began, 1, first, 0.0)
        later = StepWork(work.num_decodes, work.num_context + work.num_decodes * (num_steps - 1))
        return cls(began, num_steps, first, (timer.seconds(later) - first) / (num_steps - 1))

    def slowed(self, factor: float) -> "DecodeRun":
        return DecodeRun(self.began, self.num_steps, self.first_s * factor, self.slope_s * factor)

    def end_of(self, num_steps: int) -> float:
        """Time at which so many of its steps are over."""
        return self.began + num_steps * self.first_s + self.slope_s * (num_steps * (num_steps - 1) / 2)

    def num_over(self, now: float) -> int:
        """Number of its steps that are over by `now`, the last one left out: that ends by an event of its own."""
        low, high = 0, self.num_steps - 1
        if high and self.slope_s == 0.0:
            low = high = min(int((now - self.began) / self.first_s), high)
            while low and self.end_of(low) > now:
                low -= 1
            return low
        while low < high:
            middle = (low + high + 1) // 2
            if self.end_of(middle) <= now:
                low = middle
            else:
                high = middle - 1
        return low
