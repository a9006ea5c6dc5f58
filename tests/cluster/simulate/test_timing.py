"""Times of steps: fits, runs of steps, GPUs."""

import json
from pathlib import Path

import numpy as np
import pytest

from diptych.cluster.preflight.checks import check_model, resolve_model
from diptych.cluster.preflight.memory_plan import Parallelism
from diptych.cluster.simulate.gpus import GPUS, gpu_of
from diptych.cluster.simulate.profile import make_profile, read_profile
from diptych.cluster.simulate.roofline import Efficiency, RooflineTimer
from diptych.cluster.simulate.timing import DecodeRun, LinearTimer, fit_timer, fit_weights
from diptych.workers.common.errors import ConfigError, WorkloadError
from diptych.workers.core.step_cost import StepWork
from diptych.workers.core.step_log_format import StepLogHeader
from diptych.workers.engine.step_log import StepLog

WEIGHTS = (0.004, 2e-5, 6e-8, 3e-5, 1e-9)
HEADER = StepLogHeader("m", "bfloat16", "cpu", 1, 1, 16, 100, 128.0, "here")


def test_a_fit_finds_the_weights() -> None:
    assert fit_timer(LinearTimer(WEIGHTS)) == pytest.approx(WEIGHTS)


def test_a_fit_has_no_weight_below_zero() -> None:
    rng = np.random.default_rng(0)
    steps = np.column_stack([rng.integers(1, 64, 200), rng.integers(1, 9000, 200), np.zeros((200, 2)), np.zeros(200)])
    steps[:, 4] = 0.01 - 1e-5 * steps[:, 0] + 1e-7 * steps[:, 1]
    weights = fit_weights(steps.astype(float))
    assert weights[1] == 0.0 and min(weights) >= 0
    assert weights[0] == pytest.approx(0.0097, rel=0.02)


def test_a_run_of_steps_sums_them() -> None:
    timer, work = LinearTimer(WEIGHTS), StepWork(3, 300)
    run = DecodeRun.of(timer, work, 5, 2.0)
    ends = 2.0 + np.cumsum([timer.seconds(StepWork(3, 300 + 3 * i)) for i in range(5)])
    assert [run.end_of(i + 1) for i in range(5)] == pytest.approx(ends.tolist())
    for num, end in enumerate(ends[:4], 1):
        assert (run.num_over(end - 1e-9), run.num_over(end + 1e-9)) == (num - 1, num)
    assert run.num_over(99.0) == 4, "the last one ends by itself"


def test_a_profile_is_made_of_step_logs(tmp_path: Path) -> None:
    timer, rng = LinearTimer(WEIGHTS), np.random.default_rng(0)
    for name in ("a", "b"):
        log = StepLog(tmp_path / "steps", name, HEADER)
        for _ in range(100):
            work = StepWork(int(rng.integers(0, 9)), int(rng.integers(0, 900))).with_chunk(5, int(rng.integers(0, 99)))
            log.add(work, timer.seconds(work))
        log.close()
    made = make_profile(tmp_path / "steps")
    assert made.weights == pytest.approx(WEIGHTS, rel=1e-3)
    assert made.num_steps == 200 and made.residuals[99] == pytest.approx(1.0, rel=1e-3)
    made.write(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == made
    (tmp_path / "profile.json").write_text(json.dumps({"weights": [1]}))
    with pytest.raises(ConfigError, match="is no profile"):
        read_profile(tmp_path / "profile.json")


def test_step_logs_that_cannot_be_fitted(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="holds no step logs"):
        make_profile(tmp_path)
    log = StepLog(tmp_path, "a", HEADER)
    log.add(StepWork(1, 5), 0.1)
    log.close()
    with pytest.raises(WorkloadError, match="holds 1 steps and 50 are needed"):
        make_profile(tmp_path)
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text() + "1,2,x,0,1\n")
    with pytest.raises(WorkloadError, match="line 4: a step is"):
        make_profile(tmp_path)
    (tmp_path / "a.csv").write_text("{}\n")
    with pytest.raises(WorkloadError, match="line 1: it does not say whose"):
        make_profile(tmp_path)


def test_roofline_of_a_gpu() -> None:
    """A decode of one sequence reads all weights; a long prompt is bound by compute; two ranks halve both."""
    spec, gpu = check_model(Path(resolve_model("tiny"))), GPUS["H100"]
    whole = Efficiency(1.0, 1.0, 0.0)
    one = RooflineTimer.of(spec, Parallelism(), gpu, whole)
    weights = one.dense_bytes
    assert one.seconds(StepWork(1, 0)) == pytest.approx((weights + one.kv_bytes) / gpu.bytes_s)
    prompt = StepWork().with_chunk(0, 100_000)
    flops = one.token_flops * 1e5 + one.pair_flops * prompt.num_pairs
    assert one.seconds(prompt) == pytest.approx(flops / gpu.flops_s)
    assert one.token_flops == pytest.approx(weights)  # 2 operations for each weight of 2 bytes
    assert RooflineTimer.of(spec, Parallelism(), gpu, Efficiency(0.5, 0.5, 0.001)).seconds(prompt) == pytest.approx(
        2 * flops / gpu.flops_s + 0.001
    )
    with pytest.raises(ConfigError, match="there is no GPU 'K80'"):
        gpu_of("K80")
