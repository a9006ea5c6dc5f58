"""A measurement as one SVG picture: how each latency is distributed, and tokens and open requests over time. Pure.

SVG is written by hand: every browser shows it, and nothing has to be installed."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from .report import Result
from .stats import METRICS, values_s

WIDTH, HEIGHT = 420, 250  # of a panel, pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 36  # around its axes
HEAD = 34
MAX_POINTS = 200
NUM_BINS = 60
INK, LINE, MARK, BAD = "#333", "#1f6feb", "#999", "#d1242f"

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A dashed line at `x`, named."""

    x: float
    name: str
    colour: str = MARK


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x_name: str
    points: Points
    marks: Sequence[Mark] = ()
    y_top: float | None = None  # none: the highest point


def draw(result: Result) -> str:
    """The picture's SVG."""
    panels = [*(_distribution(result, metric) for metric in METRICS), _tokens(result), _open_calls(result)]
    rows = -(-len(panels) // 2)
    width, height = 2 * WIDTH, HEAD + rows * HEIGHT
    s = result.summary
    title = (
        f"diptych bench: {result.settings.get('workload')}, {s.completed} requests, "
        f"{s.per_s(s.num_output):.1f} output tokens/s"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i % 2 * WIDTH} {HEAD + i // 2 * HEIGHT})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def ticks(top: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to `top`: steps of 1, 2 or 5 times a power of ten."""
    if not top > 0:
        return [0.0]
    power = 10.0 ** np.floor(np.log10(top / about))
    step = next(float(m * power) for m in (1, 2, 5, 10) if m * power * about >= top * 0.999)
    return [i * step for i in range(int(top / step * 1.001) + 1)]


def _distribution(result: Result, metric: str) -> Panel:
    values_ms = np.sort(np.asarray(values_s([r for r in result.replies if r.failure is None], metric))) * 1000
    if len(values_ms):
        shares = np.linspace(0, 1, min(MAX_POINTS, len(values_ms) + 1))
        points = list(zip(np.quantile(values_ms, shares).tolist(), (shares * 100).tolist(), strict=True))
    else:
        points = []
    percentiles = result.summary.spreads[metric].percentiles
    marks = [Mark(percentiles[p], f"p{p}") for p in (50, 99)] if points else []
    if metric in result.levels:
        marks.append(Mark(result.levels[metric] * 1000, "level", BAD))
    return Panel(f"{metric.upper()}: % of values at most", "ms", points, marks, 100.0)


def _tokens(result: Result) -> Panel:
    """Events that held tokens, each counted as its share of its answer's tokens."""
    duration_s = result.summary.duration_s
    if not duration_s:
        return Panel("output tokens per second", "s", ())
    at, weights = [], []
    for reply in result.replies:
        at += [t - result.began_at for t in reply.token_at]
        weights += [reply.num_output / len(reply.token_at)] * len(reply.token_at)
    counts, edges = np.histogram(at, NUM_BINS, (0.0, duration_s), weights=weights)
    rates = counts / (duration_s / NUM_BINS)
    middles = (edges[:-1] + edges[1:]) / 2
    return Panel("output tokens per second", "s", list(zip(middles.tolist(), rates.tolist(), strict=True)))


def _open_calls(result: Result) -> Panel:
    edges = sorted([(r.sent_at, 1) for r in result.replies] + [(r.ended_at, -1) for r in result.replies])
    points: list[tuple[float, float]] = []
    now = 0
    for at, step in edges:
        points += [(at - result.began_at, float(now)), (at - result.began_at, float(now + step))]
        now += step
    return Panel("open requests", "s", points)


def _panel(panel: Panel) -> str:
    x_top = max([*(x for x, _ in panel.points), *(m.x for m in panel.marks)], default=0.0) or 1.0
    y_top = (panel.y_top or max((y for _, y in panel.points), default=0.0)) or 1.0
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x_top * inner_width, TOP + (1 - y / y_top) * inner_height

    right, bottom = LEFT + inner_width, TOP + inner_height
    parts = [
        f'<text x="{LEFT}" y="{TOP - 16}" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{right}" y="{bottom + 30}" text-anchor="end">{escape(panel.x_name)}</text>',
    ]
    for x in ticks(x_top):
        px = at(x, 0)[0]
        parts.append(f'<text x="{px:.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    for y in ticks(y_top):
        py = at(0, y)[1]
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{py:.1f}" y2="{py:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>')
    for i, mark in enumerate(panel.marks):
        px = at(mark.x, 0)[0]
        dash = f'stroke="{mark.colour}" stroke-dasharray="4 3"'
        parts.append(f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{TOP}" y2="{bottom}" {dash}/>')
        # One below the other, on the side where there is room.
        anchor, nudge = ("end", -3) if px > right - 40 else ("start", 3)
        place = f'x="{px + nudge:.1f}" y="{bottom - 8 - 13 * i}" text-anchor="{anchor}"'
        parts.append(f'<text {place} fill="{mark.colour}">{escape(mark.name)}</text>')
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(x, y) for x, y in panel.points))
    return "".join([*parts, f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="1.5"/>'])
