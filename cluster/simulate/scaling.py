"""Sizes of the pools of a simulated cluster and prefill budgets of its workers: the production controller and plan, of
which this carries out the decisions. A worker that drains, or that computes prompts alone from now on, finishes its
sequences; it is not emptied by migration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...proto.worker_pb2 import LoadReport
from ...workers.common.role import Role
from ..common.config import ClusterConfig, interchangeable
from ..control.autoscaler import PoolCounters
from ..control.controller import Controller
from ..control.decisions import DecisionLog
from ..control.plan import Drain, Phase, PlannedWorker, SetRole, Start, Stop, Targets, plan
from .worker import SimulatedWorker

DAY_S = 86400.0


class ScaledCluster(Protocol):
    """The cluster as the scaler changes it."""

    @property
    def num_unrouted(self) -> int:
        """Number of requests that wait for a worker."""
        ...

    def ready_workers(self) -> Mapping[str, SimulatedWorker]: ...

    def start_later(self, pool: str, name: str, start_s: float) -> None: ...

    def drain(self, name: str) -> None: ...

    def set_prefill_budget(self, name: str, num_tokens: int) -> None: ...


@dataclass(slots=True)
class _Member:
    pool: str
    phase: Phase
    start_s: float


class Scaler:
    """`start_s`: from the decision until a worker serves. The simulation begins at `begins_at_s` of the day."""

    begins_at_s = 0.0

    def __init__(self, config: ClusterConfig, start_s: float) -> None:
        self._controller = Controller(config)
        self._interchangeable = interchangeable(config.pools)
        self._start_s = start_s
        self._members: dict[str, _Member] = {}
        self._num_started = 0
        self.targets: dict[str, int] = dict(config.pools.targets)
        self.moves = config.has_dial or any(pool.autoscaled for _, pool in config.pools.items())

    @property
    def log(self) -> DecisionLog:
        return self._controller.log

    def begin(self, cluster: ScaledCluster) -> None:
        """Start the workers that the pools have at first, without a delay."""
        for pool, num in self.targets.items():
            for _ in range(num):
                self._start(cluster, pool, 0.0)

    def became_ready(self, name: str) -> bool:
        """Return whether the worker is still wanted."""
        member = self._members.get(name)
        if member is None:
            return False
        member.phase = Phase.READY
        if member.start_s:
            self._controller.started(member.pool, member.start_s)
        return True

    def ended(self, name: str) -> None:
        self._members.pop(name, None)

    def look(self, cluster: ScaledCluster, now: float) -> None:
        ready = cluster.ready_workers()
        reports: dict[str, list[tuple[str, LoadReport]]] = {}
        for name, member in self._members.items():
            if member.phase is Phase.READY:
                reports.setdefault(member.pool, []).append((name, ready[name].load_report(now)))
        counters = {pool: PoolCounters.of([load for _, load in found], len(found)) for pool, found in reports.items()}
        self._controller.foresee(reports, self.targets, now, (self.begins_at_s + now) % DAY_S)
        self.targets |= self._controller.replicas(counters, self.targets, now, cluster.num_unrouted)
        workers = [
            PlannedWorker(name, m.pool, m.phase, ready[name].scheduler.num_running if name in ready else 0)
            for name, m in self._members.items()
        ]
        for action in plan(workers, Targets(self.targets, self._interchangeable), {}, now):
            match action:
                case Start(pool):
                    self._start(cluster, pool, self._start_s)
                case Drain(name):
                    self._members[name].phase = Phase.DRAINING
                    cluster.drain(name)
                case Stop(name):
                    del self._members[name]
                case SetRole(name, pool):
                    self._members[name].pool = pool
                    cluster.set_prefill_budget(name, ready[name].setup.scheduler.budget_of(Role(pool)))
        for name, budget in self._controller.budgets(reports, now, (self.begins_at_s + now) % DAY_S).items():
            cluster.set_prefill_budget(name, budget)

    def _start(self, cluster: ScaledCluster, pool: str, start_s: float) -> None:
        name = f"{pool}-{self._num_started:05d}"
        self._num_started += 1
        self._members[name] = _Member(pool, Phase.STARTING, start_s)
        cluster.start_later(pool, name, start_s)
