"""Writes a measurement as a table and as JSON. Names in the JSON are those of `vllm bench serve` where it has the same
value; docs/benchmarking.md lists them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .stats import METRICS, PERCENTILES, Summary
from .types import Reply

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}
BUSY = 0.7  # of a core: above it the client's own delays affect the figures


@dataclass(frozen=True, slots=True)
class Result:
    """Measurement. `settings`: by flag; `began_at`: on the clock of the replies; `client_cpu_s`: of this process."""

    settings: Mapping[str, Any]
    replies: Sequence[Reply]
    summary: Summary
    levels: Mapping[str, float]  # seconds, by metric
    began_at: float
    client_cpu_s: float
    date: str  # ISO 8601
    is_interrupted: bool = False

    @property
    def client_cpu(self) -> float:
        """Average number of cores that this process used."""
        return self.summary.per_s(self.client_cpu_s)


def render(result: Result) -> RenderableType:
    parts: list[RenderableType] = [_counts(result), Text(), _latencies(result)]
    for kind, number in result.summary.failures.items():
        example = next(r.failure.message for r in result.replies if r.failure and r.failure.kind == kind)
        parts.append(Text(f"{number} failed: {kind}: {example}", style="red"))
    if result.client_cpu > BUSY:
        parts.append(Text(f"this client used {result.client_cpu:.0%} of a core: it may be what was measured", "yellow"))
    if result.is_interrupted:
        parts.append(Text("interrupted: these are the requests that had ended", "yellow"))
    return Group(*parts)


def to_json(result: Result) -> dict[str, Any]:
    s = result.summary
    row: dict[str, Any] = {
        "date": result.date,
        "settings": dict(result.settings),
        "interrupted": result.is_interrupted,
        "duration": s.duration_s,
        "completed": s.completed,
        "failed": s.failed,
        "failures": dict(s.failures),
        "total_input_tokens": s.num_input,
        "total_cached_tokens": s.num_cached,
        "total_output_tokens": s.num_output,
        "request_throughput": s.per_s(s.completed),
        "output_throughput": s.per_s(s.num_output),
        "total_token_throughput": s.per_s(s.num_input + s.num_output),
        "request_goodput": None if s.good is None else s.per_s(s.good),
        "max_concurrent_requests": s.max_concurrent,
        "client_cpu_s": result.client_cpu_s,
    }
    for metric in METRICS:
        spread = s.spreads[metric]
        row |= {f"mean_{metric}_ms": spread.mean, f"std_{metric}_ms": spread.std}
        row[f"median_{metric}_ms"] = spread.percentiles[50]
        row |= {f"p{p}_{metric}_ms": spread.percentiles[p] for p in PERCENTILES}
    return row | {"requests": [_request(reply, result.began_at) for reply in result.replies]}


def _request(reply: Reply, began_at: float) -> dict[str, Any]:
    return {
        "start_s": reply.sent_at - began_at,
        "ttft_s": reply.ttft_s,
        "e2el_s": reply.e2e_s,
        "input_tokens": reply.num_input,
        "cached_tokens": reply.num_cached,
        "output_tokens": reply.num_output,
        "error": None if reply.failure is None else f"{reply.failure.kind}: {reply.failure.message}",
    }


def _counts(result: Result) -> Table:
    s = result.summary
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    cached = f", {s.num_cached / s.num_input:.0%} cached" if s.num_cached else ""
    rows: list[tuple[str, str, str]] = [
        ("requests", f"{s.completed}", f"and {s.failed} failed, in {s.duration_s:.2f} s, {s.max_concurrent} at a time"),
        ("input", f"{s.num_input}", f"tokens{cached}"),
        ("output", f"{s.num_output}", "tokens"),
        ("request throughput", f"{s.per_s(s.completed):.2f}", "requests/s"),
        ("output throughput", f"{s.per_s(s.num_output):.1f}", "tokens/s"),
        ("total throughput", f"{s.per_s(s.num_input + s.num_output):.1f}", "tokens/s"),
        ("client CPU", f"{result.client_cpu:.0%}", "of a core"),
    ]
    if s.good is not None:
        share = s.good / s.completed if s.completed else 0.0
        level = ", ".join(f"{metric} <= {level_s * 1000:g} ms" for metric, level_s in result.levels.items())
        rows.insert(4, ("goodput", f"{s.per_s(s.good):.2f}", f"requests/s: {share:.0%} had {level}"))
    for row in rows:
        table.add_row(*row)
    return table


def _latencies(result: Result) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ms", no_wrap=True)
    for column in ("mean", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(column, justify="right", no_wrap=True)
    for metric in METRICS:
        spread = result.summary.spreads[metric]
        values = (spread.mean, *spread.percentiles.values())
        table.add_row(f"{metric.upper()}  {_TITLES[metric]}", *(f"{value:.2f}" for value in values))
    return table
