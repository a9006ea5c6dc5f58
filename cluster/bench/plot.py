"""Draws a measurement as one picture: how each latency is distributed, tokens and open requests over time; and a
search for rates: share and rate of good requests at each rate. By matplotlib, the extra `plot`; imported where a
picture is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .report import Result
from .stats import METRICS, values_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (9.0, 8.0)
SWEEP_INCHES = (9.0, 4.5)
PICTURES = (".svg", ".png", ".html")
PNG_DPI = 150
NUM_BINS = 60
LINE, MARK, BAD = "#1f6feb", "#999999", "#d1242f"

Points = Sequence[tuple[float, float]]


def draw(result: Result) -> str:
    """SVG of six panels."""
    from matplotlib.figure import Figure

    s = result.summary
    figure = Figure(figsize=INCHES, layout="constrained")
    figure.suptitle(
        f"diptych bench: {result.settings.get('workload')}, {s.completed} requests, "
        f"{s.per_s(s.num_output):.1f} output tokens/s",
        parse_math=False,
    )
    panels = [figure.add_subplot(3, 2, i + 1) for i in range(len(METRICS) + 2)]
    for metric, axes in zip(METRICS, panels, strict=False):
        _distribution(axes, result, metric)
    _over_time(panels[-2], "output tokens per second", _tokens(result))
    _over_time(panels[-1], "open requests", open_requests(result))
    return _svg(figure)


@dataclass(frozen=True, slots=True)
class RatePoint:
    """Figures at a rate: share of the requests that met the level, and good requests per second."""

    rate: float
    share: float
    goodput: float


def draw_sweep(lines: Mapping[str, Sequence[RatePoint]], shares: Sequence[float]) -> "Figure":
    """Figure of two panels with a line for each name, its points in order of rate. `shares`: those searched for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SWEEP_INCHES, layout="constrained")
    by_share, by_goodput = figure.subplots(1, 2)
    by_share.set(title="share of requests that met the level", xlabel="requests/s sent", xscale="log", ylim=(0, 1.03))
    by_goodput.set(title="goodput, requests/s", xlabel="requests/s sent", xscale="log")
    for share in shares:
        by_share.axhline(share, color=MARK, linestyle="--")
    for name, points in lines.items():
        rates = [point.rate for point in points]
        by_share.plot(rates, [point.share for point in points], marker="o", label=name)
        by_goodput.plot(rates, [point.goodput for point in points], marker="o", label=name)
    by_share.legend(loc="lower left")
    return figure


def write_figure(figure: "Figure", file: Path) -> None:
    """Write a picture in the format of its name: one of PICTURES."""
    if file.suffix.lower() == ".png":
        figure.savefig(file, format="png", dpi=PNG_DPI)
        return
    text = _svg(figure)
    if file.suffix.lower() == ".html":
        picture = text[text.index("<svg") :]
        text = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(file.stem)}</title></head>'
        text += f"<body>\n{picture}</body></html>\n"
    file.write_text(text, encoding="utf-8")


def _svg(figure: "Figure") -> str:
    from matplotlib import rc_context

    text = StringIO()
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(text, format="svg")
    return text.getvalue()


def _distribution(axes: "Axes", result: Result, metric: str) -> None:
    values_ms = np.asarray(values_s([r for r in result.replies if r.failure is None], metric)) * 1000
    axes.set(title=f"{metric.upper()}: share of values at most", xlabel="ms", ylim=(0, 1))
    if not len(values_ms):
        return
    axes.ecdf(values_ms, color=LINE)
    percentiles = result.summary.spreads[metric].percentiles
    marks = [(percentiles[p], f"p{p}", MARK) for p in (50, 99)]
    if metric in result.levels:
        marks.append((result.levels[metric] * 1000, "level", BAD))
    for x, name, colour in marks:
        axes.axvline(x, color=colour, linestyle="--", label=name)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")


def _over_time(axes: "Axes", title: str, points: Points) -> None:
    axes.set(title=title, xlabel="s")
    if points:
        axes.plot(*zip(*points, strict=True), color=LINE)
        axes.set_ylim(bottom=0)


def _tokens(result: Result) -> Points:
    """Events that held tokens, each counted as its share of its answer's tokens."""
    duration_s = result.summary.duration_s
    if not duration_s:
        return ()
    at, weights = [], []
    for reply in result.replies:
        at += [t - result.began_at for t in reply.token_at]
        weights += [reply.num_output / len(reply.token_at)] * len(reply.token_at)
    counts, edges = np.histogram(at, NUM_BINS, (0.0, duration_s), weights=weights)
    middles = (edges[:-1] + edges[1:]) / 2
    return list(zip(middles.tolist(), (counts / (duration_s / NUM_BINS)).tolist(), strict=True))


def open_requests(result: Result) -> Points:
    """Number of open requests, before and after each moment at which it changes."""
    edges = sorted([(r.sent_at, 1) for r in result.replies] + [(r.ended_at, -1) for r in result.replies])
    points: list[tuple[float, float]] = []
    now = 0
    for at, step in edges:
        points += [(at - result.began_at, float(now)), (at - result.began_at, float(now + step))]
        now += step
    return points
