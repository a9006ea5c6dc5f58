"""The report of a GPU as Markdown and JSON, from the rows and outcomes that are there. Knows no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .jobs import Outcome
from .rows import PROBLEM

TAIL_LINES = 25  # of the output of what has failed
FAKE = "fake device: no figure means anything"
NOISE = ("nanobind:", " - leaked", " - ... skipped", "See https://nanobind")  # of libraries, at a process's end
HIDDEN = ("part", "kind")  # keys of a row that its place in the report says

Row = Mapping[str, Any]


@dataclass
class Part:
    """A part of the report; `why` it was not run, where it was not."""

    name: str
    seconds: float = 0.0  # that it took
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    why: str = "not run yet"

    @property
    def status(self) -> str:
        if not self.outcomes:
            return self.why
        bad = [o for o in self.outcomes if not o.has_passed]
        return "passed" if not bad else f"{len(self.outcomes) - len(bad)} of {len(self.outcomes)} passed"


def markdown(facts: Mapping[str, str], parts: Sequence[Part], rows: Sequence[Row]) -> str:
    lines = ["# GPU report", ""]
    if facts.get("device") == FAKE:
        lines += [f"**{FAKE}.**", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {cell(value)} |" for key, value in facts.items())]
    lines += ["", "| part | result | seconds | rows |", "|---|---|---|---|"]
    for part in parts:
        num = sum(row.get("part") == part.name for row in rows)
        lines.append(f"| {part.name} | {cell(part.status)} | {part.seconds:.0f} | {num} |")
    for part in parts:
        lines += ["", f"## {part.name}", "", *section(part, [row for row in rows if row.get("part") == part.name])]
    return "\n".join(lines) + "\n"


def section(part: Part, rows: Sequence[Row]) -> list[str]:
    lines = [] if rows or part.outcomes else [part.status]
    for kind in dict.fromkeys(str(row.get("kind")) for row in rows):
        lines += [f"### {part.name}: {kind}", "", *table([row for row in rows if row.get("kind") == kind]), ""]
    if part.outcomes:
        lines += ["| job | result | seconds | its last line |", "|---|---|---|---|"]
    for o in part.outcomes:
        last = ([each for each in tail(o.output, 60) if not each.startswith(NOISE)] or [""])[-1]
        lines.append(f"| {o.name} | {cell(o.status)} | {o.seconds:.0f} | {cell(last)[:160]} |")
    for outcome in part.outcomes:
        if not outcome.has_passed:
            lines += ["", f"### {outcome.name}: {cell(outcome.status)}", ""]
            lines += [f"`{outcome.command}`", ""] if outcome.command else []
            shown = (line.replace("```", "'''") for line in tail(outcome.output, TAIL_LINES))
            lines += ["```", *shown, "```"]
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    """Rows of one kind; a column for each key that any of them has."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in HIDDEN]
    lines = [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
    return lines + [f"| {' | '.join(cell(written(row.get(key))) for key in keys)} |" for row in rows]


def written(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def as_json(facts: Mapping[str, str], parts: Sequence[Part], rows: Sequence[Row]) -> dict[str, Any]:
    def told(part: Part) -> dict[str, Any]:
        of_part = [dict(row) for row in rows if row.get("part") == part.name]
        return {**asdict(part), "status": part.status, "rows": of_part}

    return {"facts": dict(facts), "parts": [told(part) for part in parts]}


def log(parts: Sequence[Part]) -> str:
    outcomes = (o for part in parts for o in part.outcomes)
    return "".join(f"===== {o.name}: {o.status}\n{o.command}\n{o.output}\n" for o in outcomes)


def is_well(parts: Sequence[Part], rows: Sequence[Row]) -> bool:
    """Return whether all jobs passed and no row tells of a problem."""
    all_passed = all(o.has_passed for part in parts for o in part.outcomes)
    return all_passed and not any(row.get("kind") == PROBLEM for row in rows)


def tail(output: str, most: int) -> list[str]:
    return [line.rstrip() for line in output.splitlines() if line.strip()][-most:]


def cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
