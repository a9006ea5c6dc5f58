"""Scores the runs of goodput.py, and writes them as tables and as a picture. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, TypeVar

from diptych.cluster.bench.report import Result
from diptych.cluster.bench.stats import is_good

# Seconds, by metric.
LEVELS: Mapping[str, Mapping[str, float]] = {
    "tight TTFT": {"ttft": 0.5, "tpot": 0.1},
    "tight TPOT": {"ttft": 1.0, "tpot": 0.05},
    "both tight": {"ttft": 0.5, "tpot": 0.05},
}
DIAL = "dial"
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One measured run. `seconds`: of sending; `figures`: those of `diptych bench`; `good`: requests, by level that the
    run is scored by."""

    layout: str
    load: str
    rate: float
    seconds: float
    figures: Mapping[str, Any]
    good: Mapping[str, int]

    @property
    def sent(self) -> int:
        return self.figures["completed"] + self.figures["failed"]

    def share(self, level: str) -> float:
        return self.good[level] / self.sent if self.sent else 0.0

    def goodput(self, level: str) -> float:
        """Requests per second of sending."""
        return self.good[level] / self.seconds

    def line(self) -> str:
        shares = ", ".join(f"{level} {self.share(level):.0%}" for level in self.good)
        f = self.figures
        return (
            f"{self.load} at {self.rate:g}/s, {self.layout}: {shares}; TTFT p50 {f['p50_ttft_ms']:.0f}, "
            f"p90 {f['p90_ttft_ms']:.0f} ms; TPOT p50 {f['p50_tpot_ms']:.1f}, p90 {f['p90_tpot_ms']:.1f} ms; "
            f"{f['failed']} failed"
        )


def score(result: Result) -> dict[str, int]:
    """Number of requests that met each level."""
    done = [reply for reply in result.replies if reply.failure is None]
    return {name: sum(is_good(reply, level) for reply in done) for name, level in LEVELS.items()}


def as_markdown(runs: Sequence[Run], peers: Mapping[str, Sequence[str]]) -> str:
    """A table for each load. `peers`: layouts with the best of which the dial is compared, by name of the column."""
    return "\n".join(line for load in _in_order(run.load for run in runs) for line in _table(load, runs, peers)) + "\n"


def _table(load: str, runs: Sequence[Run], peers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    runs = [run for run in runs if run.load == load]
    layouts = _in_order(run.layout for run in runs)
    here = {peer: names for peer, names in peers.items() if DIAL in layouts and set(names) & set(layouts)}
    heads = [f"{load}: rate, level", *layouts, *(f"{DIAL} / {peer}" for peer in here)]
    yield f"| {' | '.join(heads)} |"
    yield "|---" + "|--:" * (len(heads) - 1) + "|"
    for rate in _in_order(run.rate for run in runs):
        for level in LEVELS:
            at_rate = {run.layout: run for run in runs if run.rate == rate and level in run.good}
            cells = [_cell(at_rate, name, level) for name in layouts]
            cells += [_ratio(at_rate, level, names) for names in here.values()]
            yield f"| {rate:g}/s, {level} | {' | '.join(cells)} |"
    yield ""


def _cell(at_rate: Mapping[str, Run], layout: str, level: str) -> str:
    """Share and goodput; bold where no layout is better."""
    if layout not in at_rate:
        return ""
    run, best = at_rate[layout], max(each.goodput(level) for each in at_rate.values())
    text = f"{run.share(level):.0%}, {run.goodput(level):.2f}/s"
    return f"**{text}**" if run.goodput(level) == best > 0 else text


def _ratio(at_rate: Mapping[str, Run], level: str, peers: Sequence[str]) -> str:
    best = max((at_rate[name].goodput(level) for name in peers if name in at_rate), default=0.0)
    return f"{at_rate[DIAL].goodput(level) / best:.2f}" if best and DIAL in at_rate else ""


def draw(runs: Sequence[Run]) -> str:
    """SVG: a row for each load, a column for each level, a line for each layout."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    loads, layouts = _in_order(run.load for run in runs), _in_order(run.layout for run in runs)
    figure = Figure(figsize=(4.0 * len(LEVELS), 3.0 * len(loads)), layout="constrained")
    panels = figure.subplots(len(loads), len(LEVELS), squeeze=False)
    for row, load in zip(panels, loads, strict=True):
        for axes, level in zip(row, LEVELS, strict=True):
            axes.set(title=f"{load}: {level}", xlabel="requests/s", ylabel="share within", ylim=(0, 1.03))
            for layout in layouts:
                points = [(r.rate, r.share(level)) for r in _scored(runs, load, layout, level)]
                axes.plot(*zip(*sorted(points), strict=True) if points else ((), ()), marker="o", label=layout)
    panels[0][0].legend(loc="lower left")
    text = StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg")
    return text.getvalue()


def _scored(runs: Sequence[Run], load: str, layout: str, level: str) -> list[Run]:
    return [run for run in runs if (run.load, run.layout) == (load, layout) and level in run.good]


def _in_order(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
