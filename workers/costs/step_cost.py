"""Estimates the time of a step from those that ran. Pure: times come in.

    seconds = fixed + a · decode rows + b · context tokens read + max(prompts - hidden, 0)
    prompts = c · prefill tokens + d · pairs attended by them

A step reads its weights whatever it computes: prompts that are computed meanwhile cost nothing, up to `hidden` (the
roofline's ridge; Williams et al. 2009). The six weights are the least squares of relative errors over past steps, older
ones counting less, none of them below zero, and `hidden` at most `fixed`. They are found by coordinate descent on the
normal equations, from where the last step's ended: what the steps do not tell apart stays as it was, and nothing grows
without bound, as recursive least squares do with steps that are all alike (wind-up; Åström and Wittenmark, Adaptive
Control, §11.5). A step whose prompts are all hidden tells of its decodes alone; where such steps take longer than those
that only decode, less is hidden than was thought. About 15 µs a step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MEMORY_STEPS = 200  # a step that long ago counts 1/e
LOAD_TPOT_S = 0.04  # of steps with prompts, where no TPOT is promised; docs/performance.md has figures of other values
NUM_ROUNDS = 2  # of descent, a step
NUM_NEEDED = 8  # steps before the first prediction
NUM_NEEDED_WITH_PREFILL = 2  # of those
FORGOTTEN = 1e-200  # a decayed sum this small is no evidence: the weight stays
TPOT_MARGIN = 0.9  # of a promised TPOT, that a step aims at: steps take longer than predicted, too
LOAD_DECODE_STEPS = 3.0  # where no TPOT is promised: two thirds, see target_s
LATE_STEP = 0.05  # of the usual TTFT, that a step of late prompts takes: longer ones would make more requests late
LATE_DECODE_STEPS = 3.0  # at least, whatever TTFT is: shorter steps would mostly read weights
WAITING_PER_LEFT = 4.0  # prompt tokens waiting for each that the decodes may still make, that add one to those steps
ANSWER_TOKENS = 256  # of those, for each decode on average: few make more
RIDGE = 0.001  # pulls `hidden` to 0 where chunks are of one size, so that steps do not tell it from c
ERROR_STEPS = 32  # over which errors are averaged
LONGER = 0.05  # by which steps with hidden prompts must take longer, relative to others, until less counts as hidden
LESS, MORE = 0.98, 1.01  # a step changes the most that may be hidden by these factors
MOST_STRETCH = 4.0  # of a prompt's time by decodes: beyond that a few more of them would decide
OUTLIER = 4.0  # a step counts as at most this many times its predicted time


Weights = tuple[float, float, float, float, float, float]  # seconds, in the order of StepCost.weights
NUM_WEIGHTS, HIDDEN = 6, 5
LEAST_S = 1e-6  # that a fit expects of a step


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step."""

    num_decodes: int = 0
    num_context: int = 0  # tokens that the decodes read
    num_prefill: int = 0  # tokens
    num_pairs: float = 0.0  # of each of those with every token that it attends to

    def with_chunk(self, start: int, num_new: int) -> "StepWork":
        """The work with one more chunk: `num_new` tokens, from position `start` on."""
        pairs = num_new * (start + (num_new + 1) / 2)
        return StepWork(self.num_decodes, self.num_context, self.num_prefill + num_new, self.num_pairs + pairs)


class Uncomputed(Protocol):
    """Sequence whose prompt is under way, as far as a budget knows it."""

    num_computed: int

    @property
    def num_uncomputed(self) -> int: ...


@dataclass(slots=True)
class Budget:
    """Budget of one step's prefill. `work`: what the step has to do so far."""

    num_tokens: int
    work: StepWork
    target_s: float = math.inf  # with prefill

    @property
    def is_spent(self) -> bool:
        return self.num_tokens <= 0

    def take(self, cost: "StepCost", start: int, num_new: int, least: int) -> int:
        """Take a chunk of at most `num_new` tokens, from position `start` on; returns its length, perhaps 0. Whatever
        the target is, the step's prompts may have `least` tokens."""
        num_new = min(num_new, self.num_tokens)
        if self.target_s < math.inf:
            fitting = cost.prefill_tokens(self.work, start, self.target_s)
            if fitting < num_new:  # and nothing after it
                self.num_tokens = num_new = min(num_new, max(fitting, least - self.work.num_prefill))
        if num_new > 0:
            self.work = self.work.with_chunk(start, num_new)
            self.num_tokens -= num_new
        return num_new

    def keep(
        self, cost: "StepCost", under_way: Sequence["Uncomputed"], chunk_tokens: int, least: int
    ) -> tuple[list[int], int | None]:
        """Take off what each prompt under way keeps: all that it lacks if it ends so, or half of what is left. Returns
        that, and the index of the last one that does not end. Tokens count as those of the first prompt, of which a
        target allows the fewest; chunk_tokens: at most so many of each, 0: no limit."""
        kept: list[int] = []
        last: int | None = None
        num_tokens = self.num_tokens
        if under_way and self.target_s < math.inf:
            fitting = cost.prefill_tokens(self.work, under_way[0].num_computed, self.target_s)
            self.num_tokens = min(num_tokens, max(fitting, least))
        num_beyond = num_tokens - self.num_tokens
        for i, prompt in enumerate(under_way):
            num_kept, longest = prompt.num_uncomputed, chunk_tokens or self.num_tokens
            if num_kept > min(self.num_tokens, longest):
                last, num_kept = i, min(longest, (self.num_tokens + 1) // 2)
            kept.append(num_kept)
            self.num_tokens -= num_kept
        if kept:
            kept[0] += num_beyond
        return kept, last


class StepCost:
    def __init__(self) -> None:
        self._weights = [0.0] * NUM_WEIGHTS  # seconds
        self._squares = [[0.0] * NUM_WEIGHTS for _ in range(NUM_WEIGHTS)]  # faded sum of x xᵀ
        self._products = [0.0] * NUM_WEIGHTS  # faded sum of x · seconds
        self._most_hidden_s = math.inf
        self._decode_error = 0.0  # mean of measured / expected - 1, of steps that only decode
        self._hidden_error = 0.0  # the same of steps whose prompts are thought to be hidden
        self._num_steps = 0
        self._num_with_prefill = 0
        self._num_with_decodes = 0

    @property
    def is_measured(self) -> bool:
        """True once enough steps were measured to say what a prompt costs."""
        return self._num_steps >= NUM_NEEDED and self._num_with_prefill >= NUM_NEEDED_WITH_PREFILL

    @property
    def decode_is_measured(self) -> bool:
        return self._num_with_decodes >= NUM_NEEDED

    @property
    def weights(self) -> Weights:
        """Seconds of a step, a decode row, a context token, a prefill token, a pair of tokens, and of prompts that a
        step hides."""
        fixed, decode, context, prefill, pair, hidden = self._weights
        return fixed, decode, context, prefill, pair, hidden

    def add(self, work: StepWork, seconds: float, *, borrowed: bool = False) -> None:
        """Add a measured step. A time that cannot be is ignored. borrowed: it ran on more cores than the next may have,
        so that it counts only until enough steps are known."""
        if not (seconds > 0 and math.isfinite(seconds)) or (borrowed and self.is_measured and self.decode_is_measured):
            return
        expected = seconds
        if self.is_measured:
            expected = max(self.seconds(work), LEAST_S)
            seconds = min(seconds, OUTLIER * expected)
        is_hidden = 0 < self._prompts_s(work) <= self._weights[HIDDEN]
        if is_hidden:
            self._bound_hidden(seconds / expected - 1)
        elif not work.num_prefill:
            self._decode_error += (seconds / expected - 1 - self._decode_error) / ERROR_STEPS
        scale = 1 / expected
        x = [value * scale for value in _features(work, is_hidden=is_hidden)]
        y = seconds * scale
        fade = 1 - 1 / MEMORY_STEPS
        for i, row in enumerate(self._squares):
            self._products[i] = fade * self._products[i] + x[i] * y
            for j in range(NUM_WEIGHTS):
                row[j] = fade * row[j] + x[i] * x[j]
        self._num_steps += 1
        self._num_with_prefill += work.num_prefill > 0
        self._num_with_decodes += work.num_decodes > 0
        for _ in range(NUM_ROUNDS):
            self._descend()

    def seconds(self, work: StepWork) -> float:
        return step_seconds(self._weights, work)

    def delay_s(self, work: StepWork, seconds: float) -> float:
        """Time (s) by which a step that took `seconds` was longer for its chunks. Before its decodes' time is known:
        their share of its tokens."""
        if self.decode_is_measured:
            return max(seconds - self.seconds(StepWork(work.num_decodes, work.num_context)), 0.0)
        return seconds * work.num_prefill / (work.num_prefill + work.num_decodes)

    def prefill_tokens(self, work: StepWork, start: int, seconds: float) -> int:
        """The most tokens of a prompt, from position `start` on, with which a step of `work` takes at most `seconds`,
        or no longer than its decodes alone: the root of d/2 · n² + (c + d · (start + 1/2)) · n = what is left."""
        longer_s = max(seconds - self.seconds(StepWork(work.num_decodes, work.num_context)), 0.0)
        left = longer_s + self._weights[HIDDEN] - self._prompts_s(work)
        if left <= 0:
            return 0
        per_token = self._weights[3] + self._weights[4] * (start + 0.5)
        half = self._weights[4] / 2
        denominator = per_token + math.sqrt(per_token * per_token + 4 * half * left)
        return int(min(2 * left / denominator, 1 << 30)) if denominator > 0 else 1 << 30

    def stretch(self, decodes: StepWork, seconds: float) -> float:
        """Factor by which a prompt takes longer in steps of `seconds` beside `decodes` than alone."""
        if seconds == math.inf:
            return 1.0
        prompts_s = seconds - self.seconds(decodes) + self._weights[HIDDEN]
        return min(seconds / prompts_s, MOST_STRETCH) if prompts_s > 0 else MOST_STRETCH

    def _prompts_s(self, work: StepWork) -> float:
        return self._weights[3] * work.num_prefill + self._weights[4] * work.num_pairs

    def _bound_hidden(self, error: float) -> None:
        """Take in the error of a step whose prompts were thought to be hidden: the fit does not see what they cost."""
        self._hidden_error += (error - self._hidden_error) / ERROR_STEPS
        if self._hidden_error - self._decode_error > LONGER:
            self._most_hidden_s = LESS * min(self._most_hidden_s, self._weights[HIDDEN])
        else:
            self._most_hidden_s *= MORE

    def _descend(self) -> None:
        weights = self._weights
        for i, row in enumerate(self._squares):
            if row[i] > FORGOTTEN:
                others = sum([row[j] * weights[j] for j in range(NUM_WEIGHTS) if j != i])
                weights[i] = max(0.0, (self._products[i] - others) / (row[i] * (1 + RIDGE * (i == HIDDEN))))
        weights[HIDDEN] = min(weights[HIDDEN], weights[0], self._most_hidden_s)


def step_seconds(weights: Sequence[float], work: StepWork) -> float:
    """Time (s) of a step by weights in the order of StepCost.weights."""
    fixed, decode, context, prefill, pair, hidden = weights
    prompts_s = prefill * work.num_prefill + pair * work.num_pairs
    return fixed + decode * work.num_decodes + context * work.num_context + max(prompts_s - hidden, 0.0)


def _features(work: StepWork, *, is_hidden: bool) -> tuple[float, float, float, float, float, float]:
    """Factors of the weights. `is_hidden`: the step's prompts are."""
    if is_hidden or not work.num_prefill:
        return 1.0, work.num_decodes, work.num_context, 0.0, 0.0, 0.0
    return 1.0, work.num_decodes, work.num_context, work.num_prefill, work.num_pairs, -1.0


def promised_target_s(tpot_s: float, decodes_s: float, fixed_s: float, hidden_s: float) -> float:
    """Longest time (s) that a step may take which computes prompts beside decodes that were promised `tpot_s` and take
    `decodes_s` alone. Where that is too long for the promise, prompts still have the time that each step takes
    (`fixed_s`), less the part of it that hides them (`hidden_s`)."""
    by_promise_s, by_decodes_s = TPOT_MARGIN * tpot_s, decodes_s + fixed_s - 2 * hidden_s
    found = by_decodes_s if by_decodes_s > by_promise_s else by_promise_s  # called for each worker: max() takes longer
    return found if found > decodes_s else decodes_s


def target_s(tpot_s: float, cost: StepCost, decodes: StepWork, num_waiting: int, num_left: int) -> float:
    """Find `promised_target_s` where `tpot_s` may be infinite: none is promised. Then, for decodes that may make
    `num_left` more tokens, it grows with the prompt tokens (`num_waiting`) that wait for each of those. Prompts that
    wait hardly delay long answers, and the last tokens of short answers delay few prompts."""
    if tpot_s < math.inf:
        weights = cost.weights
        return promised_target_s(tpot_s, cost.seconds(decodes), weights[0], weights[HIDDEN])
    num_left = min(num_left, ANSWER_TOKENS * decodes.num_decodes)
    steps = LOAD_DECODE_STEPS + num_waiting / (WAITING_PER_LEFT * num_left)
    return max(LOAD_TPOT_S, steps * cost.seconds(decodes))


def late_target_s(ttft_s: float, cost: StepCost, work: StepWork) -> float:
    """Longest time (s) of a step with prompts that are late, beside the decodes of `work`, where TTFT is to be `ttft_s`
    and prompts come that can be in time: they begin when the step ends."""
    decodes_s = cost.seconds(StepWork(work.num_decodes, work.num_context))
    return max(LATE_STEP * ttft_s, LATE_DECODE_STEPS * decodes_s)
