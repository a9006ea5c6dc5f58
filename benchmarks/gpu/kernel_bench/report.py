"""The report of a GPU as Markdown, from what the steps gave. Knows no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .commands import Outcome

TAIL_LINES = 25  # of the output of what has failed


@dataclass
class Step:
    name: str
    seconds: float = 0.0  # that it took
    outcomes: list[Outcome] = field(default_factory=list)
    body: list[str] = field(default_factory=list)  # lines of Markdown: its tables
    shows_output: bool = False  # of what has passed, too

    @property
    def status(self) -> str:
        bad = [o for o in self.outcomes if not o.has_passed]
        if not self.outcomes:
            return "not run"
        return "passed" if not bad else f"{len(self.outcomes) - len(bad)} of {len(self.outcomes)} passed"


def markdown(facts: Mapping[str, str], steps: Sequence[Step]) -> str:
    lines = ["# GPU report", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {cell(value)} |" for key, value in facts.items()]
    lines += ["", "| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {step.name} | {step.status} | {step.seconds:.0f} |" for step in steps]
    for step in steps:
        lines += ["", f"## {step.name}", "", *section(step)]
    return "\n".join(lines) + "\n"


def section(step: Step) -> list[str]:
    lines = list(step.body)
    if len(step.outcomes) > 1:
        lines += ["", "| command | result | seconds | its last line |", "|---|---|---|---|"]
        lines += [
            f"| {o.name} | {cell(o.status)} | {o.seconds:.0f} | {cell((tail(o.output, 1) or [''])[0])} |"
            for o in step.outcomes
        ]
    for outcome in step.outcomes:
        if step.shows_output or not outcome.has_passed:
            lines += ["", f"### {outcome.name}: {cell(outcome.status)}", ""]
            if outcome.command:
                lines += [f"`{outcome.command}`", ""]
            most = 200 if step.shows_output else TAIL_LINES
            lines += ["```", *(line.replace("```", "'''") for line in tail(outcome.output, most)), "```"]
    return lines


def tail(output: str, most: int) -> list[str]:
    return [line.rstrip() for line in output.splitlines() if line.strip()][-most:]


def cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def kernel_body(found: Mapping[str, Any] | None, lines: Sequence[str]) -> list[str]:
    """lines: the tables that kernels.py has printed; found: its JSON, None where it was cut off before."""
    goals = [(row, verdict) for row in (found or {}).get("results", []) for verdict in row["verdicts"]]
    if not goals:
        return list(lines)
    body = ["| kernel | shape | goal |", "|---|---|---|"]
    body += [f"| {row['kernel']} | {cell(row['shape'])} | {cell(verdict['verdict'])} |" for row, verdict in goals]
    return ["Goals:", "", *body, "", "All figures:", "", *lines]
