"""Predicts how many requests will miss their service level if a request takes a route. Pure.

Each worker reports what its steps cost, in the six weights of step_cost.py. With them, of a worker with k sequences
that decode, n prompt tokens that wait before ours, and a share u of its time by which prompts make steps longer:

    t      = fixed + k · row + context · token             time of a step that only decodes
    TTFT   = t + (prefill time of what waits and of ours) / (what a step computes of prompts, by its time)
    TPOT   = t / (1 - u), at most the time to which the scheduler keeps steps (promised_target_s)

Late prompts, which let others go first, do not wait before ours. A step computes prompts for `hidden` seconds before it
takes longer. u is what the worker measured lately and, if it is more, the delay by what waits there as a share of the
next HORIZON levels of TTFT.
A prediction x of a time that may be `level` at most is missed with the probability

    F(x / level),  F(r) = rⁿ / (1 + rⁿ)

the log-logistic distribution of prediction errors. n is 4; for TPOT of a worker that keeps its steps to the promised
time it is 12: elsewhere one prompt more or less decides. So a time far below the level costs nothing, one far above
costs no more than one request: who is late already is not made room for at others' cost. A decode worker that is handed
a sequence is judged without the prompts that it computed lately (as_sink): if prompts go elsewhere as this one does,
they end. Else a cluster in which each worker does everything would see no gain in the first hand-off. The
cost of a route is the expected number of misses: that of the request itself, and by how much (h) it raises those of the
sequences that decode on its workers. h counts as h / (1 + h), so less than a miss that is certain: otherwise all
requests would go to the one worker whose sequences are late already, and be late there.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from ...proto import worker_pb2
from ...workers.common.errors import InternalError
from ...workers.core.scheduler_config import LEAST_PREFILL_TOKENS
from ...workers.costs.step_cost import promised_target_s

HORIZON = 2.0  # in TTFT levels: time over which the prompts that wait are counted
MAX_COST_S = 1e6
LEAST_S = 1e-9  # of prompts in a step, where a token takes no time
MAX_SHARE = 0.95  # of a worker's time for prompts, in TPOT: all of it would be an endless step


@dataclass(frozen=True, slots=True)
class Level:
    """Service level of a request, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """Cost of a worker's steps, in seconds."""

    fixed_s: float
    decode_s: float  # of a sequence that decodes
    context_s: float  # of a token that it attends to
    prefill_s: float  # of a prompt token
    pair_s: float  # of a prompt token and one that it attends to
    hidden_s: float = 0.0  # of the prompts of a step, that do not make it longer


class FleetCosts:
    """Costs of all workers, each with the mean for what it has not measured: a worker that only decodes does not
    know what a prompt costs."""

    def __init__(self) -> None:
        self._reported: dict[str, tuple[_Values, _Values]] = {}  # of decodes and of prompts
        self._measured: dict[str, WorkerCost] = {}  # of workers that have measured all
        self._prefill = _Means(3)
        self._decode = _Means(3)

    def report(self, worker: str, cost: worker_pb2.StepCost) -> None:
        decode = _decode_values(cost) if cost.decode_is_measured else ()
        prefill = _prefill_values(cost) if cost.prefill_is_measured else ()
        self._change(worker, decode, prefill)
        self._reported[worker] = decode, prefill
        if decode and prefill:
            self._measured[worker] = WorkerCost(*decode, *prefill)
        else:
            self._measured.pop(worker, None)

    def forget(self, worker: str) -> None:
        """Idempotent."""
        self._change(worker, (), ())
        self._reported.pop(worker, None)
        self._measured.pop(worker, None)

    def has_measured(self, worker: str) -> bool:
        """Return whether the worker has measured all its costs."""
        return worker in self._measured

    @property
    def are_known(self) -> bool:
        """True once some worker has measured prompts, and some worker steps that decode."""
        return self._prefill.num > 0 and self._decode.num > 0

    def of(self, worker: str) -> WorkerCost:
        """Cost of a worker, where `are_known`."""
        measured = self._measured.get(worker)
        if measured is not None:
            return measured
        decode, prefill = self._reported.get(worker, ((), ()))
        return WorkerCost(*(decode or self._decode.values()), *(prefill or self._prefill.values()))

    def _change(self, worker: str, decode: "_Values", prefill: "_Values") -> None:
        """Count what the worker has measured now in place of what it had. Empty: not measured."""
        old_decode, old_prefill = self._reported.get(worker, ((), ()))
        self._decode.change(old_decode, decode)
        self._prefill.change(old_prefill, prefill)


_Values = tuple[float, ...]


class _Means:
    """Means of a few quantities over workers that come and go."""

    def __init__(self, num_quantities: int) -> None:
        self.num = 0
        self._sums = self._zeros = (0.0,) * num_quantities

    def change(self, old: _Values, new: _Values) -> None:
        """Add a worker's values in place of its old ones; either may be empty."""
        self.num += bool(new) - bool(old)
        rows = zip(self._sums, old or self._zeros, new or self._zeros, strict=True)
        self._sums = tuple([total - before + now for total, before, now in rows])

    def values(self) -> list[float]:
        return [max(total / self.num, 0.0) for total in self._sums]


def _prefill_values(cost: worker_pb2.StepCost) -> tuple[float, float, float]:
    return cost.prefill_s, cost.pair_s, cost.hidden_s


def _decode_values(cost: worker_pb2.StepCost) -> tuple[float, float, float]:
    return cost.fixed_s, cost.decode_s, cost.context_s


@dataclass(slots=True)
class WorkerState:
    """Load of one worker, as routes are judged by it. `is_decoder`: it has the role of a decode worker."""

    prefill_budget: int  # prompt tokens of a step beside decodes
    step_tokens: int  # that budget where nothing but the step's own limits it
    num_decodes: int
    num_context: int  # tokens
    waiting_tokens: int  # of prompts
    prefill_share: float  # of its time, lately
    is_decoder: bool = False
    late_tokens: int = 0  # of waiting_tokens, those of prompts that let others go first


@dataclass(slots=True)
class WorkerTimes:
    """Times of a worker as it stands, without the request that a route is looked for: computed once for each change of
    its state. Times in seconds. `as_sink`: those of a decode worker without its prompts of lately."""

    cost: WorkerCost
    num_decodes: int
    step_s: float  # of a step that only decodes
    begin_s: float  # that a first token takes beside its prompt
    queue_s: float  # prefill time of the prompts that wait, but for those that let a new one go first
    stretch: float  # by how much its decodes stretch the time of a prompt
    delay: float  # share of a prompt's time that makes its steps longer
    share: float  # of its time by which prompts make steps longer; may be more than 1
    num_missing: float  # expected number of its sequences that miss their TPOT
    goal_s: float  # TPOT of those sequences, at most
    horizon_s: float  # time over which prompts that wait are counted
    is_bounded: bool = False  # its steps are kept to the promised time
    least_harm: float = 0.0  # decode_harm of any request that decodes there, at least
    least_misses: float = 0.0  # that and the probability that it misses a TPOT of `goal_s` or less, at least
    as_sink: "WorkerTimes | None" = None  # None: the same

    @classmethod
    def of(cls, w: WorkerState, cost: WorkerCost, level: Level) -> Self:
        """`level`: the service level of the sequences that run there."""
        num_decodes, goal_s = w.num_decodes, level.tpot_s
        step_s = cost.fixed_s + cost.decode_s * num_decodes + cost.context_s * w.num_context
        # What the lengths of waiting prompts add is not known.
        queue_s = w.waiting_tokens * cost.prefill_s
        ahead_s = max(w.waiting_tokens - w.late_tokens, 0) * cost.prefill_s  # before a request that can be in time
        horizon_s = HORIZON * level.ttft_s
        is_bounded = w.prefill_budget < w.step_tokens
        begin_s, stretch, delay = step_s, 1.0, 1.0
        if not num_decodes:
            begin_s = max(step_s - cost.hidden_s, 0.0)
        elif is_bounded:
            stretch, delay = _beside_decodes(w, cost, step_s, goal_s)
        share = max(w.prefill_share, queue_s * delay / horizon_s)
        times = cls(
            cost, num_decodes, step_s, begin_s, ahead_s, stretch, delay, share, 0.0, goal_s, horizon_s, is_bounded
        )
        if num_decodes:
            times.num_missing = num_decodes * tpot_miss(times, _stretched(times, step_s, 0.0) / goal_s)
            tpot, times.least_harm = decode_times(times, 0.0, 0)
            times.least_misses = times.least_harm + tpot_miss(times, tpot / goal_s)
        if w.is_decoder and w.prefill_share:
            times.as_sink = cls.of(replace(w, prefill_share=0.0), cost, level)
        return times


def prompt_token_s(cost: WorkerCost, prompt_tokens: float) -> float:
    """Return the time (s) of a token, in the mean of a prompt of so many tokens that has none of them cached."""
    return cost.prefill_s + cost.pair_s * prompt_tokens / 2


def prefill_s(times: WorkerTimes, num_cached: int, num_tokens: int) -> float:
    """Return the time (s) that the prompt's tokens take which the worker has not cached."""
    cost, num_new = times.cost, num_tokens - num_cached
    return num_new * (cost.prefill_s + cost.pair_s * (num_cached + num_new / 2))


def prompt_misses(times: WorkerTimes, num_cached: int, num_tokens: int, level_s: float) -> tuple[float, float, float]:
    """Return prefill_s, ttft_s divided by its level, and miss_probability of that: what each decision computes of each
    worker, in one call."""
    cost, num_new = times.cost, num_tokens - num_cached
    own_s = num_new * (cost.prefill_s + cost.pair_s * (num_cached + num_new / 2))
    ratio = (times.begin_s + (times.queue_s + own_s) * times.stretch) / level_s
    r2 = ratio * ratio
    r4 = r2 * r2
    return own_s, ratio, r4 / (1.0 + r4)


def ttft_s(times: WorkerTimes, own_s: float) -> float:
    """Predict TTFT (s) of a request whose prompt takes the worker `own_s` seconds."""
    return times.begin_s + (times.queue_s + own_s) * times.stretch


def tpot_s(times: WorkerTimes, own_s: float, num_tokens: int) -> float:
    """Predict TPOT (s) of a request that decodes there from `num_tokens` tokens on; `own_s`: time that its prompt takes
    there too."""
    step_s = times.step_s + times.cost.decode_s + times.cost.context_s * num_tokens
    return _stretched(times, step_s, own_s)


def decode_times(times: WorkerTimes, own_s: float, num_tokens: int) -> tuple[float, float]:
    """Return tpot_s once the request's prompt is computed, and decode_harm of tpot_s until then."""
    cost, num_decodes, share = times.cost, times.num_decodes, times.share
    step_s = times.step_s + cost.decode_s + cost.context_s * num_tokens
    bound_s = promised_target_s(times.goal_s, step_s, cost.fixed_s, cost.hidden_s) if times.is_bounded else math.inf
    after_s = step_s / (1 - (share if share < MAX_SHARE else MAX_SHARE))
    after_s = bound_s if bound_s < after_s else after_s
    if not num_decodes:
        return after_s, 0.0
    share += own_s * times.delay / times.horizon_s
    until_s = step_s / (1 - (share if share < MAX_SHARE else MAX_SHARE))
    ratio = (bound_s if bound_s < until_s else until_s) / times.goal_s
    r2 = ratio * ratio
    power = r2 * r2  # as in tpot_miss, without a call
    if times.is_bounded:
        power *= power * power
    harm = num_decodes * (power / (1.0 + power)) - times.num_missing
    return after_s, (harm / (1 + harm) if harm > 0 else harm)


def prefill_harm(times: WorkerTimes, own_s: float) -> float:
    """Predict by how much a prompt raises the number of the worker's sequences that miss their TPOT, as it counts."""
    return decode_harm(times, _stretched(times, times.step_s, own_s)) if times.num_decodes else 0.0


def decode_harm(times: WorkerTimes, tpot_s: float) -> float:
    """Predict by how much that number rises where the worker's TPOT becomes `tpot_s`, as it counts."""
    if not times.num_decodes:
        return 0.0
    harm = times.num_decodes * tpot_miss(times, tpot_s / times.goal_s) - times.num_missing
    return harm / (1 + harm) if harm > 0 else harm


def _stretched(times: WorkerTimes, step_s: float, own_s: float) -> float:
    """TPOT (s) where decodes alone take `step_s`, with the prompts there and one more of `own_s`."""
    share = times.share + own_s * times.delay / times.horizon_s
    tpot = step_s / (1 - (share if share < MAX_SHARE else MAX_SHARE))
    if times.is_bounded:
        bound = promised_target_s(times.goal_s, step_s, times.cost.fixed_s, times.cost.hidden_s)
        return bound if bound < tpot else tpot
    return tpot


def miss_probability(ratio: float) -> float:
    """F: probability that a time is missed which is predicted at `ratio` times its level."""
    r2 = ratio * ratio
    r4 = r2 * r2
    return r4 / (1.0 + r4)


def decode_miss_probability(ratio: float) -> float:
    """F of a TPOT that hardly depends on single prompts: of a decode worker, or of a whole group on average."""
    return miss_probability(ratio * ratio * ratio)


def tpot_miss(times: WorkerTimes, ratio: float) -> float:
    """F of a TPOT of the worker that is predicted at `ratio` times its level."""
    r2 = ratio * ratio
    power = r2 * r2
    if times.is_bounded:
        power *= power * power
    return power / (1.0 + power)


def prompts_beside_s(cost: WorkerCost, step_s: float, goal_s: float) -> float:
    """Return for how long (s) prompts are computed in a step whose decodes take `step_s`, and were promised a TPOT of
    `goal_s`: a few tokens at least."""
    found_s = promised_target_s(goal_s, step_s, cost.fixed_s, cost.hidden_s) - step_s + cost.hidden_s
    return max(found_s, LEAST_PREFILL_TOKENS * cost.prefill_s, LEAST_S)


def _beside_decodes(w: WorkerState, cost: WorkerCost, step_s: float, goal_s: float) -> tuple[float, float]:
    """Return `stretch` and `delay` of a worker whose steps with decodes are bounded, in time and in prompt tokens."""
    chunk_s = prompts_beside_s(cost, step_s, goal_s)
    budget_s = (w.prefill_budget or LEAST_PREFILL_TOKENS) * cost.prefill_s
    if 0 < budget_s < chunk_s:
        chunk_s = budget_s
    longer_s = max(chunk_s - cost.hidden_s, 0.0)
    return (step_s + longer_s) / chunk_s, longer_s / chunk_s


def check_step_cost(load: worker_pb2.LoadReport) -> None:
    """Raise InternalError for costs that cannot be."""
    cost = load.step_cost
    values = (*_decode_values(cost), *_prefill_values(cost))
    if not all(0 <= value < MAX_COST_S for value in values) or not 0 <= load.prefill_share <= 1:
        raise InternalError(f"a load report has impossible costs ({values}) or share of prompts ({load.prefill_share})")
