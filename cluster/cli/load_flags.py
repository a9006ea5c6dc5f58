"""Flags that `diptych simulate` and `diptych plan` share: the load, and how fast a GPU and its links are."""

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...workers.common.errors import ConfigError

if TYPE_CHECKING:
    from ..simulate.build import Hardware
    from ..simulate.load import SimulatedRequest


MOST = 1e6  # scale, or seconds from an answer to the next turn
LEAST_RATE = 1e-6


class LoadFormat(Enum):
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"


TraceFile = Annotated[Path | None, typer.Option("--trace", help="Requests to send.  [default: a synthetic load]")]
TraceFormat = Annotated[LoadFormat, typer.Option("--format", help="Of --trace.")]
NumRequests = Annotated[int, typer.Option(min=1, help="First of the trace; or sessions.")]
LengthScale = Annotated[float, typer.Option(min=0, help="Trace: lengths are multiplied by it.")]
MaxInputTokens = Annotated[int, typer.Option(min=0, help="Trace: longer prompts are cut; 0: not.")]
MaxOutputTokens = Annotated[int, typer.Option(min=0, help="Trace: longer answers are cut; 0: not.")]
InputTokens = Annotated[str, typer.Option(help="Synthetic: N, N-M or lognormal:MEDIAN:SIGMA.")]
OutputTokens = Annotated[str, typer.Option(help="Likewise, of answers.")]
Turns = Annotated[int, typer.Option(min=1, help="Synthetic: of a session.")]
ThinkTime = Annotated[float, typer.Option(min=0, help="Seconds from an answer to the next turn.")]
Price = Annotated[float | None, typer.Option(min=0, help="Of a GPU (or worker) for an hour.")]
Seed = Annotated[int, typer.Option(min=0, help="Of synthetic loads, and of a profile's variation.")]

Acceptance = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Where pools speculate: share of the drafted tokens that is accepted."),
]
DraftShare = Annotated[
    float | None,
    typer.Option(
        min=0, help="Time of a pass of a model that drafts, in steps that decode.  [default: by bytes of weights]"
    ),
]

LinkGbit = Annotated[
    float | None, typer.Option(help="Of each worker, for KV: Gbit/s.  [default: the profile's, or 400]")
]
LinkLatencyMs = Annotated[
    float | None, typer.Option(min=0, help="Of a hand-off, beside its bytes.  [default: the profile's, or 1]")
]
RequestMs = Annotated[
    float | None, typer.Option(min=0, help="From arrival until a worker has it.  [default: the profile's, or 0]")
]
ComputeEfficiency = Annotated[float, typer.Option(min=0.01, max=1, help="gpu: share of its FLOP/s.")]
MemoryEfficiency = Annotated[float, typer.Option(min=0.01, max=1, help="gpu: share of its bytes/s.")]
StepOverheadMs = Annotated[float, typer.Option(min=0, help="gpu: of each step.")]


def with_speeds(found: "Hardware", flags: Mapping[str, Any]) -> "Hardware":
    """Hardware with the efficiencies, the link and the request time of the flags. Raises ConfigError."""
    from ..simulate.roofline import Efficiency
    from ..simulate.worker_setup import TransitTimes

    gbit, latency_ms, request_ms = flags["link_gbit"], flags["link_latency_ms"], flags["request_ms"]
    if gbit is not None and not gbit > 0:
        raise ConfigError(f"--link-gbit must be above 0, got {gbit:g}")
    return replace(
        found,
        reached=Efficiency(flags["compute_efficiency"], flags["memory_efficiency"], flags["step_overhead_ms"] / 1e3),
        link_bytes_s=found.link_bytes_s if gbit is None else gbit * 1e9 / 8,
        link_latency_s=found.link_latency_s if latency_ms is None else latency_ms / 1e3,
        transit=None if request_ms is None else TransitTimes(request_ms / 1e3),
        seed=flags["seed"],
    )


def _check_numbers(flags: Mapping[str, Any], rate: float | None) -> None:
    """Raise ConfigError for numbers by which a load would never come, or be of no length. NaN is beyond all bounds."""
    if rate is not None and not rate > 0:
        raise ConfigError(f"--rate must be above 0, got {rate:g}")
    if rate is not None and not rate >= LEAST_RATE:
        raise ConfigError(f"--rate must be at least {LEAST_RATE:g}, got {rate:g}")
    if not flags["length_scale"] > 0:
        raise ConfigError(f"--length-scale must be above 0, got {flags['length_scale']:g}")
    for name in ("length_scale", "time_scale", "think_time"):
        if name in flags and not flags[name] <= MOST:
            raise ConfigError(f"--{name.replace('_', '-')} must be at most {MOST:g}, got {flags[name]:g}")


def make_load(flags: Mapping[str, Any], rate: float | None) -> "list[SimulatedRequest]":
    """The trace of the flags, its gaps scaled to `rate` where one is given; or a synthetic load, which needs one.
    Raises ConfigError, WorkloadError."""
    from ..bench.traces import TraceLimits
    from ..simulate.load import Synthetic, parse_lengths, synthetic_load, trace_load

    _check_numbers(flags, rate)
    num = flags["num_requests"]
    if flags["trace"] is not None:
        cuts = flags["max_input_tokens"], flags["max_output_tokens"]
        limits = TraceLimits(num, flags.get("time_scale", 1.0), flags["length_scale"], *cuts)
        return trace_load(flags["trace_format"].value, flags["trace"], limits, rate)
    if rate is None:
        raise ConfigError("give --trace FILE, or --rate for a synthetic load")
    inputs = parse_lengths(flags["input_tokens"], "--input-tokens")
    outputs = parse_lengths(flags["output_tokens"], "--output-tokens")
    return synthetic_load(Synthetic(num, rate, inputs, outputs, flags["turns"], flags["think_time"]), flags["seed"])
