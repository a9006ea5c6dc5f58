"""Forecasts how many workers each pool needs by the time that a worker started now would serve. Pure.

With a forecast of U worker-seconds a second for prompts and K sequences that decode, and k sequences that a worker may
decode within tpot_s:

    needed = U / BUSY + K / k          U = tokens a second · prompt_token_s (prediction.py)
                                       k = (tpot_s - fixed) / (row + context of a sequence · token)

Costs are the reported ones (step_cost.py). The forecast knows the trend, and after a day what each hour is usually like
(forecast.py); without a start that was measured it looks START_S ahead. A pool grows where more workers are needed in
HOLD_LOOKS looks in a row; for so long as they are needed it does not shrink.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...proto.worker_pb2 import LoadReport
from ..common.config import ClusterConfig
from ..common.prediction import FleetCosts, WorkerCost, prompt_token_s
from .forecast import Forecast, Holt

BUSY = 0.8  # share of its time that a worker may spend on prompts: above it they queue
START_S = 30.0
HOLD_LOOKS = 3
LOOK_S = 1.0

Reports = Mapping[str, Sequence[tuple[str, LoadReport]]]  # of the ready workers of each pool, by worker


@dataclass(slots=True)
class Arrivals:
    """Prompt tokens that come to some workers, by their counters."""

    _counters: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def see(self, reports: Sequence[tuple[str, LoadReport]]) -> int | None:
        """Return how many have come since the last call; None at the first one."""
        before, self._counters = self._counters, {}
        arrived = 0
        for worker, load in reports:
            tokens, waiting = self._counters[worker] = load.num_prefill_tokens, load.num_waiting_tokens
            last_tokens, last_waiting = before.get(worker, (tokens, waiting))
            arrived += max(tokens - last_tokens, 0) + waiting - last_waiting
        return max(arrived, 0) if before else None


@dataclass(slots=True)
class Prompts:
    """Length of the prompts that some workers have admitted, by their counters."""

    _counters: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def see(self, reports: Sequence[tuple[str, LoadReport]]) -> float | None:
        """Return the mean number of tokens to compute of the prompts admitted since the last call; None without any."""
        before, self._counters = self._counters, {}
        num_prompts = num_tokens = 0
        for worker, load in reports:
            prompts, tokens = self._counters[worker] = load.num_prompts, load.num_prompt_tokens - load.num_cached_tokens
            last_prompts, last_tokens = before.get(worker, (prompts, tokens))
            if prompts > last_prompts:
                num_prompts += prompts - last_prompts
                num_tokens += max(tokens - last_tokens, 0)
        return num_tokens / num_prompts if num_prompts else None


@dataclass(slots=True)
class PoolForecast:
    """Forecast of one pool's load."""

    prompts: Forecast = field(default_factory=Forecast)  # tokens a second
    decodes: Forecast = field(default_factory=Forecast)  # sequences
    arrivals: Arrivals = field(default_factory=Arrivals)
    lengths: Prompts = field(default_factory=Prompts)
    prompt_tokens: Holt = field(default_factory=Holt)  # of a prompt, on average
    context: float = 0.0  # tokens of a sequence that decodes
    num_looks: int = 0  # in a row in which more workers were needed than there are


@dataclass(frozen=True, slots=True)
class Need:
    """Workers that a pool needs soon. `is_due`: it was so for long enough to grow."""

    num_workers: int
    is_due: bool
    prompt_tokens_per_s: float
    num_decodes: float
    ahead_s: float


class GrowthForecast:
    """Forecasts of the pools of one cluster that grow and shrink."""

    def __init__(self, config: ClusterConfig) -> None:
        pools = {name: pool for name, pool in config.pools.items() if pool.autoscaled}
        self._highest = {name: pool.bounds[1] for name, pool in pools.items()}
        self._block_sizes = {name: config.worker(name).cache.block_size for name in pools}
        self._tpot_s = config.service_level.tpot_s
        self._costs = FleetCosts()
        self._workers: frozenset[str] = frozenset()
        self._looked_at = float("-inf")
        self.pools = {name: PoolForecast() for name in pools}

    def look(
        self,
        reports: Reports,
        targets: Mapping[str, int],
        starts_s: Mapping[str, float],
        now: float,
        time_of_day_s: float,
    ) -> dict[str, Need] | None:
        """Return what the pools need whose workers have reported. `starts_s`: how long a start of each pool takes. At
        most one look in LOOK_S counts; None for others."""
        elapsed_s = now - self._looked_at
        if elapsed_s < LOOK_S:
            return None
        self._looked_at = now
        self._see_costs(reports)
        found: dict[str, Need] = {}
        for name, pool in self.pools.items():
            loads = reports.get(name, ())
            arrived = pool.arrivals.see(loads)
            if arrived is None or not loads:
                continue
            pool.prompts.see(time_of_day_s, arrived / elapsed_s)
            if (mean := pool.lengths.see(loads)) is not None:
                pool.prompt_tokens.see(mean)
            num_decodes = sum(load.num_decoding for _, load in loads)
            pool.decodes.see(time_of_day_s, num_decodes)
            if num_decodes:
                used = sum(load.num_blocks - load.num_free_blocks for _, load in loads) * self._block_sizes[name]
                pool.context = used / num_decodes
            if self._costs.are_known:
                found[name] = self._need(name, [w for w, _ in loads], targets[name], starts_s.get(name, START_S))
        return found

    def _see_costs(self, reports: Reports) -> None:
        for loads in reports.values():
            for worker, load in loads:
                self._costs.report(worker, load.step_cost)
        workers = frozenset(worker for loads in reports.values() for worker, _ in loads)
        for gone in self._workers - workers:
            self._costs.forget(gone)
        self._workers = workers

    def _need(self, name: str, workers: Sequence[str], target: int, ahead_s: float) -> Need:
        pool = self.pools[name]
        tokens_s, num_decodes = pool.prompts.ahead(ahead_s), pool.decodes.ahead(ahead_s)
        cost = mean_cost([self._costs.of(worker) for worker in workers])
        token_s = prompt_token_s(cost, pool.prompt_tokens.ahead(0))
        needed = tokens_s * token_s / BUSY + num_decodes / self._most_decodes(cost, pool.context)
        num_workers = min(math.ceil(needed), self._highest[name])
        pool.num_looks = pool.num_looks + 1 if num_workers > target else 0
        return Need(num_workers, pool.num_looks >= HOLD_LOOKS, tokens_s, num_decodes, ahead_s)

    def _most_decodes(self, cost: WorkerCost, context: float) -> float:
        """Return how many sequences a worker may decode within the target time; at least one."""
        each_s = cost.decode_s + cost.context_s * context
        return max((self._tpot_s - cost.fixed_s) / each_s, 1.0) if each_s > 0 else math.inf


def mean_cost(costs: Sequence[WorkerCost]) -> WorkerCost:
    names = WorkerCost.__dataclass_fields__
    return WorkerCost(**{name: sum(getattr(cost, name) for cost in costs) / len(costs) for name in names})
