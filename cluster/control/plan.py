"""Decides what to do about the fleet: existing workers, wanted workers -> actions. Pure; time comes in as a number.

    STARTING --address known--> READY --surplus--> DRAINING --finished--> STOPPING
       └────────── died at any time: a failure of its pool, which may have to wait before it starts another ──────┘

A pool's first failure is mended at once; workers that keep failing young are started again after 1, 2, 4 .. 30 s.

In an upgrade, workers whose settings are outdated are replaced one after another, a pool at a time:

    a new one starts beside them ──it serves──> an outdated one drains ──it has ended──> the next
       └── there is no place for it: an outdated one drains first

Workers that a pool lacks for want of a place when the upgrade begins start after it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ..common.gang import gang_of

STABLE_S = 20.0  # a worker that lived this long did not fail because of its settings
LONGEST_BACKOFF_S = 30.0


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # takes nothing new, finishes its own
    STOPPING = "stopping"


PHASES = (Phase.STOPPING, Phase.DRAINING, Phase.STARTING, Phase.READY)  # a gang's is the first that a member is in


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    worker_id: str
    pool: str
    phase: Phase
    num_requests: int = 0
    is_draining: bool = False  # by its own word
    is_silent: bool = False  # since it was taken over from an earlier supervisor, for which it may serve
    is_outdated: bool = False  # its settings are not those that workers shall have
    waits: bool = False  # for a place


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of a pool: how many workers in a row died young, the last one's error, and when the next may start."""

    count: int = 0
    last_error: str = ""
    retry_at: float = 0.0  # monotonic seconds


@dataclass(frozen=True, slots=True)
class Start:
    pool: str


@dataclass(frozen=True, slots=True)
class Drain:
    worker_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    worker_id: str


@dataclass(frozen=True, slots=True)
class SetRole:
    """Move a worker to another pool without a restart."""

    worker_id: str
    pool: str


Action = Start | Drain | Stop | SetRole


@dataclass(frozen=True, slots=True)
class Targets:
    """Workers wanted by pool. Workers of the `interchangeable` pools differ in their role alone."""

    replicas: Mapping[str, int]
    interchangeable: Collection[frozenset[str]] = field(default_factory=tuple[frozenset[str], ...])


def plan(
    workers: Iterable[PlannedWorker], targets: Targets, failures: Mapping[str, Failures], now: float
) -> list[Action]:
    """The actions that bring the fleet to its targets; none when it is there."""
    live: dict[str, list[PlannedWorker]] = {pool: [] for pool in targets.replicas}
    leaving: list[Action] = []
    for worker in workers:
        if worker.phase is Phase.READY and worker.is_draining:
            leaving.append(Drain(worker.worker_id))  # an earlier supervisor drained it: it never takes requests again
        elif worker.phase is Phase.STARTING and worker.is_outdated:
            leaving.append(Stop(worker.worker_id))
        elif worker.phase in (Phase.STARTING, Phase.READY):
            live[worker.pool].append(worker)
    missing = {pool: max(targets.replicas[pool] - len(members), 0) for pool, members in live.items()}
    surplus = {pool: _surplus(members, targets.replicas[pool]) for pool, members in live.items()}
    starting = {pool: _coming(members, surplus[pool], targets.replicas[pool]) for pool, members in live.items()}
    actions = leaving + _moves(surplus, missing, starting, targets.interchangeable)
    _keep_one(live, surplus, missing, starting)
    for pool, spare in surplus.items():
        actions += [Stop(w.worker_id) if w.phase is Phase.STARTING else Drain(w.worker_id) for w in spare]
        if now >= failures.get(pool, Failures()).retry_at:
            actions += [Start(pool)] * missing[pool]
    return actions


def lacking(workers: Iterable[PlannedWorker], replicas: Mapping[str, int]) -> dict[str, int]:
    """Return, for each pool that lacks workers for want of a place, how many."""
    found: dict[str, int] = {}
    views = list(workers)
    for pool, target in replicas.items():
        waiting = [w.waits for w in views if w.pool == pool]
        num_placed = len(waiting) - sum(waiting)
        if (number := min(sum(waiting), target - num_placed)) > 0:
            found[pool] = number
    return found


def upgrade_targets(
    workers: Sequence[PlannedWorker], replicas: Mapping[str, int], lacked: Mapping[str, int], *, in_place: bool
) -> Targets:
    """Return the targets by which the plan replaces outdated workers. `lacked`: workers that found no place when the
    upgrade began; `in_place`: one ends before another starts."""
    goal = {pool: max(target - lacked.get(pool, 0), 0) for pool, target in replicas.items()}
    more = surge(workers, goal, in_place=in_place)
    return Targets({pool: number + more.get(pool, 0) for pool, number in goal.items()})


def surge(workers: Sequence[PlannedWorker], replicas: Mapping[str, int], *, in_place: bool) -> dict[str, int]:
    """Return, for the pool that is upgraded now, how many workers more it shall have, so that the plan replaces its
    outdated ones; nothing where none is left. `in_place`: one ends before another starts, so it has one less."""
    for pool, target in replicas.items():
        members = [w for w in workers if w.pool == pool]
        live = [w for w in members if w.phase in (Phase.STARTING, Phase.READY)]
        is_leaving = len(live) < len(members)
        starting = [w for w in live if w.phase is Phase.STARTING]
        more = len(live) - target
        if is_leaving and in_place:
            return {pool: max(min(more, 0), -1)}
        if not any(w.is_outdated for w in live):
            if is_leaving:
                return {}  # one pool at a time
            continue
        if in_place:
            return {pool: 0 if starting or more < 0 else -1}
        if starting:
            return {pool: 0 if any(w.waits for w in starting) else max(more, 0)}
        return {pool: 0 if is_leaving or more > 0 else 1}
    return {}


def after_failure(failures: Failures, error: str, *, lived_s: float, now: float) -> Failures:
    """`lived_s`: how long the worker had been ready; 0 if it never was."""
    count = 1 if lived_s >= STABLE_S else failures.count + 1
    delay_s = 0.0 if count == 1 else min(2.0 ** (count - 2), LONGEST_BACKOFF_S)
    return Failures(count, error, now + delay_s)


def ongoing(
    failures: Mapping[str, Failures], ready: Iterable[tuple[str, float | None]], now: float
) -> dict[str, Failures]:
    """Return the failures, without a count where a worker that started after the last one has lived long enough.
    `ready`: pool of each worker, and since when it is ready."""
    ended = {
        pool
        for pool, at in ready
        if at is not None and pool in failures and at >= failures[pool].retry_at and now - at >= STABLE_S
    }
    return {pool: replace(found, count=0) if pool in ended else found for pool, found in failures.items()}


def _surplus(members: list[PlannedWorker], target: int) -> list[PlannedWorker]:
    """Choose who leaves: outdated workers, then those that serve nobody yet, then the least busy. Never a silent one,
    which may serve, nor another in its stead: it may be dead."""
    known = [w for w in members if not w.is_silent]
    order = sorted(known, key=lambda w: (not w.is_outdated, w.phase is Phase.READY, w.num_requests, w.worker_id))
    return order[: max(len(known) - target, 0)]


def _coming(members: list[PlannedWorker], surplus: list[PlannedWorker], target: int) -> list[PlannedWorker]:
    """Return who starts for a place that no ready worker has. There may be more silent workers than such places."""
    staying = [w for w in members if w not in surplus]
    coming = sorted((w for w in staying if w.phase is Phase.STARTING), key=lambda w: not w.is_silent)
    num_places = max(target - (len(staying) - len(coming)), 0)
    return coming[max(len(coming) - num_places, 0) :]


def _moves(
    surplus: dict[str, list[PlannedWorker]],
    missing: dict[str, int],
    starting: dict[str, list[PlannedWorker]],
    interchangeable: Collection[frozenset[str]],
) -> list[Action]:
    """Fill gaps with ready workers of other pools, taking them out of `surplus` and `missing`; then let such ones take
    the place of workers that still start, which may wait for the very place that they have, and of silent ones, which
    may be dead."""
    moves: list[Action] = []
    for source, leaving in surplus.items():
        for target in missing:
            if not any({source, target} <= group for group in interchangeable):
                continue
            movers = [w for w in leaving if w.phase is Phase.READY][: missing[target]]
            for worker in movers:
                leaving.remove(worker)
                missing[target] -= 1
                moves.append(SetRole(worker.worker_id, target))
            movers = [w for w in leaving if w.phase is Phase.READY and not w.is_outdated][: len(starting[target])]
            for worker in movers:
                leaving.remove(worker)
                moves.append(SetRole(worker.worker_id, target))
                if not (replaced := starting[target].pop()).is_silent:
                    moves.append(Stop(replaced.worker_id))
    return moves


def _keep_one(
    live: dict[str, list[PlannedWorker]],
    surplus: dict[str, list[PlannedWorker]],
    missing: dict[str, int],
    starting: dict[str, list[PlannedWorker]],
) -> None:
    """Take one that serves out of `surplus`, where nobody else would serve until those that come do; unless one of
    these waits for a place, perhaps for that one's."""
    coming = [w for members in starting.values() for w in members]
    leaving = [w for members in surplus.values() for w in members if w.phase is Phase.READY]
    others = (w for members in live.values() for w in members if w.phase is Phase.READY and w not in leaving)
    if not leaving or not (coming or any(missing.values())) or any(w.waits for w in coming) or any(others):
        return
    kept = max(leaving, key=lambda w: (not w.is_outdated, w.num_requests, w.worker_id))
    surplus[kept.pool].remove(kept)


def gangs_of(workers: Iterable[PlannedWorker]) -> list[PlannedWorker]:
    """Each as if it were one worker."""
    found: dict[str, list[PlannedWorker]] = {}
    for worker in workers:
        found.setdefault(gang_of(worker.worker_id), []).append(worker)
    return [_as_one(gang_id, views) for gang_id, views in found.items()]


def _as_one(gang_id: str, views: Sequence[PlannedWorker]) -> PlannedWorker:
    phases = {view.phase for view in views}
    phase = next(phase for phase in PHASES if phase in phases)
    num_requests = sum(view.num_requests for view in views)
    flags = [
        any(getattr(view, name) for view in views) for name in ("is_draining", "is_silent", "is_outdated", "waits")
    ]
    return PlannedWorker(gang_id, views[0].pool, phase, num_requests, *flags)
