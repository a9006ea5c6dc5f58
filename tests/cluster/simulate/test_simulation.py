"""Simulated clusters: times that are computed by hand, conservation, and the engine's own batches."""

from itertools import pairwise

import numpy as np
import pytest

from diptych.cluster.bench.workloads import Lengths
from diptych.cluster.control.budgets import REST_S
from diptych.cluster.control.decisions import NUM_KEPT
from diptych.cluster.control.forecast import HOUR_S, HOURS, LOOKS_OF_AN_HOUR
from diptych.cluster.simulate.figures import figures_of
from diptych.cluster.simulate.load import LogNormal, SimulatedRequest, Synthetic, synthetic_load
from diptych.cluster.simulate.noise import Noise
from diptych.cluster.simulate.simulation import Simulation
from diptych.cluster.simulate.timing import FittedTimer
from diptych.cluster.simulate.transfers import MAX_REPORTED, Links, LinkSetup
from diptych.cluster.simulate.worker_setup import TransitTimes
from diptych.workers.core.scheduler_config import SchedulerConfig

from .clusters import cluster, requests

ONE = {"mixed": {"replicas": 1}}
SPLIT = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


def times(simulation: Simulation) -> list[tuple[float, float]]:
    """First token and end of each request, in ms."""
    columns = simulation.columns
    return [(round(a * 1e3, 6), round(b * 1e3, 6)) for a, b in zip(columns.first, columns.ended, strict=True)]


def check(simulation: Simulation) -> None:
    """Every request ended, and no block is held."""
    assert simulation.columns.num_ended == len(simulation.columns.came)
    for worker in simulation.alive.values():
        assert worker.check_integrity() == 0 and worker.is_empty
        assert worker.manager.num_free == worker.manager.num_blocks


def test_one_worker_alone() -> None:
    """Prompt of 100 in a step of 110 ms, then nine steps of 10 ms."""
    simulation = cluster(ONE)
    simulation.run(requests((0.0, 100, 10)))
    assert times(simulation) == [(110.0, 200.0)]
    check(simulation)


def test_an_arrival_waits_for_the_step_under_way_and_shares_those_after_it() -> None:
    """At 135 ms the step from 130 ms runs: the prompt's is from 140 to 200 ms, and the first decodes in it."""
    simulation = cluster(ONE)
    simulation.run(requests((0.0, 100, 10), (0.135, 50, 3)))
    assert times(simulation) == [(110.0, 250.0), (200.0, 220.0)]
    check(simulation)


def test_a_chunk_is_what_the_budget_leaves() -> None:
    """Budget 64: chunks of 64 and 36 tokens, in 74 and 46 ms."""
    simulation = cluster(ONE, scheduler=SchedulerConfig(max_batch_tokens=64, target_step_s=0))
    simulation.run(requests((0.0, 100, 1)))
    assert times(simulation) == [(120.0, 120.0)]


def test_a_step_is_longer_with_more_context() -> None:
    """1 ms for each token of context: steps of 11 .. 13 ms at contexts of 11 .. 13, after the prompt's 20 ms."""
    simulation = cluster(ONE, timer=FittedTimer((0.0, 0.0, 0.001, 0.002, 0.0, 0.0)))
    simulation.run(requests((0.0, 10, 4)))
    assert times(simulation) == [(20.0, 56.0)]


def test_a_hand_off_overlaps_with_prefill() -> None:
    """Chunks of 64 and 36 tokens end at 74 and 120 ms; each token takes 1 ms of the link: the first chunk is there at
    138 ms, the second at 174 ms; 2 ms later the sink has it, and makes four tokens."""
    simulation = cluster(SPLIT, scheduler=SchedulerConfig(max_batch_tokens=64, target_step_s=0))
    simulation.run(requests((0.0, 100, 5)))
    assert times(simulation) == [(120.0, 216.0)]
    assert simulation.links.num_bytes == 100 * 128
    check(simulation)


def test_groups_of_layers_are_sent_while_the_step_runs() -> None:
    """Two groups of a step of 110 ms: half of the 100 ms is sent by its end."""
    simulation = cluster(SPLIT, link=LinkSetup(128_000.0, 0.0, 2))
    simulation.run(requests((0.0, 100, 2)))
    assert times(simulation) == [(110.0, 170.0)]


def test_a_sink_without_blocks_pulls_later() -> None:
    simulation = cluster(SPLIT, num_blocks=12)
    simulation.run(requests(*((0.0, 100, 20) for _ in range(4))))
    check(simulation)
    assert simulation.columns.num_ended == 4
    assert len({end for _, end in times(simulation)}) == 4, "one after the other"


def test_prefixes_are_found_where_they_were_computed() -> None:
    simulation = cluster({"mixed": {"replicas": 2}}, prefix_cache=True)
    load = [SimulatedRequest(i, float(i), 160, 2, (7, i), 128) for i in range(3)]
    simulation.run(load)
    assert list(simulation.columns.num_cached) == [0, 128, 128]
    check(simulation)


def test_the_next_turn_finds_the_answer_too() -> None:
    simulation = cluster(ONE, prefix_cache=True)
    simulation.run(synthetic_load(Synthetic(1, 1.0, Lengths(64, 64), Lengths(33, 33), turns=2, think_s=1.0), 0))
    assert list(simulation.columns.num_cached) == [0, 96]
    assert simulation.columns.came[1] == pytest.approx(simulation.columns.ended[0] + 1.0)
    check(simulation)


def mixed_load(num: int, seed: int) -> list[SimulatedRequest]:
    return synthetic_load(Synthetic(num, 30.0, LogNormal(200.0, 0.8), LogNormal(40.0, 0.8)), seed)


@pytest.mark.parametrize("pools", [ONE, SPLIT, {"prefill": {"replicas": 2}, "decode": {"replicas": 3}}])
@pytest.mark.parametrize("num_blocks", [80, 1000])
def test_every_request_ends_once_and_blocks_come_free(pools: dict[str, object], num_blocks: int) -> None:
    load = [request for request in mixed_load(120, 1) if request.num_input + request.num_output < 80 * 16]
    simulation = cluster(pools, num_blocks=num_blocks, timer=FittedTimer((0.003, 1e-5, 1e-7, 1e-5, 1e-9, 0.0)))
    simulation.run(load)
    check(simulation)
    num_preempted = sum(w.scheduler.num_preemptions for w in simulation.alive.values())
    assert num_preempted > 0 or num_blocks == 1000 or len(pools) > 1


def test_a_run_of_steps_is_the_same_as_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = FittedTimer((0.003, 1e-5, 1e-6, 1e-5, 1e-9, 0.0))
    together = cluster(SPLIT, num_blocks=300, timer=timer)
    together.run(mixed_load(100, 2))
    monkeypatch.setattr("diptych.cluster.simulate.worker.SimulatedWorker._num_alike", lambda *_: 1)
    single = cluster(SPLIT, num_blocks=300, timer=timer)
    single.run(mixed_load(100, 2))
    assert single.num_events > together.num_events
    assert np.array(times(single)) == pytest.approx(np.array(times(together)))
    for a, b in zip(single.alive.values(), together.alive.values(), strict=True):
        assert (a.num_steps, a.num_decode_tokens) == (b.num_steps, b.num_decode_tokens)
        assert a.busy_s == pytest.approx(b.busy_s)


@pytest.mark.parametrize("pools", [SPLIT, {"mixed": {"replicas": 2}}])
def test_routes_by_predicted_times_are_the_policys(pools: dict[str, object]) -> None:
    """The policy finds the costs of all workers measured, and the speed of links that were used."""
    timer = FittedTimer((0.003, 1e-5, 1e-7, 1e-4, 1e-9, 0.0))
    level = {"ttft_s": 0.2, "tpot_s": 0.01}
    good: dict[bool, float] = {}
    for predict in (False, True):
        simulation = cluster(pools, timer=timer, level=level, predict=predict)
        simulation.run(mixed_load(150, 6))
        check(simulation)
        good[predict] = figures_of(simulation, {"ttft": 0.2, "tpot": 0.01}, None).good
    assert good[True] > good[False] or len(pools) == 1


def test_neighbours_slow_each_other_down() -> None:
    """A prompt of 100 takes 110 ms alone. Beside another worker everything takes twice as long: from 60 ms on, until
    the first prompt is done at 60 + 2 * 50 = 160 ms; of the second 60 ms are left then."""
    simulation = cluster({"mixed": {"replicas": 2}}, per_machine=2, contention=1.0)
    simulation.run(requests((0.0, 100, 1), (0.06, 100, 1)))
    assert times(simulation) == [(160.0, 160.0), (220.0, 220.0)]
    check(simulation)


def test_a_neighbour_cuts_a_run_of_steps() -> None:
    """Steps of 10 ms from 110 ms on; at 135 ms another prompt of 100 comes to the other worker. The step from 130 ms
    has 5 ms left, which take 10, then six steps of 20 ms end at 265 ms; of the prompt, 45 ms are left then."""
    simulation = cluster({"mixed": {"replicas": 2}}, per_machine=2, contention=1.0)
    simulation.run(requests((0.0, 100, 10), (0.135, 100, 1)))
    assert times(simulation) == [(110.0, 265.0), (310.0, 310.0)]
    check(simulation)


def test_a_request_is_longer_on_its_way_while_all_workers_compute() -> None:
    """5 ms for the first two; the third comes while both workers compute: 25 ms, and it waits for the first one's."""
    simulation = cluster({"mixed": {"replicas": 2}}, request_times=TransitTimes(0.005, 0.02))
    simulation.run(requests((0.0, 100, 1), (0.05, 100, 1), (0.06, 100, 1), (0.3, 100, 1)))
    assert times(simulation) == [(115.0, 115.0), (165.0, 165.0), (225.0, 225.0), (415.0, 415.0)]
    simulation = cluster({"mixed": {"replicas": 1}}, request_times=TransitTimes(0.005, 0.02))
    simulation.run(requests((0.0, 100, 1), (0.1, 100, 1)))
    assert times(simulation) == [(115.0, 115.0), (235.0, 235.0)], "10 ms after the first one's end"


def test_noise_repeats_with_its_seed() -> None:
    noise = Noise.of({1: 0.5, 50: 1.0, 99: 3.0}, 7)
    runs: list[list[tuple[float, float]]] = []
    for each in (noise, noise, Noise.of({1: 0.5, 50: 1.0, 99: 3.0}, 8)):
        simulation = cluster(SPLIT, noise=each)
        simulation.run(mixed_load(60, 3))
        check(simulation)
        runs.append(times(simulation))
    assert runs[0] == runs[1] != runs[2]


def test_reports_tell_of_links() -> None:
    links = Links(LinkSetup(100.0, 0.0))
    links.send("a", "s", 50.0, (0.0, 1.0), 1.0)
    links.read("a", "s", 30.0, 2.0)
    assert [(each.incarnation, each.num_bytes, each.read_s) for each in links.stats("s")] == [("a", 80, 0.8)]
    for i in range(MAX_REPORTED):
        links.read(f"b{i}", "s", 10.0, 3.0)
    assert len(links.stats("s")) == MAX_REPORTED and links.stats("s")[0].incarnation == "b0"
    links.forget("b0")
    assert len(links.stats("s")) == MAX_REPORTED - 1


def test_the_same_load_gives_the_same_times() -> None:
    runs: list[list[tuple[float, float]]] = []
    for _ in range(2):
        simulation = cluster(SPLIT)
        simulation.run(mixed_load(100, 3))
        runs.append(times(simulation))
    assert runs[0] == runs[1]
    assert mixed_load(100, 3) != mixed_load(100, 4)


def test_what_cannot_be_served_is_counted() -> None:
    simulation = cluster(ONE, max_requests=1)
    simulation.run(requests((0.0, 100, 10), (0.01, 10, 1), (1.0, 9000, 1)))
    assert (simulation.num_refused, simulation.num_too_long, simulation.columns.num_ended) == (1, 1, 1)
    figures = figures_of(simulation, {"ttft": 0.5}, 3.6)
    assert (figures.completed, figures.refused, figures.too_long) == (1, 1, 1)
    assert figures.good == pytest.approx(1 / 3)
    assert figures.spreads["ttft"].percentiles[50] == pytest.approx(110.0)
    assert figures.cost_per_million_tokens == pytest.approx(simulation.now * 1e-3 / 10 * 1e6)


def test_the_autoscaler_starts_workers_and_drains_them() -> None:
    """Sixty prompts of 1.01 s each, four a second; the level is 1 s. Later nothing comes for minutes."""
    pools = {"mixed": {"replicas": 1, "min_replicas": 1, "max_replicas": 3}}
    simulation = cluster(pools, start_s=0.5, level={"ttft_s": 1.0, "tpot_s": 1.0})
    crowd = [(0.25 * i, 1000, 2) for i in range(60)]
    simulation.run(requests(*crowd, (300.0, 10, 2)))
    assert len(simulation.alive) + len(simulation.retired) == 3
    assert len(simulation.retired) == 2
    check(simulation)
    assert np.array(simulation.columns.first).min() > 0


@pytest.mark.parametrize("dial", [False, True])
def test_the_dial_follows_a_load_that_turns_from_prompts_to_answers(dial: bool) -> None:
    """Eight prompts of 100 ms a second need most of one worker and would slow the decodes of two; then up to 30 long
    answers at once need both workers."""
    simulation = cluster(
        {"mixed": {"replicas": 2}},
        timer=FittedTimer((0.01, 0.001, 0.0, 0.001, 0.0, 0.0)),
        level={"ttft_s": 10.0, "tpot_s": 0.018},
        dial=dial,
        predict=True,
    )
    prompts = [(0.125 * i, 100, 10) for i in range(320)]
    simulation.run(requests(*prompts, *((40.0 + 0.5 * i, 16, 400) for i in range(100))))
    check(simulation)
    actions = [decision.action for decision in reversed(simulation.decisions.statuses(simulation.now))]
    changes = ["0 -> 1 of 2 workers only prefill", "1 -> 0 of 2 workers only prefill"]
    assert actions == (changes if dial else [])
    assert figures_of(simulation, {}, None).num_decisions == ({"budgets": 2} if dial else {})


@pytest.mark.parametrize(("prompt", "answer", "share"), [(600, 8, 0.5), (450, 70, 0.6), (32, 200, 0.6)])
def test_on_a_steady_load_budgets_turn_once_a_minute_at_most(prompt: int, answer: int, share: float) -> None:
    """Times of the 135 M shape on a core; `share`: of the two workers' time that the load takes, about."""
    cost_s = 0.0006 * prompt + 0.0015 * answer
    rng = np.random.default_rng(0)
    gaps = rng.exponential(cost_s / (2 * share), int(200 * 2 * share / cost_s))
    for level in ({"ttft_s": 1.0, "tpot_s": 0.05}, {"ttft_s": 0.5, "tpot_s": 0.02}):
        simulation = cluster(
            {"mixed": {"replicas": 2}},
            timer=FittedTimer((0.009, 0.0003, 8e-7, 0.0005, 2e-7, 0.0)),
            scheduler=SchedulerConfig(max_batch_tokens=768),
            level=level,
            dial=True,
            predict=True,
        )
        simulation.run(requests(*((at, prompt, answer) for at in np.cumsum(gaps).tolist())))
        ages = [(decision.age_s, decision.action) for decision in simulation.decisions.statuses(simulation.now)]
        assert len(ages) < NUM_KEPT
        turns = [age for (age, action), (_, before) in pairwise(ages) if action != before]
        assert all(earlier - later >= REST_S for later, earlier in pairwise(turns)), ages


def rush_hour(knows_days: bool) -> tuple[float, list[str]]:
    """Simulate from five minutes before nine, when prompts become 25 times as many, to three minutes after. Returns the
    share of requests whose first token is late, and the reasons of the decisions."""
    simulation = cluster({"mixed": {"replicas": 1, "min_replicas": 1, "max_replicas": 4}}, start_s=30.0)
    scaler = simulation._scaler
    scaler.begins_at_s = 9 * HOUR_S - 300
    if knows_days:
        hours = scaler._controller.growth.pools["mixed"].prompts.hours
        for hour in range(HOURS):
            for _ in range(LOOKS_OF_AN_HOUR):
                hours.see(hour * HOUR_S, 2500.0 if hour == 9 else 100.0)
    times = [*range(300), *(300 + i / 25 for i in range(180 * 25))]
    simulation.run(requests(*((at, 100, 5) for at in times)))
    check(simulation)
    columns = simulation.columns
    late = [first - came > 1.0 for came, first in zip(columns.came, columns.first, strict=True)]
    return sum(late) / len(late), [decision.reason for decision in simulation.decisions.statuses(0.0)]


def test_where_days_are_known_workers_come_before_the_rush_hour_and_fewer_requests_are_late() -> None:
    late_without, _ = rush_hour(knows_days=False)
    late_with, reasons = rush_hour(knows_days=True)
    assert "2500 prompt tokens/s and" in reasons[-1] and "are expected in 30 s" in reasons[-1]
    assert late_with < 0.02
    assert late_without > 0.1


def test_on_a_steady_load_a_forecast_does_not_move_the_pool_to_and_fro() -> None:
    simulation = cluster({"mixed": {"replicas": 1, "min_replicas": 1, "max_replicas": 4}}, start_s=10.0)
    simulation.run(requests(*((i / 15, 100, 5) for i in range(15 * 400))))
    changes = [(-d.age_s, d.action) for d in reversed(simulation.decisions.statuses(0.0))]
    signs = [(at, int(action.split()[2]) > int(action.split()[0])) for at, action in changes]
    assert signs and signs[0][1]
    for (at, sign), (later, other) in pairwise(signs):
        assert sign == other or later - at >= REST_S, changes
