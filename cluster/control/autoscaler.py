"""Decides how many workers each pool should have, from its load and the service level. Pure: loads in, targets out.

A pool grows when it breaks its service level on several looks in a row and shrinks, one worker at a time, only after it
would have kept it with one worker less for a long while: growing late costs latency, shrinking early costs a start.

    prefill   tokens that wait / tokens that one worker computes in ttft_s; waiting requests before a rate is known
    decode    KV use against a ceiling, and tokens a second of each sequence against 1 / tpot_s
    mixed     the larger of the two
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from ...proto.worker_pb2 import LoadReport
from ..common.config import ClusterConfig, ServiceLevel

KV_CEILING = 0.8  # above it, sequences are soon preempted
LOOK_S = 1.0
GROW_AFTER = 3  # checks in a row
SHRINK_AFTER = 60
WAITING_PER_QUEUE = 4  # requests that may wait at a worker whose speed is not known yet


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Sums over the pool's ready workers; rates are per second. A gang counts as one worker, of which each member has a
    queue."""

    num_workers: int
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # not yet prefilled
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    kv_use: float = 0.0  # 0..1, of the pool's blocks
    gang_size: int = 1

    @property
    def queue_limit(self) -> int:
        """Requests that may wait at one worker."""
        return WAITING_PER_QUEUE * self.gang_size


@dataclass(frozen=True, slots=True)
class Bounds:
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Trend:
    """Looks in a row that asked for more and for fewer workers than the target."""

    grow: int = 0
    shrink: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    trend: Trend


def targets(
    loads: Mapping[str, PoolLoad],
    level: ServiceLevel,
    bounds: Mapping[str, Bounds],
    trends: Mapping[str, Trend],
    current: Mapping[str, int],
) -> dict[str, Decision]:
    """A decision for every pool in `bounds` that has a load; a pool without ready workers is left as it is. `current`:
    the targets. Workers that start or leave make no difference to these: only the load does."""
    return {
        pool: _decide(current[pool], _wanted(pool, loads[pool], level), limit, trends.get(pool, Trend()))
        for pool, limit in bounds.items()
        if pool in loads and loads[pool].num_workers > 0
    }


def _decide(current: int, wanted: int, bounds: Bounds, trend: Trend) -> Decision:
    wanted = min(max(wanted, bounds.low), bounds.high)
    if wanted > current:
        grow = trend.grow + 1
        return Decision(wanted, Trend()) if grow >= GROW_AFTER else Decision(current, Trend(grow=grow))
    if wanted < current:
        shrink = trend.shrink + 1
        return Decision(current - 1, Trend()) if shrink >= SHRINK_AFTER else Decision(current, Trend(shrink=shrink))
    return Decision(current, Trend())


def _wanted(pool: str, load: PoolLoad, level: ServiceLevel) -> int:
    wanted = 1
    if pool in ("prefill", "mixed"):
        wanted = max(wanted, _for_prefill(load, level))
    if pool in ("decode", "mixed"):
        wanted = max(wanted, _for_decode(load, level))
    return wanted


def _for_prefill(load: PoolLoad, level: ServiceLevel) -> int:
    if load.num_waiting_tokens == 0:
        return 1
    if load.prefill_tokens_per_s <= 0:
        return math.ceil(load.num_waiting / load.queue_limit)
    per_worker = load.prefill_tokens_per_s / load.num_workers
    return math.ceil(load.num_waiting_tokens / (per_worker * level.ttft_s))


def _for_decode(load: PoolLoad, level: ServiceLevel) -> int:
    by_memory = load.num_workers * load.kv_use / KV_CEILING
    by_speed = 0.0
    if load.num_running and load.decode_tokens_per_s > 0:
        tpot_s = load.num_running / load.decode_tokens_per_s
        # A single worker with one sequence cannot be made faster by another worker.
        by_speed = min(load.num_workers * tpot_s / level.tpot_s, load.num_running)
    queued = load.num_workers + 1 if load.num_waiting > load.queue_limit * load.num_workers else 0
    return max(math.ceil(by_memory), math.ceil(by_speed), queued)


@dataclass(frozen=True, slots=True)
class PoolCounters:
    """Sums of the newest reports of a pool's ready workers; the token counts are since the workers' starts. A gang of
    workers counts as one."""

    num_workers: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_blocks: int
    num_free_blocks: int

    @classmethod
    def of(cls, reports: Sequence[LoadReport], num_workers: int) -> Self:
        names = [f.name for f in fields(cls) if f.name != "num_workers"]
        return cls(num_workers, **{name: sum(getattr(r, name) for r in reports) for name in names})

    def is_idle_since(self, before: "PoolCounters | None") -> bool:
        """Return whether its workers have no request, and have computed nothing since `before`."""
        if before is None or self.num_running or self.num_waiting:
            return False
        computed = self.num_prefill_tokens + self.num_decode_tokens
        return computed <= before.num_prefill_tokens + before.num_decode_tokens


class Autoscaler:
    """Remembers the last look, for the rates, and the trends. Only pools with min_replicas < max_replicas move."""

    def __init__(self, config: ClusterConfig) -> None:
        self._level = config.service_level
        self._bounds = {name: Bounds(*pool.bounds) for name, pool in config.pools.items() if pool.autoscaled}
        self._gang_sizes = {name: pool.parallel.data_parallel for name, pool in config.pools.items()}
        self._trends: dict[str, Trend] = {}
        self._last: tuple[float, Mapping[str, PoolCounters]] | None = None
        self._best_prefill: dict[str, float] = {}  # tokens per second of one worker

    def look(
        self,
        counters: Mapping[str, PoolCounters],
        now: float,
        current: Mapping[str, int],
        empty: Sequence[str] = (),
    ) -> dict[str, int]:
        """New targets of the autoscaled pools; at most one look in LOOK_S counts. `current`: the targets as they are;
        `empty`: pools without workers, which get one where the prompts that wait at the others are too many for
        these."""
        if not self._bounds or (self._last and now - self._last[0] < LOOK_S):
            return {}
        before, self._last = self._last, (now, counters)
        if before is None:
            return {}
        elapsed_s = now - before[0]
        loads = {pool: self._load(pool, before[1].get(pool, at), at, elapsed_s) for pool, at in counters.items()}
        decisions = targets(loads, self._level, self._bounds, self._trends, current)
        for pool in empty:
            decisions[pool] = self._help(loads, self._trends.get(pool, Trend()))
        self._trends |= {pool: decision.trend for pool, decision in decisions.items()}
        return {pool: decision.replicas for pool, decision in decisions.items()}

    def _help(self, loads: Mapping[str, PoolLoad], trend: Trend) -> Decision:
        """Decide whether a pool without workers helps the others with their prompts."""
        needs = any(_for_prefill(load, self._level) > load.num_workers for load in loads.values())
        return _decide(0, int(needs), Bounds(0, 1), trend)

    def _load(self, pool: str, before: PoolCounters, at: PoolCounters, elapsed_s: float) -> PoolLoad:
        # A pool that idles computes few tokens a second and could compute more: its best rate is its speed.
        rate = max(at.num_prefill_tokens - before.num_prefill_tokens, 0) / elapsed_s / at.num_workers
        best = self._best_prefill[pool] = max(rate, self._best_prefill.get(pool, 0.0))
        return PoolLoad(
            num_workers=at.num_workers,
            num_running=at.num_running,
            num_waiting=at.num_waiting,
            num_waiting_tokens=at.num_waiting_tokens,
            prefill_tokens_per_s=best * at.num_workers,
            decode_tokens_per_s=max(at.num_decode_tokens - before.num_decode_tokens, 0) / elapsed_s,
            kv_use=1 - at.num_free_blocks / at.num_blocks if at.num_blocks else 0.0,
            gang_size=self._gang_sizes[pool],
        )
