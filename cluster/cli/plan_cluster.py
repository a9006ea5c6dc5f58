"""`diptych plan --gpus`: the layouts of a cluster for a load, by simulation. Nothing is started."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ...workers.common.errors import ConfigError
from ...workers.models.families.spec import ModelSpec
from ...workers.models.plan.number_layouts import planned_layouts
from ..bench.plot import PICTURES, draw_sweep, write_figure
from ..bench.settings import check_output_files
from ..common.plurals import count
from ..planning.layouts import (
    MOST_GPUS,
    PlannedLevel,
    WorkerMemory,
    layouts_of,
    ranks_that_fit,
    settings_of,
)
from ..planning.report import Asked, caption, picture_lines, picture_questions, sentences, table_of, write_settings
from ..planning.search import LayoutFinding, find_best, find_smallest, rate_text
from ..planning.simulations import Problem, Simulations, goal_of, num_cores, turns_of
from ..preflight.checks import SHIPPED_MODEL, check_model, resolve_model
from ..simulate.build import Hardware
from ..simulate.gpus import Gpu, gpu_of
from ..simulate.load import SimulatedRequest
from .load_flags import make_load, with_speeds

KV_REQUESTS = 4  # mean requests whose KV a worker must hold at once
SETTLED = 10.0  # mean answers that a load should last
SYNTHETIC_RATE = 1.0  # rates are scaled in the search


def plan_cluster(flags: Mapping[str, Any]) -> None:
    """Search, and print what was found. Raises ConfigError, WorkloadError."""
    began = time.perf_counter()
    gpu, num_gpus = parse_gpus(flags["gpus"])
    check_output_files(flags["output"], flags["plot"], PICTURES)
    model = resolve_model(flags["model"])
    spec = check_model(Path(model))
    problem = _problem(flags, model, spec, gpu)
    ranks = ranks_that_fit(spec, problem.memory, num_gpus)
    asked = Asked(problem.level, flags["rate"], flags["price"], problem.session_tokens)
    err = Console(stderr=True, highlight=False)
    out = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)

    def report(line: str) -> None:
        err.print(line, soft_wrap=True, markup=False)

    with Simulations(problem, flags["jobs"] or num_cores()) as simulations:
        largest = layouts_of(num_gpus - num_gpus % ranks[0].tensor_parallel, ranks)
        goal = goal_of(problem, spec, largest)
        if asked.rate is None:
            found = find_best(largest, goal, simulations.run, report)
        else:
            found = find_smallest(num_gpus, ranks, asked.rate, goal, simulations.run, report)
        if flags["plot"] is not None:
            report(f"picture: the best of {count(len(found), 'layout')}")
            lines = picture_lines(list(simulations.run(picture_questions(found, len(problem.load)))))
            write_figure(draw_sweep(lines, [problem.level.share]), flags["plot"])
    _show(out, flags, problem, asked, found)
    out.print(f"planned in {time.perf_counter() - began:.1f} s", style="dim")


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """ "H100:8", or "H100" for one. Raises ConfigError."""
    kinds = text.split(",")
    if len(kinds) > 1:
        raise ConfigError(
            f"--gpus {text}: the simulator gives all pools one kind of GPU. Plan each kind by itself, and compare"
        )
    name, colon, number = kinds[0].partition(":")
    if colon and not (number.isdecimal() and 1 <= int(number) <= MOST_GPUS):
        raise ConfigError(f"--gpus must be KIND:N, N from 1 to {MOST_GPUS}, for example H100:8, got {text!r}")
    return gpu_of(name), int(number or 1)


def _problem(flags: Mapping[str, Any], model: str, spec: ModelSpec, gpu: Gpu) -> Problem:
    level = _level(flags)
    rate = flags["rate"]
    if rate is not None and not rate > 0:
        raise ConfigError(f"--rate must be above 0, got {rate:g}")
    load = tuple(make_load(flags, None if flags["trace"] is not None else SYNTHETIC_RATE))
    if len(load) < 2 or load[-1].at_s == load[0].at_s:
        raise ConfigError("the load needs at least two requests at different times: give a longer --trace")
    longest = min(flags["max_context_tokens"] or spec.max_position_embeddings, spec.longest_context)
    needed = _needed_tokens(load, longest, level)
    memory = WorkerMemory(
        gpu,
        flags["kv_memory_fraction"],
        needed,
        longest,
        flags["block_size"],
        flags["quantize"],
        flags["kv_dtype"],
        planned_layouts(Path(model), spec),
    )
    return Problem(model, memory, with_speeds(Hardware(gpu), flags), load, level)


def _level(flags: Mapping[str, Any]) -> PlannedLevel:
    for name in ("ttft", "tpot"):
        if flags[name] is None or not flags[name] > 0:
            raise ConfigError(f"--gpus needs --{name} in milliseconds above 0, as in --ttft 500 --tpot 50")
    if not 0 < flags["share"] <= 100:
        raise ConfigError(f"--share is a percentage above 0 and at most 100, got {flags['share']:g}")
    return PlannedLevel(flags["ttft"] / 1000, flags["tpot"] / 1000, flags["share"] / 100)


def _needed_tokens(load: Sequence[SimulatedRequest], longest: int, level: PlannedLevel) -> int:
    """Tokens whose KV a worker must hold: the longest request that the model takes, and some mean ones. Raises
    ConfigError where too many are longer."""
    lengths = [turn.num_input + turn.num_output for first in load for turn in turns_of(first)]
    fitting = [length for length in lengths if length <= longest]
    if len(fitting) < level.share * len(lengths):
        raise ConfigError(
            f"{len(lengths) - len(fitting):,} of {len(lengths):,} requests are longer than the model's context of "
            f"{longest:,} tokens: cut them by --max-input-tokens or --length-scale"
        )
    return max(*fitting, round(KV_REQUESTS * sum(fitting) / len(fitting)))


def _show(
    out: Console, flags: Mapping[str, Any], problem: Problem, asked: Asked, found: Sequence[LayoutFinding]
) -> None:
    num_input, num_output = problem.mean_tokens
    source = flags["trace"].name if flags["trace"] is not None else "a synthetic load"
    best = found[0]
    load = f"{count(len(problem.load), 'request')} of {source}, {num_input:,.0f} prompt and {num_output:,.0f} answer "
    load += f"tokens on average, on {flags['gpus']}"
    shown = asked.shown(best)
    lasts_s = len(problem.load) / shown.rate
    out.print(load, soft_wrap=True)
    out.print(caption(asked), soft_wrap=True)
    out.print(table_of(found, asked))
    told = sentences(found)
    answer_s = (shown.ttft_ms[0] + shown.tpot_ms[0] * num_output) / 1000
    if lasts_s < SETTLED * answer_s:
        told.append(
            f"note: at {rate_text(shown.rate)} requests/s the load lasts {lasts_s:.{0 if lasts_s >= 1 else 3}f} s, an "
            f"answer {answer_s:.{1 if answer_s >= 1 else 3}f} s: "
            f"the workers are still filling for much of it. "
            f"{_remedy(flags, len(problem.load))} for the goodput of a steady load"
        )
    for line in told:
        out.print(line, soft_wrap=True)
    if flags["output"] is not None:
        model = SHIPPED_MODEL if flags["model"] == SHIPPED_MODEL else problem.model
        settings = settings_of(best.layout, model, problem.memory, problem.level)
        write_settings(flags["output"], settings, [f"made by `diptych plan` for {load}", *sentences(found)])
        out.print(f"written: {flags['output']}", soft_wrap=True)


def _remedy(flags: Mapping[str, Any], num: int) -> str:
    has_more = flags["trace"] is None or num == flags["num_requests"]
    return "Raise --num-requests" if has_more else "Give a longer --trace"
