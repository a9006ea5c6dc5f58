"""Shows what a search of layouts found: a table, sentences, cluster.yaml, points of a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from ...workers.common.errors import ConfigError
from ..bench.plot import RatePoint
from ..common.plurals import count
from .layouts import LayoutKind, PlannedLevel
from .search import WIDTH, LayoutFinding, Measured, Question, rate_text

SECONDS_AN_HOUR = 3600.0
EQUAL = WIDTH  # goodputs that differ less are not told apart
MOSTLY = 0.5  # of the requests, that a disaggregated layout hands off
NUM_LINES = 3  # of the picture
# Rates of the picture, of the best goodput.
PICTURED = (0.4, 0.6, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Asked:
    """Goal of the plan. `rate`: None for the highest; `price`: of a GPU for an hour; `num_output`: mean of the
    tokens that a session is answered."""

    level: PlannedLevel
    rate: float | None
    price: float | None
    num_output: float

    def shown(self, finding: LayoutFinding) -> Measured:
        """Measurement at the asked rate, or at the goodput."""
        return finding.best if self.rate is None else finding.at(self.rate)

    def cost(self, finding: LayoutFinding) -> float | None:
        """Price of a million output tokens while requests come at the shown rate, good or not."""
        if self.price is None:
            return None
        tokens_s = self.shown(finding).rate * self.num_output
        return self.price * finding.layout.num_gpus / SECONDS_AN_HOUR / tokens_s * 1e6


def caption(asked: Asked) -> str:
    """Line above the table."""
    at = "the goodput" if asked.rate is None else f"{rate_text(asked.rate)} requests/s"
    return f"goodput: requests/s with {asked.level}; latencies in ms, at {at}"


def table_of(found: Sequence[LayoutFinding], asked: Asked) -> Table:
    """`found`: best first."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ["pools", "TP", "routes", "goodput", "a GPU", "margin", "TTFT p50", "p99", "TPOT p50", "p99", "handed off"]
    for name in names + (["$ / M tokens"] if asked.price is not None else []):
        table.add_column(name, justify="left" if name in ("pools", "TP", "routes") else "right", no_wrap=True)
    for number, finding in enumerate(found):
        layout, shown = finding.layout, asked.shown(finding)
        following = found[number + 1].rate if number + 1 < len(found) else 0.0
        cells = [
            layout.pools_text,
            layout.ranks_text,
            layout.routes.value,
            goodput_text(finding),
            rate_text(finding.rate / layout.num_gpus),
            f"{finding.rate / following - 1:+.0%}" if following else "",
            *(f"{value:.0f}" for value in shown.ttft_ms),
            *(f"{value:.1f}" for value in shown.tpot_ms),
            f"{shown.handed_off:.0%}",
        ]
        cost = asked.cost(finding)
        table.add_row(*cells, *([] if cost is None else [f"{cost:.3f}"]), style="bold" if number == 0 else None)
    return table


def goodput_text(finding: LayoutFinding) -> str:
    """Goodput, with a mark where no higher rate is known to fail."""
    return f"{'' if finding.is_bounded else '>= '}{rate_text(finding.rate)}"


def sentences(found: Sequence[LayoutFinding]) -> list[str]:
    """Sentences that name the best layout, and say which of colocated and disaggregated layouts win, and by how much.
    `found`: best first."""
    best = found[0]
    per_gpu = rate_text(best.rate / best.layout.num_gpus)
    text = (
        f"best: {best.layout}: {goodput_text(best)} requests/s on {count(best.layout.num_gpus, 'GPU')}, {per_gpu} each"
    )
    if len(found) > 1 and found[1].rate:
        margin = best.rate / found[1].rate - 1
        text += f", {margin:.0%} more than the next" if margin >= EQUAL else f", within {EQUAL:.0%} of the next"
    return [text, _comparison(found)]


def _best_of_kinds(found: Sequence[LayoutFinding]) -> tuple[LayoutFinding | None, LayoutFinding | None]:
    """Best colocated and best disaggregated layout; None where none meets the level."""
    able = [each for each in found if each.rate]
    colocated = next((each for each in able if each.layout.kind == LayoutKind.COLOCATED), None)
    return colocated, next((each for each in able if _is_split(each)), None)


def _comparison(found: Sequence[LayoutFinding]) -> str:
    colocated, split = _best_of_kinds(found)
    if colocated is None or split is None:
        missing = "colocated layout" if colocated is None else "layout that hands off most of its requests"
        return f"no {missing} meets the level on that many GPUs"
    both = f"the best colocated layout ({colocated.layout}) serves {goodput_text(colocated)} requests/s, the best "
    both += f"disaggregated one ({split.layout}, which hands off {split.best.handed_off:.0%}) {goodput_text(split)}"
    low, high = sorted((colocated.rate, split.rate))
    if high / low - 1 < EQUAL:
        return f"disaggregation makes no difference of {EQUAL:.0%}: {both}"
    if colocated.rate > split.rate:
        return f"disaggregation loses: {both}, {1 - low / high:.0%} less"
    return f"disaggregation wins: {both}, {high / low - 1:.0%} more"


def _is_split(finding: LayoutFinding) -> bool:
    """Return whether most of its requests move: by predicted times a prefill worker may also decode, and a layout of
    two pools computes as mixed workers do."""
    return finding.layout.kind == LayoutKind.DISAGGREGATED and finding.best.handed_off >= MOSTLY


def write_settings(file: Path, settings: Mapping[str, Any], comments: Sequence[str]) -> None:
    """Write cluster.yaml. Raises ConfigError."""
    head = "".join(f"# {line}\n" for line in comments)
    try:
        file.write_text(head + yaml.safe_dump(dict(settings), sort_keys=False), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot write {file}: {e.strerror}. Give another --output") from e


def picture_questions(found: Sequence[LayoutFinding], num: int) -> list[Question]:
    """Measurements at rates around the best goodput: of the best layout, of the best of each kind, and of those that
    follow with other pools."""
    rates = tuple(found[0].rate * part for part in PICTURED)
    chosen: dict[object, LayoutFinding] = {}
    for each in (found[0], *_best_of_kinds(found), *found):
        if each is not None:
            chosen.setdefault(each.layout.pools, each)
    return [Question(each.layout, num, rates) for each in list(chosen.values())[:NUM_LINES]]


def picture_lines(measured: Sequence[LayoutFinding]) -> dict[str, list[RatePoint]]:
    """Lines of the picture by layout."""
    return {
        str(each.layout): [RatePoint(at.rate, at.share, at.share * at.rate) for at in each.measured]
        for each in measured
    }
