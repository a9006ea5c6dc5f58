"""benchmarks/gpu/efficiency.py finds the efficiency by which times were made."""

import pytest

from benchmarks.gpu.efficiency import fit, measured, table
from benchmarks.gpu.gpu_engine.models import SHAPES
from diptych.cluster.preflight.memory_plan import Parallelism
from diptych.cluster.simulate.gpus import GPUS
from diptych.cluster.simulate.roofline import Efficiency, RooflineTimer
from diptych.workers.costs.step_cost import StepWork

SPEC, GPU = SHAPES["8b"], GPUS["H200"]


def test_the_efficiency_of_made_up_times_is_found() -> None:
    timer = RooflineTimer.of(SPEC, Parallelism(), GPU, Efficiency(0.64, 0.83, 0.0012))
    rows = [{"what": "limit", "case": "copy", "value": 1.0}]
    for batch, context in ((1, 1024), (64, 1024), (16, 8192)):
        seconds = timer.seconds(StepWork(batch, batch * context))
        case = {"case": f"batch {batch}, context {context}", "graphs": True, "model": "8b"}
        rows += [{"what": "decode step", "value": 1e3 * seconds, **case}, {"what": "decode", "value": 1.0, **case}]
    for num, length in ((1, 8192), (8, 1024)):
        work = StepWork()
        for _ in range(num):
            work = work.with_chunk(0, length)
        value, case = num * length / timer.seconds(work), f"{num} prompt{'s' * (num > 1)} of {length}"
        rows.append(
            {"what": "prefill", "case": case, "value": value, "unit": "tokens/s", "model": "8b", "graphs": True}
        )
        rows.append({"what": "prefill", "case": case, "value": 1.0, "unit": "TFLOP/s", "model": "8b", "graphs": True})
    steps = measured(rows, "8b")
    assert len(steps) == 5 and not measured(rows, "1b")
    found = fit(SPEC, GPU, steps)
    assert (found.compute, found.memory) == (pytest.approx(0.64, abs=0.01), pytest.approx(0.83, abs=0.01))
    assert found.overhead_s == pytest.approx(0.0012, abs=1e-4)
    assert all(
        "(+0%)" in line or "(-0%)" in line
        for line in (row.split("|")[-2] for row in table(SPEC, GPU, steps, found)[2:])
    )
