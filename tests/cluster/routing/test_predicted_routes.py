"""Predicted times, by hand, and the routes that follow from them."""

import random
from dataclasses import replace

import pytest

from diptych.cluster.common.prediction import (
    HORIZON,
    FleetCosts,
    Level,
    WorkerCost,
    WorkerState,
    WorkerTimes,
    check_step_cost,
    decode_harm,
    decode_miss_probability,
    miss_probability,
    prefill_harm,
    prefill_s,
    tpot_s,
    ttft_s,
)
from diptych.cluster.routing.actions import RequestFacts, Route
from diptych.cluster.routing.fleet import FleetWorker, WorkerInfo
from diptych.cluster.routing.policy import NUM_SAMPLED, RoutingConfig, choose
from diptych.proto import worker_pb2
from diptych.workers.common.errors import InternalError
from diptych.workers.common.role import Role
from diptych.workers.common.wire import ROLE_TO_PROTO
from diptych.workers.core.scheduler_config import STEP_TOKENS, SchedulerConfig

LEVEL = Level(ttft_s=0.5, tpot_s=0.05)
COST = WorkerCost(fixed_s=0.004, decode_s=0.001, context_s=0.0, prefill_s=0.001, pair_s=0.0)
CONFIG = RoutingConfig(predict=True, ttft_s=0.5, tpot_s=0.05)
NUM_BLOCKS = 100


def times(role: Role = Role.MIXED, decodes: int = 0, waiting: int = 0, share: float = 0.0) -> WorkerTimes:
    return budgeted(SchedulerConfig().budget_of(role), decodes, waiting, share)


def budgeted(budget: int, decodes: int, waiting: int = 0, share: float = 0.0) -> WorkerTimes:
    return WorkerTimes.of(WorkerState(budget, STEP_TOKENS, decodes, 0, waiting, share), COST, LEVEL)


def step_cost(**changes: float) -> worker_pb2.StepCost:
    values = {"fixed_s": 0.004, "decode_s": 0.001, "prefill_s": 0.001} | changes
    return worker_pb2.StepCost(prefill_is_measured=True, decode_is_measured=True, **values)


def worker(
    name: str,
    role: str = "mixed",
    *,
    waiting: int = 0,
    late: int = 0,
    decodes: int = 0,
    share: float = 0.0,
    free: int = NUM_BLOCKS,
) -> FleetWorker:
    view = FleetWorker(WorkerInfo(name, f"{name}:1", role, role), is_up=True, num_blocks=NUM_BLOCKS)
    view.max_context_tokens, view.block_size = 5000, 100
    budget = SchedulerConfig().budget_of(Role(role))
    load = {"num_waiting_tokens": waiting, "num_decoding": decodes, "prefill_share": share, "prefill_budget": budget}
    load["num_late_tokens"] = late
    load["role"] = ROLE_TO_PROTO[Role(role)]
    view.take(worker_pb2.LoadReport(num_blocks=NUM_BLOCKS, num_free_blocks=free, step_tokens=STEP_TOKENS, **load))
    return view


def route(*workers: FleetWorker, num_tokens: int = 100, max_new: int = 50, **fields: object) -> Route:
    costs = FleetCosts()
    for w in workers:
        costs.report(w.incarnation, step_cost())
    given = {"cached_tokens": {}} | fields
    facts = RequestFacts(num_tokens, max_new, **given)  # type: ignore[arg-type]
    return choose({w.incarnation: w for w in workers}, facts, CONFIG, costs)


def test_a_request_does_not_wait_for_prompts_that_let_it_go_first_but_shares_the_time_with_them() -> None:
    state = WorkerState(STEP_TOKENS - 1, STEP_TOKENS, 6, 0, 300, 0.0, late_tokens=200)
    found, other = WorkerTimes.of(state, COST, LEVEL), times(decodes=6, waiting=100)
    assert ttft_s(found, 0.05) == ttft_s(other, 0.05)
    assert found.share == times(decodes=6, waiting=300).share > other.share
    busy, late = worker("busy", waiting=150), worker("late", waiting=400, late=300)
    assert route(busy, late).decode == "late"


def test_times_by_hand() -> None:
    loaded = times(decodes=6, waiting=100)
    own_s = prefill_s(loaded, 0, 50)
    assert own_s == pytest.approx(0.050)
    # A step of six decodes takes 10 ms; one that aims at 45 ms leaves 7/9 to the 150 prompt tokens, of 1 ms each.
    assert ttft_s(loaded, own_s) == pytest.approx(0.010 + 0.150 * 9 / 7)
    assert tpot_s(loaded, 0.0, 50) == pytest.approx(0.011 / (1 - 0.1 / (HORIZON * 0.5)))
    assert tpot_s(loaded, own_s, 50) == pytest.approx(0.011 / (1 - 0.15 / (HORIZON * 0.5)))
    before, after = 0.010 / (1 - 0.1 / (HORIZON * 0.5)) / 0.05, 0.010 / (1 - 0.15 / (HORIZON * 0.5)) / 0.05
    harm = prefill_harm(loaded, own_s)
    more = 6 * (decode_miss_probability(after) - decode_miss_probability(before))
    assert harm == pytest.approx(more / (1 + more))
    alone, decodes = (decode_harm(loaded, tpot_s(loaded, own, 50)) for own in (own_s, 0.0))
    assert decodes > 0 and alone > decodes + harm - 1e-9


def test_what_is_computed_of_a_prompt_attends_to_what_is_cached() -> None:
    pairs = WorkerTimes.of(WorkerState(0, STEP_TOKENS, 0, 0, 0, 0.0), replace(COST, pair_s=1e-6), LEVEL)
    assert prefill_s(pairs, 100, 150) == pytest.approx(50 * (0.001 + 125e-6))


def test_hidden_prompts_delay_nobody() -> None:
    """Steps of six decodes take 10 ms, and compute 3 ms of prompts before they take longer."""
    hiding = replace(COST, hidden_s=0.003)

    def of(budget: int, tpot_s: float, decodes: int = 6) -> WorkerTimes:
        return WorkerTimes.of(WorkerState(budget, STEP_TOKENS, decodes, 0, 0, 0.0), hiding, Level(0.5, tpot_s))

    bounded = of(STEP_TOKENS - 1, 0.05)  # a step of 45 ms computes 38 ms of prompts, which make it 35 ms longer
    assert ttft_s(bounded, 0.4) == pytest.approx(0.010 + 0.4 * 45 / 38)
    assert tpot_s(bounded, 0.2, 0) == pytest.approx(0.011 / (1 - 0.2 * 35 / 38 / (HORIZON * 0.5)))
    tight = of(STEP_TOKENS - 1, 0.011)  # sixteen tokens at least, though that takes 23 ms
    assert ttft_s(tight, 0.4) == pytest.approx(0.010 + 0.4 * 23 / 16)
    free = replace(COST, fixed_s=0.0, prefill_s=0.0)
    assert ttft_s(WorkerTimes.of(WorkerState(1, STEP_TOKENS, 6, 0, 0, 0.0), free, Level(0.5, 1e-6)), 0.0) == 0.006
    few = of(2, 0.05)  # tokens of a step, all hidden
    assert ttft_s(few, 0.4) == pytest.approx(0.010 + 0.4 * 10 / 2)
    assert prefill_harm(few, 0.4) == 0 and tpot_s(few, 0.4, 0) == pytest.approx(0.011)
    assert ttft_s(of(2, 0.05, decodes=0), 0.4) == pytest.approx(0.004 - 0.003 + 0.4)


def test_nobody_is_harmed_where_nobody_decodes() -> None:
    idle = times(waiting=3000)
    assert prefill_harm(idle, 0.05) == decode_harm(idle, 10.0) == 0
    assert ttft_s(idle, 0.05) == pytest.approx(0.004 + 3.05)


def test_a_prefill_budget_is_what_it_leaves_of_a_step_to_prompts() -> None:
    """A whole step's budget knows no time target; one that is smaller is limited by it, and by its tokens."""
    expected = {
        STEP_TOKENS: 1.0,
        STEP_TOKENS - 1: 7 / 9,
        256: 7 / 9,
        20: 0.020 / 0.030,
        1: 0.001 / 0.011,
        0: 0.016 / 0.026,
    }
    for budget, share in expected.items():
        assert ttft_s(budgeted(budget, 6), 0.4) == pytest.approx(0.01 + 0.4 / share), budget


def test_a_time_far_beyond_its_level_costs_no_more_than_one_request() -> None:
    assert miss_probability(1.0) == 0.5
    assert decode_miss_probability(1.0) == 0.5 and decode_miss_probability(50.0) <= 1
    assert decode_miss_probability(0.7) < 0.02 and decode_miss_probability(1.3) > 0.95
    assert miss_probability(0.5) < 0.06 and 0.94 < miss_probability(2.0) < miss_probability(50.0) <= 1


def test_what_a_worker_has_not_measured_is_the_others_mean() -> None:
    costs = FleetCosts()
    assert not costs.are_known
    costs.report("p", worker_pb2.StepCost(prefill_s=0.002, pair_s=1e-6, prefill_is_measured=True))
    assert not costs.are_known
    costs.report("d1", worker_pb2.StepCost(fixed_s=0.004, decode_s=0.001, decode_is_measured=True))
    costs.report("d2", worker_pb2.StepCost(fixed_s=0.008, decode_s=0.003, decode_is_measured=True))
    assert costs.are_known
    assert costs.of("d1") == WorkerCost(0.004, 0.001, 0.0, 0.002, 1e-6)
    assert costs.of("p") == costs.of("new") == WorkerCost(0.006, 0.002, 0.0, 0.002, 1e-6)
    costs.report("d2", worker_pb2.StepCost())
    assert costs.of("p").fixed_s == pytest.approx(0.004)
    costs.forget("d1")
    costs.forget("d1")
    assert not costs.are_known


@pytest.mark.parametrize("changes", [{"fixed_s": -1.0}, {"pair_s": float("nan")}, {"decode_s": float("inf")}])
def test_impossible_costs_are_refused(changes: dict[str, float]) -> None:
    check_step_cost(worker_pb2.LoadReport(step_cost=step_cost()))
    with pytest.raises(InternalError, match="impossible costs"):
        check_step_cost(worker_pb2.LoadReport(step_cost=step_cost(**changes)))
    with pytest.raises(InternalError, match="share of prompts"):
        check_step_cost(worker_pb2.LoadReport(prefill_share=1.5))


def test_a_request_goes_where_its_own_level_is_kept() -> None:
    # One computes prompts all the time, another decodes so much that prompts take twice as long.
    fleet = [worker("busy", share=0.9), worker("slow", decodes=20)]
    hurried, fluent = Level(ttft_s=0.2, tpot_s=10.0), Level(ttft_s=60.0, tpot_s=0.03)
    assert route(*fleet, level=fluent).decode == "slow"
    assert route(*fleet, level=hurried).decode == "busy"
    assert route(*fleet) == route(*fleet, level=LEVEL)


def test_a_prompt_stays_away_from_sequences_that_were_promised_short_times() -> None:
    fleet = [worker("a", decodes=4), worker("b", decodes=4)]
    assert {route(*fleet, sample=i).decode for i in range(4)} == {"a", "b"}
    for w, other in (fleet, fleet[::-1]):
        w.promise(0.012, 1)
        w.known_times = None
        assert {route(*fleet, sample=i).decode for i in range(4)} == {other.incarnation}
        w.promise(0.012, -1)
        w.known_times = None


def test_tpot_is_at_most_what_steps_are_kept_to() -> None:
    """Where the budget for prompts is a whole step, they are kept to nothing."""
    assert tpot_s(times(decodes=6, share=0.9), 0.0, 50) == pytest.approx(0.045)
    assert tpot_s(times(Role.PREFILL, decodes=6, share=0.9), 0.0, 50) == pytest.approx(0.011 / 0.1)


def test_a_worker_that_is_late_already_is_not_given_all_requests() -> None:
    """Though they harm its sequences no more, and those of others with more than one expected miss."""
    fleet = [worker("late", waiting=5000, decodes=40), worker("a", decodes=20, share=0.4)]
    assert route(*fleet).decode == "a"


def test_an_idle_cluster_computes_a_short_prompt_on_one_worker() -> None:
    assert route(worker("p", "prefill"), worker("d", "decode")).prefill is None


def test_an_idle_cluster_uses_all_its_workers() -> None:
    fleet = [worker("p", "prefill"), worker("d", "decode"), worker("m")]
    assert {route(*fleet, sample=i).decode for i in range(3)} == {"p", "d", "m"}
    fleet[2].num_in_flight = 1
    assert {route(*fleet, sample=i).decode for i in range(3)} == {"p", "d"}


def test_a_short_cached_prefix_decides_between_workers_that_are_nearly_equal() -> None:
    """However little time it spares; until that worker has more to do than it spares."""
    fleet = [worker("a"), worker("b"), worker("c")]
    found = [route(*fleet, num_tokens=40, cached_tokens={"b": 32}, sample=i).decode for i in range(3)]
    assert found == ["b"] * 3
    fleet[1].num_in_flight = 1  # sequence, of which a token costs as much as one of a prompt
    assert {route(*fleet, num_tokens=40, cached_tokens={"b": 32}, sample=i).decode for i in range(3)} == {"a", "c"}


def test_a_long_prompt_does_not_stall_what_decodes() -> None:
    busy = worker("d", "decode", decodes=20)
    assert route(busy, worker("p", "prefill", share=0.3), num_tokens=300) == Route(None, "p")
    assert route(busy, worker("p", "prefill", decodes=2, share=0.9), num_tokens=300) == Route("p", "d")


def test_a_prefill_worker_with_a_queue_gives_prompts_to_the_decode_worker() -> None:
    """A fixed split lets them wait: the reason why it keeps fewer requests within their level."""
    assert route(worker("p", "prefill", waiting=2000), worker("d", "decode", decodes=4)) == Route(None, "d")


def test_a_decode_worker_is_not_judged_by_prompts_that_would_go_elsewhere() -> None:
    """Where each worker computes prompts beside what decodes there, a first hand-off changes neither. It is taken by
    what the decode worker is once prompts go elsewhere."""

    def beside(sink: str, max_new: int = 50) -> Route:
        workers = [worker(role[0], role, decodes=3, share=0.4) for role in ("prefill", sink)]
        costs = FleetCosts()
        for each in workers:
            each.kv_token_bytes = 1_000_000
            costs.report(each.incarnation, step_cost(fixed_s=0.03, decode_s=0.0001))
        fleet = {each.incarnation: each for each in workers}
        return choose(fleet, RequestFacts(300, max_new, cached_tokens={}), CONFIG, costs)

    assert beside("decode") == Route("p", "d")
    assert beside("mixed").prefill is None
    # A link that was never used is tried: by 1 GB/s the KV would take 75 ms of each token.
    assert beside("decode", max_new=4) == Route("p", "d")


def test_decodes_leave_a_worker_full_of_prompts() -> None:
    """The prompt is computed where its prefix is cached, and the rest where steps are short."""
    holder = worker("p", "prefill", share=0.9)
    found = route(holder, worker("d", "decode", decodes=4), num_tokens=900, cached_tokens={"p": 890})
    assert found == Route("p", "d")
    pairs = frozenset({("p", "d")})
    found = route(
        holder, worker("d", "decode", decodes=4), num_tokens=900, cached_tokens={"p": 890}, failed_pairs=pairs
    )
    assert found.prefill is None
    found = route(
        holder, worker("d", "decode", decodes=4), num_tokens=900, cached_tokens={"p": 890}, may_hand_off=False
    )
    assert found.prefill is None


def test_one_token_is_made_where_the_prompt_is_computed() -> None:
    assert route(worker("p", "prefill", share=0.9), worker("d", "decode", waiting=900), max_new=1) == Route(None, "p")


def test_a_full_worker_is_taken_last() -> None:
    full = worker("a", free=0)
    assert route(full, worker("b", waiting=300)) == Route(None, "b")
    assert route(full) == Route(None, "a")


def test_workers_that_failed_the_request_are_taken_where_no_other_is_left() -> None:
    assert route(worker("a"), worker("b", waiting=300), excluded=frozenset("a")) == Route(None, "b")
    assert route(worker("a"), excluded=frozenset("a")) == Route(None, "a")


def test_roles_decide_until_steps_are_measured() -> None:
    fleet = {"p": worker("p", "prefill", waiting=2000), "d": worker("d", "decode")}
    facts = RequestFacts(100, 50, {})
    assert choose(fleet, facts, CONFIG, FleetCosts()) == choose(fleet, facts, CONFIG) == Route("p", "d")


def test_of_many_workers_an_idle_one_is_found_by_some_requests() -> None:
    for idle in range(0, 100, 9):
        fleet = [worker(f"w{i:03}", waiting=0 if i == idle else 900) for i in range(100)]
        num = sum(route(*fleet, sample=i) == Route(None, f"w{idle:03}") for i in range(100))
        assert num == pytest.approx(NUM_SAMPLED, abs=2)
    assert route(*fleet, num_tokens=1000, cached_tokens={"w050": 990}, sample=1).decode == "w050"
    for view in fleet[:-1]:
        view.is_draining = True
    assert all(route(*fleet, sample=i) == Route(None, "w099") for i in range(100))


def test_any_fleet_gets_a_possible_route() -> None:
    rng = random.Random(5)
    for _ in range(500):
        roles = rng.choices(["prefill", "decode", "mixed"], k=rng.randint(1, 40))
        fleet = [
            worker(
                f"w{i}",
                role,
                waiting=rng.choice([0, 50, 5000]),
                decodes=rng.randint(0, 40),
                share=rng.random(),
                free=rng.choice([0, 10, NUM_BLOCKS]),
            )
            for i, role in enumerate(roles)
        ]
        cached = {f"w{i}": rng.randint(0, 2000) for i in range(3)}
        found = route(
            *fleet, num_tokens=rng.randint(1, 2000), max_new=rng.choice([1, 2, 500]), cached_tokens=cached,
            sample=rng.randint(0, 10**6), excluded=frozenset({"w1"}), may_hand_off=rng.random() < 0.7,
        )  # fmt: skip
        names = {view.incarnation for view in fleet}
        assert found.decode in names and found.prefill in {None, *names} - {found.decode}
