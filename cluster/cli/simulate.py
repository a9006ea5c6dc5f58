"""`diptych simulate` and `diptych profile`: a cluster on a virtual clock, and the times of its workers' steps."""

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ...workers.common.errors import ConfigError
from ..common import config_file
from . import load_flags as flag
from .load_flags import LoadFormat, make_load, with_speeds

if TYPE_CHECKING:
    from ..simulate.build import Hardware


def simulate(  # noqa: PLR0913, PLR0917  typer makes a flag of each parameter
    config: Annotated[Path, typer.Option(help="The cluster's settings, as for `diptych serve`.")],
    trace: flag.TraceFile = None,
    trace_format: flag.TraceFormat = LoadFormat.AZURE,
    profile_file: Annotated[Path | None, typer.Option("--profile", help="Made by `diptych profile`.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Instead of a profile: A100, H100, H200, B200, L40S, MI300X.")] = None,
    link_gbit: flag.LinkGbit = None,
    link_latency_ms: flag.LinkLatencyMs = None,
    request_ms: flag.RequestMs = None,
    start_s: Annotated[float, typer.Option(min=0, help="Until a worker that the autoscaler starts serves.")] = 60.0,
    compute_efficiency: flag.ComputeEfficiency = 0.6,
    memory_efficiency: flag.MemoryEfficiency = 0.75,
    step_overhead_ms: flag.StepOverheadMs = 1.0,
    acceptance: flag.Acceptance = None,
    draft_share: flag.DraftShare = None,
    num_requests: flag.NumRequests = 1000,
    rate: Annotated[float | None, typer.Option(help="Requests (or sessions) a second; scales a trace's gaps.")] = None,
    time_scale: Annotated[float, typer.Option(min=0, help="Trace: gaps are multiplied by it.")] = 1.0,
    length_scale: flag.LengthScale = 1.0,
    max_input_tokens: flag.MaxInputTokens = 0,
    max_output_tokens: flag.MaxOutputTokens = 0,
    input_tokens: flag.InputTokens = "1024",
    output_tokens: flag.OutputTokens = "128",
    turns: flag.Turns = 1,
    think_time: flag.ThinkTime = 0.0,
    goodput: Annotated[str | None, typer.Option(help="Service level: ttft:500,tpot:50 (ms).  [default: its]")] = None,
    price: flag.Price = None,
    seed: flag.Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Simulate a cluster under a load: the policy, scheduler and autoscaler that serve, on a virtual clock."""
    from ..bench.stats import parse_levels
    from ..simulate.build import level_of
    from ..simulate.build import simulate as run
    from ..simulate.figures import latency_table, pool_table, summary_lines

    flags = dict(locals())
    settings = config_file.load(config, {})
    levels = level_of(settings, parse_levels(goodput.replace(",", " ").split() if goodput else []))
    hardware, load = _hardware(flags), make_load(flags, rate)
    began = time.perf_counter()
    figures = run(settings, hardware, load, levels, price)
    took_s = time.perf_counter() - began
    if as_json:
        print(json.dumps(figures.to_json() | {"levels": dict(levels), "took_s": took_s}, indent=2))
        return
    out = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False)
    for line in summary_lines(figures):
        out.print(line, soft_wrap=True)
    out.print(latency_table(figures))
    out.print(pool_table(figures))
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    out.print(f"simulated in {took_s:.1f} s, {figures.num_events:,} events, {memory_mib:,} MiB", style="dim")


def profile(
    folder: Annotated[Path, typer.Argument(help="With step logs, as the setting step_log names it.")],
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("profile.json"),
    metrics: Annotated[Path | None, typer.Option(help="What a router's /metrics said, for the link.")] = None,
) -> None:
    """Fit the time of steps to a running cluster's step logs, for `diptych simulate --profile`."""
    from ..simulate.profile import make_profile, read_link

    made = make_profile(folder, None if metrics is None else read_link(metrics))
    made.write(output)
    for found in made.workers:
        fixed, decode, context, prefill, pair, hidden = (weight * 1e6 for weight in found.weights)
        worker = found.worker
        print(f"{output}: {found.num_steps:,} steps of {worker.model}, {worker.threads} threads, {worker.machine}")
        print(f"µs: {fixed:.0f} a step, {found.gap_s * 1e6:.0f} between steps, {decode:.2f} a decode,", end=" ")
        print(f"{context:.4f} a context token, {prefill:.2f} a prompt token, {pair:.5f} a pair of tokens;", end=" ")
        print(f"{hidden:.0f} of the prompts of a step do not make it longer")
        print("measured / fitted: " + ", ".join(f"p{p} {ratio:.2f}" for p, ratio in found.residuals.items()))
    if made.link is not None:
        print(f"link: {made.link.bytes_s / 1e9:.2f} GB/s, {made.link.latency_s * 1e3:.2f} ms a hand-off")


def _hardware(flags: dict[str, Any]) -> "Hardware":
    """Raises ConfigError."""
    from ..simulate.build import Hardware
    from ..simulate.gpus import gpu_of
    from ..simulate.profile import read_profile

    profile_file, gpu = flags["profile_file"], flags["gpu"]
    if (profile_file is None) == (gpu is None):
        raise ConfigError("give --profile FILE or --gpu NAME: the time of steps is taken from one of them")
    found = Hardware.of(read_profile(profile_file)) if profile_file is not None else Hardware(gpu_of(gpu))
    drafting = {"acceptance": flags["acceptance"], "draft_share": flags["draft_share"]}
    return replace(with_speeds(found, flags), start_s=flags["start_s"], **drafting)
