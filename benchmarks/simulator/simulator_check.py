"""Simulator against a real cluster on this machine: the same requests to both, by layout, trace and rate.

    python -m benchmarks.simulator.simulator_check --model DIR --profile FILE --azure FILE.csv --mooncake FILE.jsonl
        [--measured F.json] [--half second] [--rates ...] [--layout ...] [--step-log DIR --metrics FILE]

A trace's half is sent: profiles are made of the first half (--half first --step-log DIR --metrics FILE, then `diptych
profile`, then the same with --calibrate), and checked on the second. What was measured is kept in --measured; a run
that is there already is not measured again, so that a simulator that has changed is compared without a cluster.
Without --profile nothing is simulated.

    error     simulated / measured - 1, of median and p99 of TTFT and TPOT
    ranking   pairs of layouts of which the better one, by share within a level, is the same; measured shares that
              differ by less than TIE are a tie, and not counted
"""

import argparse
import asyncio
import json
import math
import os
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.serving.goodput import FIXED, LAYOUTS, TIMEOUT_S, WARM_SEED, Layout, Servers, send, vocab_size
from benchmarks.serving.goodput_loads import AZURE_SCALE, MOONCAKE_SCALE, MOST_INPUT
from benchmarks.serving.goodput_report import LEVELS, score
from benchmarks.serving.servers import context_tokens
from diptych.cluster.bench.measure import Screen, connected
from diptych.cluster.bench.settings import Target, parse_url
from diptych.cluster.bench.text import TokenText
from diptych.cluster.bench.traces import TraceLimits, trace_sessions
from diptych.cluster.bench.types import Session
from diptych.cluster.bench.workloads import stretched
from diptych.cluster.common.config_file import build
from diptych.cluster.simulate.build import Hardware, simulate
from diptych.cluster.simulate.load import trace_load
from diptych.cluster.simulate.profile import Profile, read_profile
from diptych.cluster.simulate.worker_setup import TransitTimes

TRACES = {"azure": (AZURE_SCALE, 0), "mooncake": (MOONCAKE_SCALE, MOST_INPUT)}  # scale of lengths, longest prompt
RATES: Mapping[str, Sequence[float]] = {"azure": (3.0, 5.0, 7.0), "mooncake": (1.0, 1.5, 2.5)}
FIGURES = (("ttft", 50), ("ttft", 99), ("tpot", 50), ("tpot", 99))
TIE = 0.03
WARM_UP_S = 5.0
IDLE_S, BUSY_S = (0.0, 0.003, 0.006, 0.01), (0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12)  # tried by --calibrate
HANDOFF_S = (0.001, 0.005, 0.01, 0.02, 0.03, 0.045, 0.06)  # likewise


@dataclass(frozen=True)
class Case:
    trace: str
    rate: float
    layout: str

    @property
    def name(self) -> str:
        return f"{self.trace} {self.rate:g}/s {self.layout}"


@dataclass(frozen=True)
class Found:
    """Figures of a case. `ms`: of each of FIGURES; `shares`: of the requests, within each level."""

    ms: Sequence[float]
    shares: Mapping[str, float]


def cut_half(trace: Path, half: str, folder: Path) -> Path:
    """Write a half of a trace's requests to a file."""
    lines = trace.read_text(encoding="utf-8").splitlines(keepends=True)
    head = lines[: trace.suffix == ".csv"]
    rows = lines[len(head) :]
    kept = rows[: len(rows) // 2] if half == "first" else rows[len(rows) // 2 :]
    path = folder / f"{half}-{trace.name}"
    path.write_text("".join([*head, *kept]), encoding="utf-8")
    return path


def limits_of(trace: str, num: int) -> TraceLimits:
    scale, longest = TRACES[trace]
    return TraceLimits(num, length_scale=scale, max_input=longest)


async def measure_case(url: str, case: Case, path: Path, args: argparse.Namespace, screen: Screen) -> dict[str, Any]:
    more = {"temperature": 0.0, "ignore_eos": True}
    num = vocab_size(args.model)
    async with connected(Target(parse_url(url), "completions", None, None, None, num, TIMEOUT_S, more)) as connection:
        for seed, seconds in ((WARM_SEED, WARM_UP_S), (0, args.seconds)):
            limits = limits_of(case.trace, max(round(case.rate * seconds), 2))
            sessions = trace_sessions(case.trace, path, limits, TokenText(num), seed)
            times_s = [session.at_s or 0.0 for session in sessions]
            if times_s[-1] > times_s[0]:  # a few requests of a warm-up may come at once
                times_s = stretched(times_s, case.rate)
            sessions = [Session(s.turns, at_s) for s, at_s in zip(sessions, times_s, strict=True)]
            result = await send(connection, sessions, screen)
    sent = len(result.replies)
    return {
        "ms": [result.summary.spreads[metric].percentiles[p] for metric, p in FIGURES],
        "shares": {level: num / sent for level, num in score(result).items()},
        "failed": result.summary.failed,
        "requests": [[r.num_input, r.num_output, r.ttft_s, r.e2e_s] for r in result.replies if r.failure is None],
    }


def simulate_case(case: Case, path: Path, args: argparse.Namespace, profile: Profile) -> Found:
    layout: Layout = LAYOUTS[case.layout]
    pools = {pool: {"replicas": num, "threads": layout.threads} for pool, num in layout.pools.items()}
    settings = {"model": str(args.model), "max_context_tokens": context_tokens(args.model), "pools": pools}
    routes = {"router": {"predict": layout.is_dial}, "dial": layout.is_dial and layout.moves}
    config = build(settings | routes)
    load = trace_load(case.trace, path, limits_of(case.trace, max(round(case.rate * args.seconds), 2)), case.rate)
    hardware = Hardware.of(profile)
    runs = {name: simulate(config, hardware, load, level) for name, level in LEVELS.items()}
    spreads = next(iter(runs.values())).spreads
    return Found(
        [spreads[metric].percentiles[p] for metric, p in FIGURES], {name: run.good for name, run in runs.items()}
    )


def measure_all(args: argparse.Namespace, cases: Sequence[Case], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Measure what was not measured yet, and keep each run at once."""
    kept: dict[str, Any] = json.loads(args.measured.read_text()) if args.measured.exists() else {}
    screen = Screen(Console(stderr=True, force_terminal=False), Console(stderr=True))
    with ExitStack() as stack:
        servers = Servers(args, stack)
        for case in cases:
            if case.name in kept:
                continue
            with servers.serving(case.layout) as url:
                kept[case.name] = asyncio.run(measure_case(url, case, paths[case.trace], args, screen))
                if args.metrics and "1p1d" in case.layout:
                    with urllib.request.urlopen(f"{url}/metrics") as answer, args.metrics.open("ab") as file:
                        file.write(answer.read())
            args.measured.write_text(json.dumps(kept, indent=1) + "\n")
            screen.log(f"{case.name}: {kept[case.name]['ms']}")
    return kept


class Fit:
    """Errors of profiles over measured cases."""

    def __init__(self, paths: Mapping[str, Path], args: argparse.Namespace, kept: Mapping[str, Any]) -> None:
        self._paths, self._args, self._kept = paths, args, kept

    def error(self, cases: Sequence[Case], figure: int, profile: Profile) -> float:
        """Sum of the relative errors of one of FIGURES."""
        found = [simulate_case(case, self._paths[case.trace], self._args, profile).ms[figure] for case in cases]
        measured = [self._kept[case.name]["ms"][figure] for case in cases]
        return sum(abs(math.log(a / b)) for a, b in zip(found, measured, strict=True))


def calibrated(profile: Profile, cases: Sequence[Case], fit: Fit) -> Profile:
    """Profile with the times of requests' way, by threads, with which medians of TTFT are nearest to the measured
    ones; then with the latency of hand-offs with which medians of TPOT are, where workers hand off."""
    for threads in [worker.worker.threads for worker in profile.workers]:
        here = [case for case in cases if LAYOUTS[case.layout].threads == threads]
        tried = [_with_times(profile, threads, TransitTimes(idle, busy)) for idle in IDLE_S for busy in BUSY_S]
        errors = [fit.error(here, 0, each) for each in tried]
        profile = tried[errors.index(min(errors))]
    splits = [case for case in cases if "decode" in LAYOUTS[case.layout].pools]
    if profile.link is None or not splits:
        return profile
    tried = [replace(profile, link=replace(profile.link, latency_s=seconds)) for seconds in HANDOFF_S]
    return min(tried, key=lambda each: fit.error(splits, 2, each))


def _with_times(profile: Profile, threads: int, times: TransitTimes) -> Profile:
    workers = [replace(w, transit=times) if w.worker.threads == threads else w for w in profile.workers]
    return replace(profile, workers=tuple(workers))


def table(cases: Sequence[Case], measured: Mapping[str, Found], simulated: Mapping[str, Found]) -> Iterator[str]:
    heads = [f"{metric} p{p}" for metric, p in FIGURES]
    yield f"| load, layout | {' | '.join(heads)} | within both tight |"
    yield "|---" + "|--:" * (len(FIGURES) + 1) + "|"
    for case in cases:
        m, s = measured[case.name], simulated[case.name]
        cells = [f"{b:.3g} / {a:.3g} ms, {b / a - 1:+.0%}" for a, b in zip(m.ms, s.ms, strict=True)]
        shares = f"{s.shares['both tight']:.0%} / {m.shares['both tight']:.0%}"
        yield f"| {case.name} | {' | '.join(cells)} | {shares} |"


def rank(cases: Sequence[Case], measured: Mapping[str, Found], simulated: Mapping[str, Found]) -> tuple[int, int, int]:
    """Number of pairs of layouts that the simulator ranks right, that it ranks wrong, and ties."""
    right = wrong = ties = 0
    for a, b in combinations(cases, 2):
        if (a.trace, a.rate) != (b.trace, b.rate):
            continue
        for level in LEVELS:
            real = measured[a.name].shares[level] - measured[b.name].shares[level]
            guess = simulated[a.name].shares[level] - simulated[b.name].shares[level]
            if abs(real) < TIE:
                ties += 1
            elif real * guess > 0:
                right += 1
            else:
                wrong += 1
    return right, wrong, ties


def parse_args(texts: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint")
    parser.add_argument("--profile", type=Path, help="made by `diptych profile`")
    parser.add_argument("--azure", type=Path, help="Azure LLM inference trace 2023, CSV")
    parser.add_argument("--mooncake", type=Path, help="Mooncake trace, JSON lines")
    parser.add_argument("--half", choices=("first", "second"), default="second")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=[*FIXED])
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s, of every trace  [default: three of each]")
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds of sending in each run")
    parser.add_argument("--measured", type=Path, default=Path("measured.json"), help="file of the measured figures")
    parser.add_argument("--step-log", type=Path, help="folder for the workers' step logs")
    parser.add_argument("--metrics", type=Path, help="file to which metrics of clusters of two pools are added")
    parser.add_argument("--calibrate", action="store_true", help="fit the way of requests, in --profile, to this half")
    parser.add_argument("--kv-gib", type=int, default=2)
    args = parser.parse_args(texts)
    if args.azure is None and args.mooncake is None:
        parser.error("give --azure FILE or --mooncake FILE")
    return args


def main(texts: Sequence[str] | None = None) -> None:
    args = parse_args(texts)
    given = {"azure": args.azure, "mooncake": args.mooncake}
    cases = [
        Case(trace, rate, layout)
        for trace in TRACES
        if given[trace]
        for rate in args.rates or RATES[trace]
        for layout in args.layout
    ]
    with tempfile.TemporaryDirectory(prefix="simulator-check-") as folder:
        paths = {trace: cut_half(file, args.half, Path(folder)) for trace, file in given.items() if file}
        args.logs = Path(tempfile.mkdtemp(prefix="simulator-check-logs-"))
        args.cores, args.endpoint, args.vllm = sorted(os.sched_getaffinity(0)), [], None
        args.flags = ["--step-log", str(args.step_log)] if args.step_log else []
        kept = measure_all(args, cases, paths)
        if args.profile is None:
            return
        if args.calibrate:
            fit = Fit(paths, args, kept)
            calibrated(read_profile(args.profile), cases, fit).write(args.profile)
        profile = read_profile(args.profile)
        simulated = {case.name: simulate_case(case, paths[case.trace], args, profile) for case in cases}
    measured = {case.name: Found(kept[case.name]["ms"], kept[case.name]["shares"]) for case in cases}
    print("\n".join(table(cases, measured, simulated)))
    right, wrong, ties = rank(cases, measured, simulated)
    print(f"\nranking of two layouts: {right} right, {wrong} wrong, {ties} ties")


if __name__ == "__main__":
    main()
