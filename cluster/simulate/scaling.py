"""Size of the pools of a simulated cluster: the production autoscaler and plan, of which this carries out the actions.
A drained worker finishes its sequences; it is not emptied by migration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...workers.common.role import Role
from ..common.config import ClusterConfig, interchangeable
from ..control.autoscaler import Autoscaler, PoolCounters
from ..control.plan import Drain, Phase, PlannedWorker, SetRole, Start, Stop, Targets, plan
from .worker import SimulatedWorker


class ScaledCluster(Protocol):
    """The cluster as the scaler changes it."""

    def ready_workers(self) -> Mapping[str, SimulatedWorker]: ...

    def start_later(self, pool: str, name: str, start_s: float) -> None: ...

    def drain(self, name: str) -> None: ...

    def move(self, name: str, pool: str, role: Role) -> None: ...


@dataclass(slots=True)
class _Member:
    pool: str
    phase: Phase


class Scaler:
    """`start_s`: from the decision until a worker serves."""

    def __init__(self, config: ClusterConfig, start_s: float) -> None:
        self._autoscaler = Autoscaler(config)
        self._interchangeable = interchangeable(config.pools)
        self._start_s = start_s
        self._members: dict[str, _Member] = {}
        self._num_started = 0
        self.targets: dict[str, int] = dict(config.pools.targets)
        self.moves = any(pool.autoscaled for _, pool in config.pools.items())

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
        return True

    def ended(self, name: str) -> None:
        self._members.pop(name, None)

    def look(self, cluster: ScaledCluster, now: float) -> None:
        ready = cluster.ready_workers()
        reports: dict[str, list[SimulatedWorker]] = {}
        for name, member in self._members.items():
            if member.phase is Phase.READY:
                reports.setdefault(member.pool, []).append(ready[name])
        counters = {
            pool: PoolCounters.of([worker.load_report(now) for worker in workers], len(workers))
            for pool, workers in reports.items()
        }
        self.targets |= self._autoscaler.look(counters, now)
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
                    cluster.move(name, pool, Role(pool))

    def _start(self, cluster: ScaledCluster, pool: str, start_s: float) -> None:
        name = f"{pool}-{self._num_started:05d}"
        self._num_started += 1
        self._members[name] = _Member(pool, Phase.STARTING)
        cluster.start_later(pool, name, start_s)
