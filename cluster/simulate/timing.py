"""Time of a worker's step: the protocol, and the linear model whose weights a profile holds (profile.py). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...workers.costs.step_cost import StepCost, StepWork

Weights = tuple[float, float, float, float, float]
NUM_ROUNDS = 8  # of a fit
LEAST_S = 1e-6  # that a fit predicts for a step
_SAMPLE_DECODES, _SAMPLE_CONTEXTS = (1, 4, 16, 64, 256), (128, 1024, 8192)
_SAMPLE_CHUNKS, _SAMPLE_STARTS = (0, 16, 128, 512, 2048), (0, 4096)


class StepTimer(Protocol):
    """Knows how long a step takes. For a given number of decodes the time rises linearly with their context, or nearly
    so: runs of steps that only decode are summed by that."""

    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearTimer:
    """Time of a step by the five weights of workers/costs/step_cost.py, in seconds."""

    weights: Weights

    def seconds(self, work: StepWork) -> float:
        fixed, decode, context, prefill, pair = self.weights
        return (
            fixed
            + decode * work.num_decodes
            + context * work.num_context
            + prefill * work.num_prefill
            + pair * work.num_pairs
        )


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


def fit_timer(timer: StepTimer) -> Weights:
    """The five weights that are nearest to a timer, over steps of many sizes."""
    works: list[StepWork] = []
    for num_decodes in (0, *_SAMPLE_DECODES):
        for context in _SAMPLE_CONTEXTS if num_decodes else (0,):
            decodes = StepWork(num_decodes, num_decodes * context)
            chunks = [decodes.with_chunk(start, n) for n in _SAMPLE_CHUNKS if n for start in _SAMPLE_STARTS]
            works += [decodes, *chunks] if num_decodes else chunks
    rows = [(w.num_decodes, w.num_context, w.num_prefill, w.num_pairs, timer.seconds(w)) for w in works]
    return fit_weights(np.array(rows))


def fit_weights(steps: npt.NDArray[np.float64]) -> Weights:
    """Weights from 0 on, with the least sum of squared errors relative to what they predict. `steps` [n, 5]:
    num_decodes, num_context, num_prefill, num_pairs, seconds.

    Errors relative to the measured time would favour the fastest steps. So each of a few rounds weighs them by what the
    round before predicts, which leaves no bias where noise is multiplicative (McCullagh and Nelder, Generalized Linear
    Models, §9.2, with a variance that is the square of the mean)."""
    seconds = steps[:, 4]
    features = np.column_stack([np.ones(len(steps)), steps[:, :4]])
    predicted = seconds
    weights = np.zeros(5)
    for _ in range(NUM_ROUNDS):
        weights = _least_squares(features / predicted[:, None], seconds / predicted)
        predicted = np.maximum(features @ weights, LEAST_S)
    return _five(weights.tolist())


def _least_squares(features: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Weights from 0 on. features [n, 5], values [n].

    Of the 31 sets of weights that may be above 0 each is solved without bounds: the best solution that keeps them is
    the optimum (the optimality conditions of Lawson and Hanson, Solving Least Squares Problems, §23.3, hold on one)."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    scaled = features / scale
    best, least = np.zeros(5), np.inf
    for mask in range(1, 32):
        columns = [i for i in range(5) if mask >> i & 1]
        found = np.linalg.lstsq(scaled[:, columns], values, rcond=None)[0]
        if (found < 0).any():
            continue
        error = float(((scaled[:, columns] @ found - values) ** 2).sum())
        if error < least * (1 - 1e-9):
            best, least = np.zeros(5), error
            best[columns] = found
    return best / scale


def _five(values: Sequence[float]) -> Weights:
    fixed, decode, context, prefill, pair = values
    return fixed, decode, context, prefill, pair


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
