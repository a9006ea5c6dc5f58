"""Figures of a simulation, and how they are shown. Pure."""

from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
from rich.table import Table

from ..bench.stats import BURST, Spread
from .request_columns import RequestColumns
from .simulation import Simulation
from .worker import SimulatedWorker

SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """`busy`: share of its workers' time in which a step ran; `gpu_hours`: that they were there."""

    num_workers: int
    busy: float
    gpu_hours: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    num_drafted: int = 0  # tokens, verified
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class SimulationFigures:
    """Figures of a simulation. `good`: share of all requests that met the service level; rates are per second.
    `load_s`: from the first request to the last."""

    duration_s: float
    num_requests: int
    completed: int
    refused: int
    too_long: int
    unserved: int
    good: float
    goodput: float
    requests_per_s: float
    output_tokens_per_s: float
    hit_rate: float  # of prompt tokens, in prefix caches
    handed_off: float  # share of the requests
    handoff_bytes: float
    spreads: Mapping[str, Spread]
    pools: Mapping[str, PoolFigures]
    num_events: int
    num_decisions: Mapping[str, int] = field(default_factory=dict[str, int])  # of the controller, by kind
    cost_per_million_tokens: float | None = None  # of output; None without a price
    load_s: float = 0.0

    @property
    def is_burst(self) -> bool:
        """Return whether the requests came in so short a time that their rate says nothing of a longer load."""
        return self.load_s * 1000 < BURST * self.spreads["e2el"].mean

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def figures_of(simulation: Simulation, levels: Mapping[str, float], price: float | None) -> SimulationFigures:
    """`levels`: seconds, by metric of the bench; `price`: of a GPU for an hour."""
    columns, duration_s = simulation.columns, max(simulation.now, 1e-9)
    ttft, tpot, e2e = columns.latencies()
    met = np.ones(len(ttft), dtype=bool)
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2el", e2e)):
        met &= values <= levels.get(name, np.inf)
    pools = _pools(simulation)
    num, num_good, num_output = len(columns.came), int(met.sum()), _done_sum(columns.num_output, columns)
    gpu_hours = sum(pool.gpu_hours for pool in pools.values())
    cost = None if price is None or not num_output else price * gpu_hours / num_output * 1e6
    has_tpot = np.array(columns.num_output)[np.array(columns.ended) >= 0] > 1
    return SimulationFigures(
        duration_s=duration_s,
        num_requests=num,
        completed=len(ttft),
        refused=simulation.num_refused,
        too_long=simulation.num_too_long,
        unserved=simulation.num_unserved,
        good=num_good / max(num, 1),
        goodput=num_good / duration_s,
        requests_per_s=len(ttft) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        hit_rate=_done_sum(columns.num_cached, columns) / max(_done_sum(columns.num_input, columns), 1),
        handed_off=sum(columns.was_handed_off) / max(num, 1),
        handoff_bytes=simulation.links.num_bytes,
        spreads={
            "ttft": Spread.of(ttft.tolist()),
            "tpot": Spread.of(tpot[has_tpot].tolist()),
            "e2el": Spread.of(e2e.tolist()),
        },
        pools=pools,
        num_events=simulation.num_events,
        num_decisions=dict(simulation.decisions.num_made),
        cost_per_million_tokens=cost,
        load_s=columns.came[-1] - columns.came[0] if num else 0.0,
    )


def _done_sum(values: "array[int]", columns: RequestColumns) -> int:
    return int(np.array(values)[np.array(columns.ended) >= 0].sum())


def _pools(simulation: Simulation) -> dict[str, PoolFigures]:
    lived: dict[str, list[tuple[SimulatedWorker, float]]] = {}
    for worker, end in [*simulation.retired, *((w, simulation.now) for w in simulation.alive.values())]:
        lived.setdefault(worker.setup.pool, []).append((worker, end - worker.born))
    return {
        pool: PoolFigures(
            num_workers=len(members),
            busy=sum(w.busy_s for w, _ in members) / max(sum(seconds for _, seconds in members), 1e-9),
            gpu_hours=sum(w.setup.num_gpus * seconds for w, seconds in members) / SECONDS_AN_HOUR,
            num_prefill_tokens=sum(w.num_prefill_tokens for w, _ in members),
            num_decode_tokens=sum(w.num_decode_tokens for w, _ in members),
            num_preemptions=sum(w.scheduler.num_preemptions for w, _ in members),
            num_drafted=sum(w.drafts.num_drafted for w, _ in members if w.drafts is not None),
            num_accepted=sum(w.drafts.num_accepted for w, _ in members if w.drafts is not None),
        )
        for pool, members in sorted(lived.items())
    }


def latency_table(figures: SimulationFigures) -> Table:
    table = Table(box=None, pad_edge=False)
    percentiles = list(next(iter(figures.spreads.values())).percentiles)
    for name in ("ms", "mean", *(f"p{p}" for p in percentiles)):
        table.add_column(name, justify="left" if name == "ms" else "right")
    for metric, spread in figures.spreads.items():
        table.add_row(metric, f"{spread.mean:.1f}", *(f"{spread.percentiles[p]:.1f}" for p in percentiles))
    return table


def pool_table(figures: SimulationFigures) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("pool", "workers", "busy", "prompt tokens", "decoded", "preempted"):
        table.add_column(name, justify="left" if name == "pool" else "right")
    for name, pool in figures.pools.items():
        numbers = (pool.num_prefill_tokens, pool.num_decode_tokens, pool.num_preemptions)
        table.add_row(name, str(pool.num_workers), f"{pool.busy:.0%}", *(f"{number:,}" for number in numbers))
    return table


def summary_lines(figures: SimulationFigures) -> list[str]:
    lines = [
        f"{figures.completed:,} of {figures.num_requests:,} requests in {figures.duration_s:,.1f} s of virtual time: "
        f"{figures.requests_per_s:.2f} requests/s, {figures.output_tokens_per_s:,.0f} output tokens/s",
        f"service level met: {figures.good:.1%}, goodput {figures.goodput:.2f} requests/s",
        f"cached prompt tokens: {figures.hit_rate:.1%}; handed off: {figures.handed_off:.1%} of the requests, "
        f"{figures.handoff_bytes / 1e9:,.1f} GB",
    ]
    failed = {"refused (429)": figures.refused, "too long": figures.too_long, "no worker": figures.unserved}
    if any(failed.values()):
        lines.append("failed: " + ", ".join(f"{name} {number:,}" for name, number in failed.items() if number))
    if num_drafted := sum(pool.num_drafted for pool in figures.pools.values()):
        num_accepted = sum(pool.num_accepted for pool in figures.pools.values())
        lines.append(f"drafted tokens: {num_drafted:,}, accepted: {num_accepted / num_drafted:.0%}")
    if figures.num_decisions:
        made = ", ".join(f"{kind} {number:,}" for kind, number in sorted(figures.num_decisions.items()))
        lines.append(f"changes by the controller: {made}")
    if figures.cost_per_million_tokens is not None:
        lines.append(f"cost of a million output tokens: {figures.cost_per_million_tokens:.3f}")
    if figures.is_burst:
        lines.append(
            f"note: the requests came within {figures.load_s:.3g} s, and an answer took "
            f"{figures.spreads['e2el'].mean / 1000:.3g} s: a longer load may have other rates. "
            "Give a longer trace, or raise --num-requests"
        )
    return lines
