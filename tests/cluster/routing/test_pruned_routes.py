"""Routes are those of a search that predicts all of every worker: what is not predicted could not have been chosen."""

import random
from itertools import product

from diptych.cluster.common.prediction import (
    FleetCosts,
    Level,
    WorkerCost,
    WorkerState,
    WorkerTimes,
    decode_harm,
    decode_times,
    miss_probability,
    prefill_harm,
    prefill_s,
    prompt_misses,
    tpot_miss,
    tpot_s,
    ttft_s,
)
from diptych.cluster.routing.actions import RequestFacts, Route
from diptych.cluster.routing.fleet import Fleet, FleetWorker, RequestLoad, WorkerInfo
from diptych.cluster.routing.kv_costs import pull_s
from diptych.cluster.routing.policy import (
    ANSWER_TOKENS,
    HANDOFF_MISSES,
    NEARLY,
    NUM_COMPARED,
    TIME_WEIGHT,
    RoutingConfig,
    choose,
)
from diptych.proto import inference_pb2, worker_pb2
from diptych.workers.common.role import role_of
from diptych.workers.common.wire import ROLE_TO_PROTO
from diptych.workers.core.scheduler_config import STEP_TOKENS
from diptych.workers.kv.layout import KVLayout

CONFIG = RoutingConfig(predict=True, ttft_s=0.5, tpot_s=0.05)
NUM_BLOCKS = 400
LAYOUT = KVLayout("bfloat16", 16, num_layers=8, num_kv_heads=2, head_dim=64, model_id="m")
MODEL = inference_pb2.ModelInfo(name="m", architecture="a", vocab_size=100, max_context_tokens=10_000)


def searched(workers: list[FleetWorker], facts: RequestFacts, costs: FleetCosts) -> set[Route]:
    """Possible routes: the best of two workers, or those of all the workers that are nearly the best alone."""
    level, num_tokens = facts.level or CONFIG.level, facts.num_tokens
    alone, sources, sinks = [], [], []
    for i, w in enumerate(workers):
        times = w.times(costs, CONFIG.level)
        own_s = prefill_s(times, facts.held_tokens(w.incarnation), num_tokens)
        ttft, own_tpot_s = ttft_s(times, own_s) / level.ttft_s, tpot_s(times, 0.0, num_tokens)
        tpot, is_full = own_tpot_s / level.tpot_s, w.used_blocks + facts.num_blocks(w) > w.num_blocks
        missed = 1 - (1 - miss_probability(ttft)) * (1 - tpot_miss(times, tpot))
        harm = decode_harm(times, tpot_s(times, own_s, num_tokens))
        alone.append(missed + harm + is_full + TIME_WEIGHT * (ttft + tpot))
        sources.append((miss_probability(ttft) + is_full + TIME_WEIGHT * ttft + prefill_harm(times, own_s), i))
        times = times.as_sink or times
        own_tpot_s = tpot_s(times, 0.0, num_tokens)
        tpot = own_tpot_s / level.tpot_s
        sinks.append((tpot_miss(times, tpot) + decode_harm(times, own_tpot_s) + is_full + TIME_WEIGHT * tpot, i))
    best, fewest = None, min(alone) - HANDOFF_MISSES
    for (a, i), (b, j) in product(sorted(sources)[:NUM_COMPARED], sorted(sinks)[:NUM_COMPARED]):
        source, sink = workers[i], workers[j]
        handoff_s = pull_s(source, sink, num_tokens) / min(facts.max_new_tokens, ANSWER_TOKENS)
        misses = a + b + miss_probability(handoff_s / level.tpot_s)
        if i != j and (source.incarnation, sink.incarnation) not in facts.failed_pairs and misses < fewest:
            best, fewest = Route(source.incarnation, sink.incarnation), misses
    near = {
        Route(None, w.incarnation) for w, misses in zip(workers, alone, strict=True) if misses < min(alone) + NEARLY
    }
    return {best} if best is not None and min(alone) > HANDOFF_MISSES else near


def report(rng: random.Random) -> worker_pb2.LoadReport:
    cost = worker_pb2.StepCost(
        fixed_s=0.004,
        decode_s=0.0005,
        context_s=rng.choice([0.0, 1e-7]),
        prefill_s=2e-4,
        pair_s=rng.choice([0.0, 1e-8]),
        prefill_is_measured=rng.random() < 0.9,
        decode_is_measured=rng.random() < 0.9,
    )
    budget = rng.choice([0, 256, STEP_TOKENS])
    return worker_pb2.LoadReport(
        role=ROLE_TO_PROTO[role_of(budget, STEP_TOKENS, 256)],
        num_blocks=NUM_BLOCKS,
        num_free_blocks=rng.choice([NUM_BLOCKS, NUM_BLOCKS, 300, 0]),
        num_decoding=rng.randrange(40),
        num_waiting_tokens=rng.choice([0, 0, 500, 4000]),
        prefill_share=rng.random(),
        prefill_budget=budget,
        step_tokens=STEP_TOKENS,
        step_cost=cost,
    )


def fleet_of(names: list[str], level: Level | None, rng: random.Random) -> Fleet:
    fleet = Fleet(level)
    fleet.update(WorkerInfo(name, f"{name}:1", "mixed", "mixed") for name in names)
    for name in names:
        hello = worker_pb2.Hello(incarnation=name, model=MODEL, layout=LAYOUT.to_proto(), num_blocks=NUM_BLOCKS)
        fleet.register(name, hello)
        fleet.report(name, report(rng))
    return fleet


def test_routes_are_those_of_a_whole_search() -> None:
    """Also where requests came and went since the reports, and levels differ."""
    rng, kinds = random.Random(3), {"one": 0, "two": 0}
    for _ in range(160):
        names = [f"w{i}" for i in range(rng.randint(2, 16))]
        fleet = fleet_of(names, CONFIG.level, rng)
        for handle in range(12):
            facts = RequestFacts(
                rng.choice([20, 400, 1500]),
                rng.choice([2, 100]),
                {name: rng.choice([16, 320]) for name in rng.sample(names, rng.randint(0, 2))},
                failed_pairs=frozenset({(rng.choice(names), rng.choice(names))}),
                sample=handle,
                level=rng.choice([None, None, Level(0.2, 10.0), Level(2.0, 0.03)]),
            )
            if not fleet.costs.are_known:
                continue
            route = choose(fleet.by_incarnation(), facts, CONFIG, fleet.costs)
            assert Route(route.prefill, route.decode) in searched(fleet.views(), facts, fleet.costs)
            kinds["two" if route.prefill else "one"] += 1
            tpot = rng.choice([None, 0.02, 0.2])
            fleet.add_request(handle, RequestLoad(route.decode, facts.num_tokens, 10, decodes=True, tpot_s=tpot))
            if rng.random() < 0.5:
                fleet.end_prefill(handle)
            if rng.random() < 0.5:
                fleet.remove_request(handle)
            fleet.report(rng.choice(names), report(rng))
    assert min(kinds.values()) > 100


def test_times_are_the_same_whenever_they_are_computed() -> None:
    """At a change of the worker's state, or at the next decision: also of workers that have not measured all."""
    names = [f"w{i}" for i in range(6)]
    fleets = [fleet_of(names, level, random.Random(1)) for level in (CONFIG.level, None)]
    rng = random.Random(2)
    for handle in range(200):
        name, load = rng.choice(names), report(rng)
        for fleet in fleets:
            fleet.add_request(handle, RequestLoad(name, 100, 7, decodes=True, tpot_s=0.02 if handle % 3 else None))
            fleet.report(name, load)
            fleet.end_prefill(handle)
            fleet.remove_request(handle - 20)
        early, late = ([v.times(fleet.costs, CONFIG.level) for v in fleet.views()] for fleet in fleets)
        assert early == late


def test_what_is_computed_in_one_call_is_what_it_is_in_several() -> None:
    rng = random.Random(4)
    for _ in range(1000):
        cost = WorkerCost(0.004, rng.choice([0.0, 0.001]), rng.choice([0.0, 1e-6]), rng.random() / 1000, 1e-8)
        state = WorkerState(
            rng.choice([0, 64, STEP_TOKENS]),
            STEP_TOKENS,
            rng.choice([0, 1, 30]),
            500,
            rng.choice([0, 900]),
            rng.random(),
        )
        times, num_tokens = WorkerTimes.of(state, cost, CONFIG.level), rng.randint(1, 3000)
        num_held, own_s = rng.randrange(num_tokens), rng.choice([0.0, 0.2])
        prompt_s = prefill_s(times, num_held, num_tokens)
        ttft = ttft_s(times, prompt_s) / 0.3
        assert prompt_misses(times, num_held, num_tokens, 0.3) == (prompt_s, ttft, miss_probability(ttft))
        after_s, until_s = tpot_s(times, 0.0, num_tokens), tpot_s(times, own_s, num_tokens)
        assert decode_times(times, own_s, num_tokens) == (after_s, decode_harm(times, until_s))
        assert decode_harm(times, until_s) >= times.least_harm - 1e-12
        least = decode_harm(times, after_s) + tpot_miss(times, after_s / CONFIG.tpot_s)
        assert least >= times.least_misses - 1e-12
