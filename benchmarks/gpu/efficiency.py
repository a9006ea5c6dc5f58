"""Parts of a GPU's datasheet rates that measured steps reach: what `diptych simulate --gpu` and `plan` assume.

    python -m benchmarks.gpu.efficiency gpu_report/figures.jsonl --gpu H200 [--model 8b]

Takes the steps that engine_gpu.py has measured with graphs, as gpu_report.py writes them, and finds the three numbers
of cluster/simulate/roofline.py's Efficiency (compute, memory, overhead of a step) with the least sum of squared
relative errors. Each step is printed beside the model's time by the defaults and by these.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from diptych.cluster.preflight.memory_plan import Parallelism
from diptych.cluster.simulate.gpus import GPUS, Gpu
from diptych.cluster.simulate.roofline import Efficiency, RooflineTimer
from diptych.workers.costs.step_cost import StepWork
from diptych.workers.models.families.spec import ModelSpec

from .gpu_engine.models import SHAPES

DECODE, PREFILL = re.compile(r"batch (\d+), context (\d+)"), re.compile(r"(\d+) prompts? of (\d+)")
ROUNDS, WIDTH = 12, 5  # of the search: each looks at WIDTH values of each number, closer and closer


@dataclass(frozen=True, slots=True)
class Measured:
    case: str
    work: StepWork
    seconds: float


def measured(rows: Iterable[dict[str, Any]], model: str) -> list[Measured]:
    """Steps of a model with graphs, of rows of a report."""
    found: list[Measured] = []
    for row in rows:
        if row.get("model") != model or row.get("graphs") is not True:
            continue
        what, case, value = row["what"], str(row["case"]), float(row["value"])
        if what == "decode step" and (sizes := DECODE.fullmatch(case)):
            batch, context = map(int, sizes.groups())
            found.append(Measured(case, StepWork(batch, batch * context), value / 1e3))
        elif what == "prefill" and row.get("unit") == "tokens/s" and (sizes := PREFILL.fullmatch(case)):
            num, length = map(int, sizes.groups())
            work = StepWork()
            for _ in range(num):
                work = work.with_chunk(0, length)
            found.append(Measured(case, work, num * length / value))
    return found


def fit(spec: ModelSpec, gpu: Gpu, steps: Sequence[Measured]) -> Efficiency:
    """Search around the best so far, each time half as far."""

    def error(reached: Efficiency) -> float:
        timer = RooflineTimer.of(spec, Parallelism(), gpu, reached)
        return sum((timer.seconds(step.work) / step.seconds - 1) ** 2 for step in steps)

    best, spans = Efficiency(0.5, 0.5, 0.002), (0.45, 0.45, 0.002)
    for _ in range(ROUNDS):
        around = [
            [center + span * (2 * i / (WIDTH - 1) - 1) for i in range(WIDTH)]
            for center, span in zip((best.compute, best.memory, best.overhead_s), spans, strict=True)
        ]
        tried = (Efficiency(c, m, o) for c, m, o in product(*around) if min(c, m) > 0 and o >= 0)
        best = min(tried, key=error)
        spans = (spans[0] / 2, spans[1] / 2, spans[2] / 2)
    return best


def table(spec: ModelSpec, gpu: Gpu, steps: Sequence[Measured], reached: Efficiency) -> list[str]:
    timers = [RooflineTimer.of(spec, Parallelism(), gpu, of) for of in (Efficiency(), reached)]
    lines = ["| step | measured, ms | by the defaults | by the fit |", "|---|---|---|---|"]
    for step in steps:
        times = [f"{1e3 * s:.2f} ({s / step.seconds - 1:+.0%})" for s in (t.seconds(step.work) for t in timers)]
        lines.append(f"| {step.case} | {1e3 * step.seconds:.2f} | {times[0]} | {times[1]} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path, help="figures.jsonl of gpu_report.py")
    parser.add_argument("--gpu", choices=sorted(GPUS), required=True)
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b")
    options = parser.parse_args()
    steps = measured(map(json.loads, options.figures.read_text().splitlines()), options.model)
    if len(steps) < 3:
        print(f"{options.figures} has {len(steps)} steps of {options.model} with graphs: 3 are needed", file=sys.stderr)
        return 1
    spec, gpu = SHAPES[options.model], GPUS[options.gpu]
    reached = fit(spec, gpu, steps)
    print(f"compute {reached.compute:.3f}, memory {reached.memory:.3f}, overhead {1e3 * reached.overhead_s:.2f} ms\n")
    print(*table(spec, gpu, steps, reached), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
