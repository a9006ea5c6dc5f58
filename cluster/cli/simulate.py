"""`diptych simulate` and `diptych profile`: a cluster on a virtual clock, and the times of its workers' steps."""

import json
import resource
import sys
import time
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ...workers.common.errors import ConfigError
from ..common import config_file

if TYPE_CHECKING:
    from ..simulate.build import Hardware
    from ..simulate.load import SimulatedRequest


class LoadFormat(Enum):
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"


def simulate(  # noqa: PLR0913, PLR0917  typer makes a flag of each parameter
    config: Annotated[Path, typer.Option(help="The cluster's settings, as for `diptych serve`.")],
    trace: Annotated[Path | None, typer.Option(help="Requests to send.  [default: a synthetic load at --rate]")] = None,
    trace_format: Annotated[LoadFormat, typer.Option("--format", help="Of --trace.")] = LoadFormat.AZURE,
    profile_file: Annotated[Path | None, typer.Option("--profile", help="Made by `diptych profile`.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Instead of a profile: A100, H100, H200, B200, L40S, MI300X.")] = None,
    link_gbit: Annotated[
        float | None, typer.Option(help="Of each worker, for KV: Gbit/s.  [default: the profile's, or 400]")
    ] = None,
    link_latency_ms: Annotated[
        float | None, typer.Option(min=0, help="Of a hand-off, beside its bytes.  [default: the profile's, or 1]")
    ] = None,
    request_ms: Annotated[
        float | None, typer.Option(min=0, help="From arrival until a worker has it.  [default: the profile's, or 0]")
    ] = None,
    start_s: Annotated[float, typer.Option(min=0, help="Until a worker that the autoscaler starts serves.")] = 60.0,
    compute_efficiency: Annotated[float, typer.Option(min=0.01, max=1, help="gpu: share of its FLOP/s.")] = 0.6,
    memory_efficiency: Annotated[float, typer.Option(min=0.01, max=1, help="gpu: share of its bytes/s.")] = 0.75,
    step_overhead_ms: Annotated[float, typer.Option(min=0, help="gpu: of each step.")] = 1.0,
    num_requests: Annotated[int, typer.Option(min=1, help="First of the trace; or sessions.")] = 1000,
    rate: Annotated[float | None, typer.Option(help="Requests (or sessions) a second; scales a trace's gaps.")] = None,
    time_scale: Annotated[float, typer.Option(min=0, help="Trace: gaps are multiplied by it.")] = 1.0,
    length_scale: Annotated[float, typer.Option(min=0, help="Trace: lengths are multiplied by it.")] = 1.0,
    max_input_tokens: Annotated[int, typer.Option(min=0, help="Trace: longer prompts are cut; 0: not.")] = 0,
    max_output_tokens: Annotated[int, typer.Option(min=0, help="Trace: longer answers are cut; 0: not.")] = 0,
    input_tokens: Annotated[str, typer.Option(help="Synthetic: N, N-M or lognormal:MEDIAN:SIGMA.")] = "1024",
    output_tokens: Annotated[str, typer.Option(help="Likewise, of answers.")] = "128",
    turns: Annotated[int, typer.Option(min=1, help="Synthetic: of a session.")] = 1,
    think_time: Annotated[float, typer.Option(min=0, help="Seconds from an answer to the next turn.")] = 0.0,
    goodput: Annotated[str | None, typer.Option(help="Service level: ttft:500,tpot:50 (ms).  [default: its]")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of a GPU (or worker) for an hour.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of synthetic loads, and of a profile's variation.")] = 0,
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
    hardware, load = _hardware(flags), _load(flags)
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
        fixed, decode, context, prefill, pair = (weight * 1e6 for weight in found.weights)
        worker = found.worker
        print(f"{output}: {found.num_steps:,} steps of {worker.model}, {worker.threads} threads, {worker.machine}")
        print(f"µs: {fixed:.0f} a step, {found.gap_s * 1e6:.0f} between steps, {decode:.2f} a decode,", end=" ")
        print(f"{context:.4f} a context token, {prefill:.2f} a prompt token, {pair:.5f} a pair of tokens")
        print("measured / fitted: " + ", ".join(f"p{p} {ratio:.2f}" for p, ratio in found.residuals.items()))
    if made.link is not None:
        print(f"link: {made.link.bytes_s / 1e9:.2f} GB/s, {made.link.latency_s * 1e3:.2f} ms a hand-off")


def _hardware(flags: dict[str, Any]) -> "Hardware":
    """Raises ConfigError."""
    from ..simulate.build import Hardware
    from ..simulate.gpus import gpu_of
    from ..simulate.profile import read_profile
    from ..simulate.roofline import Efficiency
    from ..simulate.worker_setup import TransitTimes

    profile_file, gpu = flags["profile_file"], flags["gpu"]
    if (profile_file is None) == (gpu is None):
        raise ConfigError("give --profile FILE or --gpu NAME: the time of steps is taken from one of them")
    gbit, latency_ms, request_ms = flags["link_gbit"], flags["link_latency_ms"], flags["request_ms"]
    if gbit is not None and not gbit > 0:
        raise ConfigError(f"--link-gbit must be above 0, got {gbit:g}")
    found = Hardware.of(read_profile(profile_file)) if profile_file is not None else Hardware(gpu_of(gpu))
    return replace(
        found,
        reached=Efficiency(flags["compute_efficiency"], flags["memory_efficiency"], flags["step_overhead_ms"] / 1e3),
        link_bytes_s=found.link_bytes_s if gbit is None else gbit * 1e9 / 8,
        link_latency_s=found.link_latency_s if latency_ms is None else latency_ms / 1e3,
        start_s=flags["start_s"],
        transit=None if request_ms is None else TransitTimes(request_ms / 1e3),
        seed=flags["seed"],
    )


def _load(flags: dict[str, Any]) -> "list[SimulatedRequest]":
    from ..bench.traces import TraceLimits
    from ..simulate.load import Synthetic, parse_lengths, synthetic_load, trace_load

    rate: float | None = flags["rate"]
    if rate is not None and not rate > 0:
        raise ConfigError(f"--rate must be above 0, got {rate:g}")
    if not flags["length_scale"] > 0:
        raise ConfigError(f"--length-scale must be above 0, got {flags['length_scale']:g}")
    num = flags["num_requests"]
    if flags["trace"] is not None:
        cuts = flags["max_input_tokens"], flags["max_output_tokens"]
        limits = TraceLimits(num, flags["time_scale"], flags["length_scale"], *cuts)
        return trace_load(flags["trace_format"].value, flags["trace"], limits, rate)
    if rate is None:
        raise ConfigError("give --trace FILE, or --rate for a synthetic load")
    inputs = parse_lengths(flags["input_tokens"], "--input-tokens")
    outputs = parse_lengths(flags["output_tokens"], "--output-tokens")
    return synthetic_load(Synthetic(num, rate, inputs, outputs, flags["turns"], flags["think_time"]), flags["seed"])
