"""Results of the cases: figures, goals met or missed, and their text. Knows no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

HEAD = (
    "| kernel | shape | us | spread | TB/s | TFLOP/s | of the limit | error | times as fast as | goals |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Limits:
    """Rates that torch reaches on this GPU, on random data."""

    bytes_per_s: float  # of a copy: read and written
    flops_per_s: float  # of a bf16 product


@dataclass(frozen=True)
class Verdict:
    of: str  # as Goal has it
    least: float
    aim: float
    found: float | None  # None: there is nothing to hold it against

    def __str__(self) -> str:
        def written(figure: float) -> str:
            return f"{figure:.0%}" if self.of == "copy" else f"{figure:.3g}"

        unit = {"copy": " of copy", "TB/s": " TB/s", "TFLOP/s": " TFLOP/s"}.get(self.of, f" x {self.of}")
        if self.found is None:
            return f"not measured: {written(self.least)}{unit}"
        word = "aim" if self.found >= self.aim else "least" if self.found >= self.least else "MISSED"
        return f"{word}: {written(self.found)}{unit} (at least {written(self.least)}, aim {written(self.aim)})"

    @property
    def is_missed(self) -> bool:
        return self.found is not None and self.found < self.least


@dataclass(frozen=True)
class Result:
    group: str
    kernel: str
    shape: str
    problem: str = ""  # why there is no figure
    error: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    spread: tuple[float, float] | None = None  # quartiles, in seconds
    num_bytes: float = 0.0
    num_flops: float = 0.0
    share: float | None = None  # of the limit that allows less
    times: dict[str, float] = field(default_factory=dict)  # as fast as each peer
    problems: dict[str, str] = field(default_factory=dict)  # peers that have no figure, and why
    verdicts: tuple[Verdict, ...] = ()

    @property
    def is_well(self) -> bool:
        return not self.problem and not any(v.is_missed for v in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        for verdict, written in zip(self.verdicts, row["verdicts"], strict=True):
            written["verdict"] = str(verdict)
        return row


def share_of(seconds: float, num_bytes: float, num_flops: float, limits: Limits) -> float:
    """The time that the limits allow (the longer of bytes' and flops') over the time it took."""
    return max(num_bytes / limits.bytes_per_s, num_flops / limits.flops_per_s) / seconds


def figure_of(
    of: str, seconds: float, num_bytes: float, num_flops: float, times: dict[str, float], limits: Limits
) -> float | None:
    """The figure that a goal asks for, None if there is none."""
    if of == "copy":
        return num_bytes / seconds / limits.bytes_per_s
    if of in ("TB/s", "TFLOP/s"):
        return (num_bytes if of == "TB/s" else num_flops) / seconds / 1e12
    return min((ratio for name, ratio in times.items() if name.startswith(of)), default=None)


def line(result: Result) -> str:
    """A row of the table under HEAD."""
    if result.seconds is None or result.spread is None or result.share is None:
        told = result.problem or f"right, error {result.error:.1e}"
        return f"| {result.kernel} | {result.shape} | | | | | | | {one_line(told)} | |"
    low, high = result.spread
    beside = [f"{ratio:.2f} {name}" for name, ratio in sorted(result.times.items(), key=lambda item: item[1])]
    beside += [f"({name}: {one_line(why)})" for name, why in result.problems.items()]
    cells = (
        result.kernel,
        result.shape,
        f"{result.seconds * 1e6:.1f}",
        f"{low * 1e6:.1f} to {high * 1e6:.1f}",
        f"{result.num_bytes / result.seconds / 1e12:.2f}",
        f"{result.num_flops / result.seconds / 1e12:.0f}",
        f"{result.share:.0%}",
        f"{result.error:.1e}",
        ", ".join(beside),
        "; ".join(map(str, result.verdicts)),
    )
    return f"| {' | '.join(cells)} |"


def row(result: Result) -> dict[str, Any]:
    """The same as a row of a report."""
    found = {"kernel": result.kernel, "shape": result.shape, "problem": result.problem, "error": result.error}
    if result.seconds is not None:
        found |= {
            "us": result.seconds * 1e6,
            "TB/s": result.num_bytes / result.seconds / 1e12,
            "TFLOP/s": result.num_flops / result.seconds / 1e12,
            "of the limit": result.share,
            "times as fast as": "; ".join(f"{ratio:.2f} {name}" for name, ratio in result.times.items()),
            "goals": "; ".join(map(str, result.verdicts)),
        }
    beside = "; ".join(f"{name}: {one_line(why)}" for name, why in result.problems.items())
    return found | ({"peers without a figure": beside} if beside else {})


def one_line(text: str, most: int = 160) -> str:
    words = " ".join(text.split()).replace("|", "/")
    return words if len(words) <= most else words[: most - 3] + "..."


def summary(results: Sequence[Result]) -> list[str]:
    """Summarise: how many cases gave a figure, and each goal that is missed or case that has none."""
    verdicts = [v for r in results for v in r.verdicts]
    missed = [v for v in verdicts if v.is_missed]
    wrong = [r for r in results if r.problem]
    met = [v for v in verdicts if v.found is not None and not v.is_missed]
    aims = sum(v.found >= v.aim for v in met if v.found is not None)
    lines = [
        f"{len(results) - len(wrong)} of {len(results)} cases are right; of {len(verdicts)} goals {len(met)} are met "
        f"({aims} with their aim), {len(missed)} missed, {len(verdicts) - len(met) - len(missed)} not measured."
    ]
    lines += [f"- {r.kernel}, {r.shape}: {one_line(r.problem, 400)}" for r in wrong]
    lines += [f"- {r.kernel}, {r.shape}: {v}" for r in results for v in r.verdicts if v.is_missed]
    return lines
