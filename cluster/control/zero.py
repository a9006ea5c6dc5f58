"""Decides when a pool has no workers, and when it gets one again. Pure: counters and waiting requests in, pools out.

    1 worker ──idle for scale_to_zero_after_s──> 0 ──requests wait, or other pools need help──> 1

Only pools with min_replicas 0 and a larger max_replicas. A pool is idle while its workers have no request and compute
nothing, and no request waits for a worker anywhere.
"""

from collections.abc import Mapping

from ..common.config import ClusterConfig
from .autoscaler import PoolCounters

ANSWERING = ("decode", "mixed")


class ZeroScaling:
    """State of the pools of one cluster that may have no workers."""

    def __init__(self, config: ClusterConfig) -> None:
        pools = {name: pool for name, pool in config.pools.items() if pool.autoscaled and pool.bounds[0] == 0}
        self._after_s = {name: pool.scale_to_zero_after_s for name, pool in pools.items()}
        self._woken = [name for name, pool in pools.items() if pool.replicas] or list(pools)
        self._before: Mapping[str, PoolCounters] = {}
        self._busy_at: dict[str, float] = {}

    def woken(self, current: Mapping[str, int], num_waiting: int) -> list[str]:
        """Return the pools that get a worker at once, because requests wait and no pool could answer them. `current`:
        the targets."""
        if not num_waiting or any(current[name] for name in ANSWERING):
            return []
        return [name for name in self._woken if not current[name]]

    def empty(self, current: Mapping[str, int]) -> list[str]:
        """Return the pools that have no workers because they were idle."""
        return [name for name in self._after_s if not current[name]]

    def idle(self, counters: Mapping[str, PoolCounters], num_waiting: int, now: float) -> list[str]:
        """Return the pools whose last worker has been idle for long enough. Call it at each look."""
        before, self._before = self._before, counters
        for name in self._after_s:
            at = counters.get(name)
            is_idle = at is not None and not num_waiting and at.is_idle_since(before.get(name))
            if not is_idle:
                self._busy_at[name] = now
        return [
            name
            for name, after_s in self._after_s.items()
            if name in counters and counters[name].num_workers == 1 and now - self._busy_at[name] >= after_s
        ]
