"""Time of a routing decision by number of workers, beside its goal.

    python -m benchmarks.serving.routing [--workers 2 10 100 1000] [--decisions 3000] [--json F.json]

A decision is what a router does for a request once the blocks of its prompt are named: look up what each worker has
cached, choose the route, count the request's load. A worker's times are computed when its report comes, which is not
counted. Half of the workers prefer prompts, half decode. Each has another load, which it reports ten times a second at
100 requests/s; eight hold the beginning of the prompt.
Busy: routes of two workers are looked at for nearly every request; light: for few. Times in microseconds.
"""

import argparse
import json
import random
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from diptych.cluster.routing.actions import RequestFacts
from diptych.cluster.routing.fleet import Fleet, RequestLoad, WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig, choose
from diptych.cluster.routing.prefix_index import PrefixIndex
from diptych.proto import inference_pb2, worker_pb2
from diptych.workers.common.role import Role
from diptych.workers.core.prefix_cache import block_hashes
from diptych.workers.core.scheduler_config import STEP_TOKENS, SchedulerConfig
from diptych.workers.kv.layout import KVLayout

GOALS_US = {10: 30.0, 100: 60.0, 1000: 300.0}
NUM_BLOCKS, BLOCK_SIZE = 10_000, 16
REPORTS_PER_DECISION = 0.1  # of each worker: ten a second at 100 requests/s
IN_FLIGHT = 5  # requests for each worker
NUM_TOKENS, CACHED_TOKENS = 1000, 512
ROLES = (Role.PREFILL, Role.DECODE)
CONFIG = RoutingConfig(predict=True, ttft_s=0.5, tpot_s=0.05)


def load_report(rng: random.Random, is_busy: bool, role: Role) -> worker_pb2.LoadReport:
    cost = worker_pb2.StepCost(
        fixed_s=0.004, decode_s=0.0005, context_s=1e-7, prefill_s=0.0002, pair_s=1e-9,
        prefill_is_measured=True, decode_is_measured=True,
    )  # fmt: skip
    return worker_pb2.LoadReport(
        num_blocks=NUM_BLOCKS,
        num_free_blocks=rng.randrange(NUM_BLOCKS // 2, NUM_BLOCKS),
        num_running=rng.randrange(40 if is_busy else 10),
        num_decoding=rng.randrange(40 if is_busy else 10),
        num_waiting_tokens=rng.choice([0, 0, 500, 4000]) if is_busy else 0,
        prefill_share=rng.random() if is_busy else 0.3,
        num_prefill_tokens=10_000,
        prefill_s=2.0,
        step_cost=cost,
        step_tokens=STEP_TOKENS,
        prefill_budget=SchedulerConfig().budget_of(role),
    )


def fleet_of(num: int, rng: random.Random, is_busy: bool) -> Fleet:
    fleet = Fleet(CONFIG.level)
    roles = [role.value for role in ROLES]
    fleet.update(WorkerInfo(f"w{i:04}", f"host:{i + 1}", roles[i % 2], roles[i % 2]) for i in range(num))
    layout = KVLayout("bfloat16", BLOCK_SIZE, num_layers=32, num_kv_heads=8, head_dim=128, model_id="m")
    model = inference_pb2.ModelInfo(name="m", architecture="a", vocab_size=100, max_context_tokens=100_000)
    for i in range(num):
        hello = worker_pb2.Hello(incarnation=f"w{i:04}", model=model, layout=layout.to_proto(), num_blocks=NUM_BLOCKS)
        fleet.register(f"w{i:04}", hello)
        fleet.report(f"w{i:04}", load_report(rng, is_busy, ROLES[i % 2]))
    return fleet


def measure(num: int, is_busy: bool, num_decisions: int, seed: int = 0) -> dict[str, Any]:
    rng = random.Random(seed)
    fleet, prefixes = fleet_of(num, rng, is_busy), PrefixIndex()
    tokens = [rng.randrange(100) for _ in range(NUM_TOKENS)]
    names = block_hashes(tokens, BLOCK_SIZE, b"")
    for i in range(min(num, 8)):
        prefixes.apply(f"w{i:04}", worker_pb2.BlockEvents(stored=names[: CACHED_TOKENS // BLOCK_SIZE]), NUM_BLOCKS)
    running: deque[int] = deque()
    times_us: list[float] = []
    num_handed_off = 0
    due = 0.0
    for handle in range(num_decisions):
        started = time.perf_counter()
        cached = {worker: num * BLOCK_SIZE for worker, num in prefixes.match(names).items()}
        facts = RequestFacts(NUM_TOKENS, 100, cached, sample=handle)
        route = choose(fleet.by_incarnation(), facts, CONFIG, fleet.costs)
        worker = fleet.view(route.decode)
        fleet.add_request(handle, RequestLoad(route.decode, NUM_TOKENS, facts.num_blocks(worker)))
        times_us.append((time.perf_counter() - started) * 1e6)
        num_handed_off += route.prefill is not None
        running.append(handle)
        if len(running) > num:
            fleet.end_prefill(running[-1 - num])
        if len(running) > IN_FLIGHT * num:
            fleet.remove_request(running.popleft())
        due += REPORTS_PER_DECISION * num
        while due >= 1:
            due -= 1
            i = rng.randrange(num)
            fleet.report(f"w{i:04}", load_report(rng, is_busy, ROLES[i % 2]))
    times_us.sort()
    return {
        "workers": num,
        "load": "busy" if is_busy else "light",
        "median_us": statistics.median(times_us),
        "p90_us": times_us[len(times_us) * 9 // 10],
        "p99_us": times_us[len(times_us) * 99 // 100],
        "goal_us": GOALS_US.get(num),
        "handed_off": num_handed_off / num_decisions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 10, 100, 1000])
    parser.add_argument("--decisions", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(num, is_busy, args.decisions) for is_busy in (False, True) for num in args.workers]
    print(f"{'load':5} {'workers':>8} {'median':>8} {'p90':>8} {'p99':>8} {'goal':>6}  two workers")
    for row in rows:
        goal = f"{row['goal_us']:.0f}" if row["goal_us"] else "-"
        times = " ".join(f"{row[name]:8.1f}" for name in ("median_us", "p90_us", "p99_us"))
        print(f"{row['load']:5} {row['workers']:8} {times} {goal:>6}  {row['handed_off']:.0%}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
