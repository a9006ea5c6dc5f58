"""The dial beside fixed layouts, simulated: requests within a tight service level on H100s, 8 B parameters.

    python -m benchmarks.simulator.dial [--azure FILE.csv] [--mooncake FILE.jsonl] [--case 2000/50 ...] [--requests 300]
        [--json F.json]

Each load is sent at each rate to six clusters of as many GPUs, which begin all mixed or half prefill and half decode:
routed by roles, by predicted times, and with the dial, which routes by predicted times and moves prefill budgets. TPOT
is limited to little more than a decode step takes, where it matters most which worker computes a prompt. Every figure
repeats.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from diptych.cluster.bench.traces import TraceLimits
from diptych.cluster.planning.layouts import Layout, PlannedLevel, PlannedPool, Ranks, Routes, WorkerMemory
from diptych.cluster.planning.simulations import Problem, measure
from diptych.cluster.simulate.build import Hardware
from diptych.cluster.simulate.gpus import GPUS
from diptych.cluster.simulate.load import LogNormal, SimulatedRequest, Synthetic, synthetic_load, trace_load

from .goodput_simulated import SCENARIOS, publish

GPU = GPUS["H100"]
RANKS = Ranks(tensor_parallel=1, expert_parallel=1, kv_tokens=400_000)


@dataclass(frozen=True)
class Case:
    """A load and its level. `lengths`: median tokens of prompts and answers, and the sigma of both; or a trace."""

    num_workers: int
    level: PlannedLevel
    rates: Sequence[float]
    lengths: tuple[int, int, float] | str

    def load(self, traces: Mapping[str, Path | None], num: int) -> tuple[SimulatedRequest, ...]:
        """Return its first requests; none of a trace that is not given."""
        if isinstance(self.lengths, str):
            trace = traces[self.lengths]
            return tuple(trace_load(self.lengths, trace, TraceLimits(num), None)) if trace else ()
        prompt, answer, sigma = self.lengths
        return tuple(synthetic_load(Synthetic(num, 1.0, LogNormal(prompt, sigma), LogNormal(answer, sigma)), 0))

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Columns of the table."""
        mixed = (PlannedPool("mixed", self.num_workers, RANKS),)
        split = tuple(PlannedPool(name, self.num_workers // 2, RANKS) for name in ("prefill", "decode"))
        return {
            "mixed, roles": Layout(mixed, Routes.ROLES),
            "split, roles": Layout(split, Routes.ROLES),
            "mixed, predicted": Layout(mixed, Routes.PREDICTED),
            "split, predicted": Layout(split, Routes.PREDICTED),
            "split, dial": Layout(split, Routes.DIAL),
            "dial": Layout(mixed, Routes.DIAL),
        }


CASES = {
    "2000/50": Case(2, PlannedLevel(1.0, 0.0095), (10, 15, 20), (2000, 50, 0.0)),
    "2000/50 loose": Case(2, PlannedLevel(1.0, 0.015), (15, 20, 25), (2000, 50, 0.0)),
    "500/200": Case(2, PlannedLevel(0.5, 0.012), (20, 30, 40), (500, 200, 0.6)),
    "4000/100": Case(2, PlannedLevel(1.0, 0.009), (3, 5, 8), (4000, 100, 0.0)),
    "azure": Case(2, PlannedLevel(1.0, 0.012), (15, 25, 35), "azure"),
    "azure eight": Case(8, PlannedLevel(1.0, 0.012), (60, 100, 140), "azure"),
    "mooncake eight": Case(8, PlannedLevel(3.0, 0.012), (3, 5), "mooncake"),
}


@dataclass(frozen=True)
class Point:
    case: str
    rate: float
    layout: str
    good: float
    handed_off: float


def run(model: str, name: str, rate: float, layout: str, load: tuple[SimulatedRequest, ...]) -> Point:
    case = CASES[name]
    longest = max(request.num_input + request.num_output for request in load)
    memory = WorkerMemory(GPU, 0.85, min(longest, 131_072), 131_072)
    found = measure(Problem(model, memory, Hardware(GPU), load, case.level), case.layouts[layout], rate, len(load))
    return Point(name, rate, layout, found.share, found.handed_off)


def run_all(args: argparse.Namespace) -> Iterator[Point]:
    traces = {"azure": args.azure, "mooncake": args.mooncake}
    with (
        tempfile.TemporaryDirectory() as model,
        ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool,
    ):
        (Path(model) / "config.json").write_text(json.dumps(SCENARIOS["8b"].config))
        found = []
        for name in args.case or CASES:
            case = CASES[name]
            if load := case.load(traces, args.requests * case.num_workers // 2):
                found += [pool.submit(run, model, name, *each, load) for each in product(case.rates, case.layouts)]
        yield from (each.result() for each in found)


def as_markdown(points: Sequence[Point]) -> Iterator[str]:
    """Shares of requests, the best of a row in bold; the last column: the dial less the best fixed layout by roles."""
    columns = list(dict.fromkeys(point.layout for point in points))
    yield f"| load, rate | {' | '.join(columns)} | dial - best fixed |"
    yield "|---" + "|--:" * (len(columns) + 1) + "|"
    rows: dict[tuple[str, float], dict[str, float]] = {}
    for point in points:
        rows.setdefault((point.case, point.rate), {})[point.layout] = point.good
    for (case, rate), row in rows.items():
        gain = row["dial"] - max(good for layout, good in row.items() if layout.endswith("roles"))
        cells = [f"**{good:.0%}**" if good == max(row.values()) else f"{good:.0%}" for good in row.values()]
        yield f"| {case} {rate:g}/s | {' | '.join(cells)} | {gain * 100:+.0f} |"


def parse_args(texts: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--azure", type=Path, help="Azure LLM inference trace 2023, CSV")
    parser.add_argument("--mooncake", type=Path, help="Mooncake trace, JSON lines")
    parser.add_argument("--case", nargs="+", choices=CASES, help="[default: those whose files are given]")
    parser.add_argument("--requests", type=int, default=300, help="for each two workers")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(texts)


def main(texts: Sequence[str] | None = None) -> None:
    args = parse_args(texts)
    points = list(run_all(args))
    publish(points, as_markdown(points), args.json)


if __name__ == "__main__":
    main()
