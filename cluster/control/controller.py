"""Controller of a cluster: moves prefill budgets first, then the sizes of pools. Pure: reports in, decisions out.

Budgets move within groups of pools whose workers may change places (budgets.py), unless the cluster's `dial` is off.
Sizes move as autoscaler.py says, between bounds, and grow before the load comes where growth.py expects it. A start is
not taken back before its worker has come, and that worker stays at least REPAID times as long as its start took. A
start that brings no worker is noted, and the pool does not grow again for BARRED_S seconds. A pool that may have no
workers loses its last one when it idles, and has one again as soon as requests wait (zero.py).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ...proto.worker_pb2 import LoadReport
from ..common.config import ClusterConfig, interchangeable
from ..common.plurals import count
from ..common.prediction import Level
from .autoscaler import LOOK_S, Autoscaler, PoolCounters
from .budgets import BARRED_S, BudgetController, WorkerLook
from .decisions import ControlDecision, DecisionLog, ForecastStatus
from .growth import GrowthForecast, Need, Reports
from .zero import ZeroScaling

REPAID = 10.0
START_LIMIT_S = 120.0  # until a first start must have brought a worker; later ones have thrice the longest
KEPT = 0.8  # share of an earlier start's time that counts: one that took long does not count for ever


@dataclass(slots=True)
class _Start:
    """Growth of a pool, until a worker has come."""

    decision: ControlDecision
    num_before: int  # workers that were ready
    target_before: int
    is_open: bool = True
    is_waited_for: bool = False  # by requests that have no worker


class Controller:
    """Controller of one cluster. Call `replicas` and `budgets` as often as wanted: one look a second counts."""

    def __init__(self, config: ClusterConfig) -> None:
        self.log = DecisionLog()
        self._autoscaler = Autoscaler(config)
        self._zero = ZeroScaling(config)
        self.growth = GrowthForecast(config)
        self._needs: dict[str, Need] = {}  # by pool, of the last look
        self._starts: dict[str, _Start] = {}  # the last of each pool
        self.start_s: dict[str, float] = {}  # that a start of the pool takes at most, once its worker has a place
        self._arrival_s: dict[str, float] = {}  # the same, with the time in which it waits for a place
        self._looked_at = float("-inf")
        self._groups: list[tuple[frozenset[str], BudgetController]] = []
        self._block_sizes: dict[str, int] = {}
        if config.has_dial:
            level = Level(config.service_level.ttft_s, config.service_level.tpot_s)
            found = interchangeable(config.pools)
            found += [frozenset((name,)) for name, _ in config.pools.items() if not any(name in g for g in found)]
            single = {name for name, pool in config.pools.items() if pool.parallel.data_parallel == 1}
            self._groups = [(g, BudgetController("+".join(sorted(g)), level, self.log)) for g in found if g <= single]
            self._block_sizes = {name: config.worker(name).cache.block_size for name, _ in config.pools.items()}

    def moves_budgets(self, pool: str) -> bool:
        """Return whether the controller moves the prefill budgets of the pool's workers."""
        return any(pool in pools for pools, _ in self._groups)

    @property
    def forecasts(self) -> tuple[ForecastStatus, ...]:
        """Forecasts of the groups whose budgets move, by the last look."""
        return tuple(found for _, group in self._groups if (found := group.forecast))

    def started(self, pool: str, took_s: float, waited_s: float = 0.0) -> None:
        """Note how long the start of a worker took. `waited_s`: of which it waited for a machine. That says nothing of
        the next start, which may find one."""
        self.start_s[pool] = max(took_s - waited_s, KEPT * self.start_s.get(pool, 0.0))
        self._arrival_s[pool] = max(took_s, KEPT * self._arrival_s.get(pool, 0.0))

    def needed(self, pool: str) -> int | None:
        """Return how many workers the pool needs by the last forecast; None where there is none."""
        return self._needs[pool].num_workers if pool in self._needs else None

    def ready_in_s(self, now: float, unplaced: Collection[str] = ()) -> float | None:
        """Return when the first worker is expected that requests wait for; None where that is not known. `unplaced`:
        pools of which a worker waits for a machine."""
        waited_for = [
            (start, known_s)
            for pool, start in self._starts.items()
            if start.is_open and start.is_waited_for and pool not in unplaced and (known_s := self.start_s.get(pool))
        ]
        return min((max(known_s - (now - s.decision.at), LOOK_S) for s, known_s in waited_for), default=None)

    def foresee(self, reports: Reports, current: Mapping[str, int], now: float, time_of_day_s: float) -> None:
        """Forecast what the pools need, for the next calls of `replicas`. `reports`: of the ready workers of each pool;
        `current`: the targets."""
        needs = self.growth.look(reports, current, self.start_s, now, time_of_day_s)
        self._needs = self._needs if needs is None else needs

    def replicas(
        self, counters: Mapping[str, PoolCounters], current: Mapping[str, int], now: float, num_waiting: int = 0
    ) -> dict[str, int]:
        """Return the new targets of the pools that are to change. `current`: the targets as they are; `num_waiting`:
        requests that wait for a worker."""
        self._verify_starts(counters, now)
        idle = self._zero.idle(counters, num_waiting, now)
        if woken := self._zero.woken(current, num_waiting):
            return self._wake(woken, num_waiting, now)
        decided = self._autoscaler.look(counters, now, current, self._zero.empty(current))
        decided |= self._taken_back(current)
        decided |= (expected := self._expected(decided, current))
        decided |= {pool: 0 for pool in idle if current[pool] == 1 and pool not in expected}
        changed = {pool: num for pool, num in decided.items() if num != current[pool]}
        changed = {pool: num for pool, num in changed.items() if self._may_change(pool, num - current[pool], now)}
        for pool, num in changed.items():
            made = _decision(pool, current[pool], num, counters.get(pool), now)
            if pool in expected:
                made.reason = _expectation(self._needs[pool])
            decision = self.log.add(made)
            if num > current[pool]:
                self._starts[pool] = _Start(
                    decision, counters[pool].num_workers if pool in counters else 0, current[pool]
                )
        return changed

    def _taken_back(self, current: Mapping[str, int]) -> dict[str, int]:
        """Return the pools that have grown in vain, with their targets from before; a pool that had no workers goes on
        trying."""
        failed = {pool: start.target_before for pool, start in self._starts.items() if start.decision.has_failed}
        return {pool: before for pool, before in failed.items() if 0 < before < current[pool]}

    def _expected(self, decided: dict[str, int], current: Mapping[str, int]) -> dict[str, int]:
        """Return the pools that grow because more workers are needed soon. Takes out of `decided` those that would
        shrink below what is needed."""
        grown: dict[str, int] = {}
        for pool, need in self._needs.items():
            if need.is_due and need.num_workers > max(decided.get(pool, 0), current[pool]):
                grown[pool] = need.num_workers
            elif decided.get(pool, current[pool]) < current[pool] <= need.num_workers:
                del decided[pool]
        return grown

    def _wake(self, pools: Sequence[str], num_waiting: int, now: float) -> dict[str, int]:
        """Give each of these pools a worker, also after a start that brought none: nobody else answers."""
        for pool in pools:
            known_s = self.start_s.get(pool)
            takes = f"takes up to {known_s:.0f} s" if known_s else "has not been measured yet"
            reason = f"{count(num_waiting, 'request')} and no worker: a start of the pool {takes}."
            decision = self.log.add(ControlDecision(now, "replicas", pool, "0 -> 1 workers", reason))
            self._starts[pool] = _Start(decision, 0, 0, is_waited_for=True)
        return dict.fromkeys(pools, 1)

    def budgets(
        self, reports: Mapping[str, Sequence[tuple[str, LoadReport]]], now: float, time_of_day_s: float
    ) -> dict[str, int]:
        """Return the prefill budgets to change, by worker. `reports`: of the ready workers of each pool."""
        if not self._groups or now - self._looked_at < LOOK_S:
            return {}
        self._looked_at = now
        changed: dict[str, int] = {}
        for pools, controller in self._groups:
            looks = [
                WorkerLook(name, load, (load.num_blocks - load.num_free_blocks) * self._block_sizes[pool])
                for pool in sorted(pools)
                for name, load in reports.get(pool, ())
            ]
            changed |= controller.look(looks, now, time_of_day_s)
        return changed

    def _may_change(self, pool: str, by: int, now: float) -> bool:
        """Return whether the pool may grow or shrink: not while its last start has not paid for itself, or not grow
        after one that brought nothing."""
        start = self._starts.get(pool)
        if start is None:
            return True
        elapsed_s = now - start.decision.at
        if by > 0:
            return not start.decision.has_failed or elapsed_s >= BARRED_S
        return not start.is_open and elapsed_s >= REPAID * self.start_s.get(pool, 0.0)

    def _verify_starts(self, counters: Mapping[str, PoolCounters], now: float) -> None:
        for pool, start in self._starts.items():
            took_s = now - start.decision.at
            num_ready = counters[pool].num_workers if pool in counters else 0
            limit_s = max(START_LIMIT_S, 3 * self._arrival_s.get(pool, 0.0))
            if start.is_open and num_ready > start.num_before:
                start.is_open = False
                self.log.close(start.decision, f"a worker came after {took_s:.0f} s", has_failed=False)
            elif start.is_open and took_s > limit_s:
                start.is_open = False
                self.log.close(start.decision, f"no worker has come within {limit_s:.0f} s", has_failed=True)


def _decision(pool: str, before: int, after: int, at: PoolCounters | None, now: float) -> ControlDecision:
    action = f"{before} -> {after} workers"
    if at is None:
        reason = "The pool has no workers, and the other pools have more to do than they can within the service level."
        return ControlDecision(now, "replicas", pool, action, reason)
    if not after:
        return ControlDecision(now, "replicas", pool, action, "The pool's last worker has had nothing to do.")
    used = 1 - at.num_free_blocks / at.num_blocks if at.num_blocks else 0.0
    figures = (
        f"{at.num_running} sequences run, {at.num_waiting} wait with {at.num_waiting_tokens} prompt tokens, and "
        f"{used:.0%} of the KV memory is used"
    )
    reason = f"The pool needs {after} workers" if after > before else "The pool would do with one worker less"
    return ControlDecision(now, "replicas", pool, action, f"{reason}: {figures}.")


def _expectation(need: Need) -> str:
    return (
        f"{need.prompt_tokens_per_s:.0f} prompt tokens/s and {need.num_decodes:.0f} sequences that decode are expected "
        f"in {need.ahead_s:.0f} s, when a worker that starts now would serve: {count(need.num_workers, 'worker')} "
        "by the measured costs of steps."
    )
