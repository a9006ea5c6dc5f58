"""Fleet and targets in, actions out."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from diptych.cluster.control.plan import (
    LONGEST_BACKOFF_S,
    STABLE_S,
    Action,
    Drain,
    Failures,
    Phase,
    PlannedWorker,
    SetRole,
    Start,
    Stop,
    Targets,
    after_failure,
    lacking,
    plan,
    upgrade_targets,
)

POOLS = ("prefill", "decode", "mixed")
SAME = (frozenset({"prefill", "decode"}),)


def targets(prefill: int = 0, decode: int = 0, mixed: int = 0, groups: tuple[frozenset[str], ...] = ()) -> Targets:
    return Targets({"prefill": prefill, "decode": decode, "mixed": mixed}, groups)


def ready(worker_id: str, pool: str, num_requests: int = 0) -> PlannedWorker:
    return PlannedWorker(worker_id, pool, Phase.READY, num_requests)


def test_an_empty_fleet_starts_everything() -> None:
    assert plan([], targets(prefill=1, decode=2), {}, 0.0) == [Start("prefill"), Start("decode"), Start("decode")]


def test_a_fleet_at_its_targets_is_left_alone() -> None:
    workers = [ready("p-1", "prefill"), PlannedWorker("d-2", "decode", Phase.STARTING)]
    assert plan(workers, targets(prefill=1, decode=1), {}, 0.0) == []


def test_the_least_busy_leave_first() -> None:
    workers = [ready("d-1", "decode", 5), ready("d-2", "decode", 0), ready("d-3", "decode", 2)]
    assert plan(workers, targets(decode=1), {}, 0.0) == [Drain("d-2"), Drain("d-3")]


def test_one_that_still_starts_is_stopped_before_a_ready_one_is_drained() -> None:
    workers = [ready("d-1", "decode"), PlannedWorker("d-2", "decode", Phase.STARTING)]
    assert plan(workers, targets(decode=1), {}, 0.0) == [Stop("d-2")]


def test_leaving_workers_count_for_nothing() -> None:
    workers = [PlannedWorker("d-1", "decode", Phase.DRAINING), PlannedWorker("d-2", "decode", Phase.STOPPING)]
    assert plan(workers, targets(decode=1), {}, 0.0) == [Start("decode")]


def test_one_that_was_told_to_drain_by_an_earlier_supervisor_leaves_and_another_takes_its_place() -> None:
    told = PlannedWorker("d-1", "decode", Phase.READY, 3, is_draining=True)
    assert plan([told], targets(decode=1), {}, 0.0) == [Drain("d-1"), Start("decode")]
    assert plan([told, ready("d-2", "decode")], targets(decode=1), {}, 0.0) == [Drain("d-1")]


def test_a_pool_that_failed_waits_and_the_other_does_not() -> None:
    failures = {"decode": Failures(2, "boom", retry_at=10.0)}
    assert plan([], targets(prefill=1, decode=1), failures, 9.9) == [Start("prefill")]
    assert plan([], targets(prefill=1, decode=1), failures, 10.0) == [Start("prefill"), Start("decode")]


def test_a_surplus_fills_the_gap_of_a_pool_with_the_same_settings() -> None:
    workers = [ready("p-1", "prefill", 3), ready("p-2", "prefill", 0), ready("d-3", "decode")]
    assert plan(workers, targets(prefill=1, decode=2, groups=SAME), {}, 0.0) == [SetRole("p-2", "decode")]
    assert plan(workers, targets(prefill=1, decode=2), {}, 0.0) == [Drain("p-2"), Start("decode")]


def test_a_surplus_takes_the_place_of_one_that_still_starts() -> None:
    """It may wait for the place that the other one has: draining that would leave nobody."""
    starting = PlannedWorker("d-2", "decode", Phase.STARTING, waits=True)
    one, more = [ready("p-1", "prefill"), starting], [ready("p-1", "prefill"), ready("p-3", "prefill", 1), starting]
    moved = [SetRole("p-1", "decode"), Stop("d-2")]
    assert plan(one, targets(decode=1, groups=SAME), {}, 0.0) == moved
    assert plan(more, targets(decode=1, groups=SAME), {}, 0.0) == [*moved, Drain("p-3")]
    assert plan(one, targets(decode=1), {}, 0.0) == [Drain("p-1")]
    outdated = [replace(one[0], is_outdated=True), starting]
    assert plan(outdated, targets(decode=1, groups=SAME), {}, 0.0) == [Drain("p-1")]


def test_only_ready_workers_move() -> None:
    workers = [PlannedWorker("p-1", "prefill", Phase.STARTING)]
    assert plan(workers, targets(decode=1, groups=SAME), {}, 0.0) == [Stop("p-1"), Start("decode")]


def test_the_first_failure_is_mended_at_once_and_a_crash_loop_backs_off() -> None:
    failures, waits = Failures(), []
    for _ in range(8):
        failures = after_failure(failures, "boom", lived_s=0.0, now=100.0)
        waits.append(failures.retry_at - 100.0)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S]
    assert failures.last_error == "boom"
    assert after_failure(failures, "killed", lived_s=STABLE_S, now=100.0) == Failures(1, "killed", 100.0)


def workers_of_any_kind() -> st.SearchStrategy[list[PlannedWorker]]:
    one = st.builds(
        PlannedWorker, st.uuids().map(str), st.sampled_from(POOLS), st.sampled_from(list(Phase)), st.integers(0, 9)
    )
    return st.lists(one, max_size=12, unique_by=lambda w: w.worker_id)


def after(actions: list[Action], workers: list[PlannedWorker]) -> list[PlannedWorker]:
    """Apply a plan's actions; who leaves is gone."""
    found = {w.worker_id: w for w in workers}
    for number, action in enumerate(actions):
        match action:
            case Start(pool):
                name = f"new-{number}-{len(found)}"
                found[name] = PlannedWorker(name, pool, Phase.STARTING)
            case SetRole(worker_id, pool):
                assert found[worker_id].phase is Phase.READY
                found[worker_id] = replace(found[worker_id], pool=pool)
            case Drain(worker_id):
                assert found[worker_id].phase is Phase.READY
                del found[worker_id]
            case Stop(worker_id):
                assert found[worker_id].phase is Phase.STARTING
                del found[worker_id]
    return list(found.values())


def live_of(workers: list[PlannedWorker]) -> dict[str, int]:
    live = [w.pool for w in workers if w.phase in (Phase.STARTING, Phase.READY)]
    return {pool: live.count(pool) for pool in POOLS}


@given(workers_of_any_kind(), st.tuples(*[st.integers(0, 5)] * 3), st.booleans())
def test_the_plan_reaches_its_targets_in_one_go(
    workers: list[PlannedWorker], wanted: tuple[int, int, int], same: bool
) -> None:
    """But one that serves is kept until another does."""
    goal = targets(*wanted, groups=SAME if same else ())
    first = after(plan(workers, goal, {}, 0.0), workers)
    if any(w.phase is Phase.READY for w in workers) and any(wanted):
        assert any(w.phase is Phase.READY for w in first)
    assert sum(live_of(first).values()) <= sum(wanted) + 1
    if live_of(first) != dict(goal.replicas):
        assert [w.phase for w in first].count(Phase.READY) == 1
    assert plan(first, goal, {}, 0.0) == []
    begun = [replace(w, phase=Phase.READY) if w.phase is Phase.STARTING else w for w in first]
    second = after(plan(begun, goal, {}, 0.0), begun)
    assert live_of(second) == dict(goal.replicas)
    assert plan(second, goal, {}, 0.0) == []


@given(workers_of_any_kind(), st.tuples(*[st.integers(0, 2)] * 3))
def test_a_plan_with_silent_workers_comes_to_an_end(workers: list[PlannedWorker], wanted: tuple[int, int, int]) -> None:
    """Silent ones, which were taken over, count for their pool, and stay."""
    fleet = [replace(w, is_silent=w.phase is Phase.STARTING and w.num_requests < 5) for w in workers]
    goal = targets(*wanted, groups=SAME)
    first = after(plan(fleet, goal, {}, 0.0), fleet)
    assert [w for w in fleet if w.is_silent] == [w for w in first if w.is_silent]
    assert plan(first, goal, {}, 0.0) == []


def test_the_last_that_serves_is_kept_until_another_does() -> None:
    last, coming = ready("m-1", "mixed", 3), PlannedWorker("d-2", "decode", Phase.STARTING)
    goal = targets(decode=1)
    assert plan([last], goal, {}, 0.0) == [Start("decode")]
    assert plan([ready("m-0", "mixed"), last, coming], goal, {}, 0.0) == [Drain("m-0")]
    assert plan([last, coming], goal, {}, 0.0) == []
    assert plan([last], goal, {"decode": Failures(3, "boom", 10.0)}, 0.0) == []
    assert plan([last, ready("d-2", "decode")], goal, {}, 0.0) == [Drain("m-1")]
    assert plan([last, replace(coming, waits=True)], goal, {}, 0.0) == [Drain("m-1")], "it may wait for this place"
    assert plan([last], targets(), {}, 0.0) == [Drain("m-1")]


def test_one_that_was_taken_over_and_is_silent_is_neither_stopped_nor_replaced() -> None:
    """A worker that may be serving: ending it ends its requests."""
    silent = PlannedWorker("d-1", "decode", Phase.STARTING, is_silent=True)
    assert plan([silent], targets(), {}, 0.0) == []
    assert plan([silent], targets(decode=1), {}, 0.0) == []
    assert plan([silent, ready("d-2", "decode")], targets(decode=1), {}, 0.0) == [], "the silent one may be dead"
    others = [ready("d-2", "decode", 1), ready("d-3", "decode")]
    assert plan([silent, *others], targets(decode=1), {}, 0.0) == [Drain("d-3")]
    fleet = [silent, ready("d-2", "decode"), ready("p-3", "prefill")]
    assert plan(fleet, targets(prefill=1, groups=SAME), {}, 0.0) == [Drain("d-2")], "it has the silent one's role"
    assert plan([silent, ready("p-2", "prefill")], targets(decode=1, groups=SAME), {}, 0.0) == [
        SetRole("p-2", "decode")
    ]


def test_a_place_that_does_not_help_is_the_only_one_that_is_given_up() -> None:
    """Settings that fit nowhere: the others serve on."""
    old = [replace(ready(name, "decode"), is_outdated=True) for name in ("d-1", "d-2")]
    waiting = PlannedWorker("d-3", "decode", Phase.STARTING, waits=True)
    for fleet, expected in (([*old, waiting], [Drain("d-1")]), ([old[1], waiting], [])):
        goal = upgrade_targets(fleet, {"decode": 2}, {}, in_place=False)
        assert plan(fleet, goal, {}, 0.0) == expected


def test_what_a_pool_lacks_is_what_waits_in_the_place_of_workers_and_not_beside_them() -> None:
    waiting = PlannedWorker("d-3", "decode", Phase.STARTING, waits=True)
    fleet = [ready("d-1", "decode"), waiting]
    assert lacking(fleet, {"decode": 2, "mixed": 1}) == {"decode": 1}
    assert lacking(fleet, {"decode": 1}) == lacking(fleet[:1], {"decode": 2}) == {}


@given(
    st.dictionaries(st.sampled_from(POOLS), st.integers(1, 4), min_size=1),
    st.booleans(),
    st.integers(-4, 3),
    st.randoms(use_true_random=False),
)
def test_an_upgrade_replaces_every_worker_one_at_a_time(
    replicas: dict[str, int], in_place: bool, room: int, chance: random.Random
) -> None:
    """Whatever starts, waits for a place and ends first. `room`: places beyond those of the targets; of a pool that has
    too few, as many workers are replaced as there are."""
    num_places = max(sum(replicas.values()) + room, 0)
    names = [(f"{pool}-0-{i}", pool) for pool, number in replicas.items() for i in range(number)]
    fleet = {name: replace(ready(name, pool), is_outdated=True) for name, pool in names}
    for name, pool in chance.sample(names, len(names) - min(num_places, len(names))):
        fleet[name] = PlannedWorker(name, pool, Phase.STARTING, is_outdated=True, waits=True)
    lacked = lacking(fleet.values(), replicas)
    replicas = {pool: number - lacked.get(pool, 0) for pool, number in replicas.items()}
    room = max(room, 0)
    for step in range(1000):
        wanted = upgrade_targets(list(fleet.values()), replicas, {}, in_place=in_place)
        actions = plan(fleet.values(), wanted, {}, 0.0)
        for action in actions:
            match action:
                case Start(pool):
                    name = f"{pool}-1-{step}-{len(fleet)}"
                    fleet[name] = PlannedWorker(name, pool, Phase.STARTING, waits=len(fleet) >= num_places)
                case Stop(name):
                    assert fleet[name].is_outdated and not step
                    del fleet[name]
                case Drain(name):
                    assert fleet[name].is_outdated
                    fleet[name] = replace(fleet[name], phase=Phase.DRAINING)
                case _:
                    raise AssertionError(action)
        for pool, target in replicas.items():
            members = [w for w in fleet.values() if w.pool == pool]
            num_ready = sum(w.phase is Phase.READY for w in members)
            assert num_ready >= target - 1 and len(members) <= target + (0 if in_place else 1)
            assert num_ready >= target or in_place or not room
        changing = [w for w in fleet.values() if w.phase is not Phase.READY]
        if not changing and not actions:
            break
        if not changing:
            continue
        worker = chance.choice(changing)
        if worker.phase is Phase.DRAINING:
            del fleet[worker.worker_id]
        else:
            num_placed = sum(not w.waits for w in fleet.values())
            is_placed = not worker.waits or num_placed < num_places
            phase = Phase.READY if is_placed else worker.phase
            fleet[worker.worker_id] = replace(worker, waits=not is_placed, phase=phase)
    assert not any(w.is_outdated for w in fleet.values())
    assert sorted(w.pool for w in fleet.values()) == sorted(p for p, number in replicas.items() for _ in range(number))
