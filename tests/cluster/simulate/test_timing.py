"""Times of steps: fits, runs of steps, GPUs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diptych.cluster.preflight.checks import check_model, resolve_model
from diptych.cluster.preflight.memory_plan import Parallelism
from diptych.cluster.simulate.gpus import GPUS, gpu_of
from diptych.cluster.simulate.noise import Noise
from diptych.cluster.simulate.profile import LinkProfile, make_profile, read_link, read_profile
from diptych.cluster.simulate.roofline import Efficiency, RooflineTimer
from diptych.cluster.simulate.timing import DecodeRun, FittedTimer, fit_timer, fit_weights
from diptych.kernels.cpu.formats import Format, NumberLayout
from diptych.workers.common.errors import ConfigError, WorkloadError
from diptych.workers.costs.step_cost import StepWork
from diptych.workers.costs.step_log_format import StepLogHeader
from diptych.workers.engine.step_log import StepLog

WEIGHTS = (0.004, 2e-5, 6e-8, 3e-5, 1e-9, 0.002)
HEADER = StepLogHeader("m", "bfloat16", "cpu", "mixed", 1, 1, 16, 100, 128.0, "here", 2)


@pytest.mark.parametrize("hidden_s", [0.0, 0.002, 0.004])
def test_a_fit_finds_the_weights(hidden_s: float) -> None:
    weights = (*WEIGHTS[:5], hidden_s)
    assert fit_timer(FittedTimer(weights)) == pytest.approx(weights)


def test_a_gpu_computes_some_prompt_tokens_while_it_reads_its_weights() -> None:
    """And the fit knows how many, whatever else the step does."""
    gpu = GPUS["H100"]
    timer = RooflineTimer(
        dense_bytes=15e9,
        expert_bytes=0,
        token_flops=15e9,
        pair_flops=5e5,
        kv_bytes=131_072,
        flops_s=0.6 * gpu.flops_s,
        bytes_s=0.75 * gpu.bytes_s,
        reduce_token_s=0.0,
        fixed_s=0.001,
    )
    fitted = FittedTimer(fit_timer(timer))
    for decodes in (StepWork(1, 100), StepWork(16, 16_000), StepWork(64, 64_000)):
        assert timer.seconds(decodes.with_chunk(0, 128)) == pytest.approx(timer.seconds(decodes), rel=0.01)
        for num in (0, 128, 512, 1024, 4096):
            work = decodes.with_chunk(0, num)
            assert fitted.seconds(work) == pytest.approx(timer.seconds(work), rel=0.1), num


def test_a_fit_has_no_weight_below_zero() -> None:
    rng = np.random.default_rng(0)
    steps = np.column_stack([rng.integers(1, 64, 200), rng.integers(1, 9000, 200), np.zeros((200, 2)), np.zeros(200)])
    steps[:, 4] = 0.01 - 1e-5 * steps[:, 0] + 1e-7 * steps[:, 1]
    weights = fit_weights(steps.astype(float))
    assert weights[1] == 0.0 and min(weights) >= 0
    assert weights[0] == pytest.approx(0.0097, rel=0.02)


def test_a_run_of_steps_sums_them() -> None:
    timer, work = FittedTimer(WEIGHTS), StepWork(3, 300)
    run = DecodeRun.of(timer, work, 5, 2.0)
    ends = 2.0 + np.cumsum([timer.seconds(StepWork(3, 300 + 3 * i)) for i in range(5)])
    assert [run.end_of(i + 1) for i in range(5)] == pytest.approx(ends.tolist())
    for num, end in enumerate(ends[:4], 1):
        assert (run.num_over(end - 1e-9), run.num_over(end + 1e-9)) == (num - 1, num)
    assert run.num_over(99.0) == 4, "the last one ends by itself"


def write_log(folder: Path, name: str, threads: int, timer: FittedTimer, gap_s: float = 0.0) -> None:
    """A log of 100 random steps, each `gap_s` after the one before."""
    rng, now = np.random.default_rng(threads), 5.0
    log = StepLog(folder, name, replace(HEADER, threads=threads))
    for _ in range(100):
        work = StepWork(int(rng.integers(1, 9)), int(rng.integers(0, 900))).with_chunk(5, int(rng.integers(0, 99)))
        log.add(now, work, timer.seconds(work))
        now += timer.seconds(work) + gap_s
    log.close()


def test_a_profile_is_made_of_step_logs(tmp_path: Path) -> None:
    """Two workers with one thread, and one with two threads that is twice as fast; 0.25 ms between steps."""
    slow, fast = FittedTimer(WEIGHTS), FittedTimer(tuple(weight / 2 for weight in WEIGHTS))
    for name, threads, timer in (("a", 1, slow), ("b", 1, slow), ("c", 2, fast)):
        write_log(tmp_path / "steps", name, threads, timer, 0.00025)
    made = make_profile(tmp_path / "steps")
    assert [worker.worker.threads for worker in made.workers] == [1, 2]
    assert made.of_threads(1).weights == pytest.approx(WEIGHTS, rel=1e-2)
    assert made.of_threads(2).weights == pytest.approx(fast.weights, rel=1e-2)
    assert made.of_threads(1).num_steps == 200 and made.of_threads(1).residuals[99] == pytest.approx(1.0, rel=1e-3)
    assert made.of_threads(1).gap_s == pytest.approx(0.00025, rel=0.01)
    assert made.of_threads(1).timer("mixed").seconds(StepWork()) == pytest.approx(WEIGHTS[0] + 0.00025, rel=1e-3)
    with pytest.raises(ConfigError, match="workers of 1, 2 threads"):
        made.of_threads(3)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_log(tmp_path / "steps", "a", 1, FittedTimer(WEIGHTS))
    made = make_profile(tmp_path / "steps", LinkProfile(1e9, 0.002))
    assert made.of_threads(None) == made.workers[0], "the only one"
    made.write(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == made
    (tmp_path / "profile.json").write_text(json.dumps({"workers": [1]}))
    with pytest.raises(ConfigError, match="is not a profile"):
        read_profile(tmp_path / "profile.json")


def test_a_pause_is_no_time_between_steps(tmp_path: Path) -> None:
    log = StepLog(tmp_path, "a", HEADER)
    for i in range(100):
        log.add(i * 0.02 + 5.0 * (i // 2), StepWork(2, 100 + i), 0.01)
    log.close()
    assert make_profile(tmp_path).workers[0].gap_s == pytest.approx(0.01)


def test_step_logs_that_cannot_be_fitted(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="holds no step logs"):
        make_profile(tmp_path)
    log = StepLog(tmp_path, "a", HEADER)
    log.add(1.0, StepWork(1, 5), 0.1)
    log.close()
    with pytest.raises(WorkloadError, match="holds 1 steps of workers with 1 threads, and 50 are needed"):
        make_profile(tmp_path)
    other = StepLog(tmp_path, "b", replace(HEADER, dtype="float32"))
    other.add(1.0, StepWork(1, 5), 0.1)
    other.close()
    with pytest.raises(WorkloadError, match="differ in more than threads"):
        make_profile(tmp_path)
    (tmp_path / "b.csv").unlink()
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text() + "0,1,2,x,0,1\n")
    with pytest.raises(WorkloadError, match="line 4: a step must be"):
        make_profile(tmp_path)
    (tmp_path / "a.csv").write_text("{}\n")
    with pytest.raises(WorkloadError, match="line 1: the header of the step log is invalid"):
        make_profile(tmp_path)


def test_steps_beside_another_workers_take_longer(tmp_path: Path) -> None:
    """Worker a computes all the time, b every second second; steps of a take half as long again while b computes. A
    prefill worker of another time takes twice as long."""
    timer, rng = FittedTimer(WEIGHTS), np.random.default_rng(0)
    a, b = StepLog(tmp_path, "a", HEADER), StepLog(tmp_path, "b", HEADER)
    alone = StepLog(tmp_path, "c", replace(HEADER, role="prefill"))
    now = 0.0
    for i in range(400):
        work = StepWork(int(rng.integers(1, 9)), int(rng.integers(0, 900))).with_chunk(5, int(rng.integers(0, 99)))
        seconds = timer.seconds(work) * (1.5 if i % 2 else 1.0)
        a.add(now, work, seconds)
        if i % 2:
            b.add(now, work, seconds)
        alone.add(1000.0 + i, StepWork().with_chunk(0, 50 + i), 2 * timer.seconds(StepWork().with_chunk(0, 50 + i)))
        now += seconds
    for log in (a, b, alone):
        log.close()
    worker = make_profile(tmp_path).workers[0]
    assert worker.contention == pytest.approx(0.5, rel=0.1)
    slow = worker.timer("prefill").seconds(StepWork().with_chunk(0, 100))
    assert slow == pytest.approx(2 * timer.seconds(StepWork().with_chunk(0, 100)), rel=0.1)
    mixed = worker.timer("mixed").seconds(StepWork(4, 400))
    assert mixed == pytest.approx(timer.seconds(StepWork(4, 400)), rel=0.1)


def test_a_fit_is_not_drawn_to_fast_steps() -> None:
    """Steps of a hundredth that take 0.5 or 1.5 times as long: their mean is found."""
    rng = np.random.default_rng(1)
    steps = np.column_stack([rng.integers(1, 64, 4000), rng.integers(1, 9000, 4000), np.zeros((4000, 3))]).astype(float)
    steps[:, 4] = (0.01 + 1e-4 * steps[:, 0]) * rng.choice([0.5, 1.5], 4000)
    weights = fit_weights(steps)
    timer = FittedTimer(weights)
    assert timer.seconds(StepWork(32, 4500)) == pytest.approx(0.0132, rel=0.03)


def test_noise_repeats_and_has_the_profiles_spread() -> None:
    noise = Noise.of({1: 0.5, 50: 0.9, 99: 3.0}, seed=1)
    assert noise is not None and Noise.of({}, seed=1) is None
    drawn = [noise.draw(source) for source in [noise.source("a")] for _ in range(5000)]
    assert np.mean(drawn) == pytest.approx(1.0, rel=0.05)
    assert np.percentile(drawn, 99) / np.percentile(drawn, 50) == pytest.approx(3.0 / 0.9, rel=0.1)
    again, other = noise.source("a"), noise.source("b")
    assert [noise.draw(again) for _ in range(3)] == drawn[:3] != [noise.draw(other) for _ in range(3)]


METRICS = """# TYPE diptych_link_bytes counter
diptych_link_bytes_total{worker="a",source="b"} 3e9
diptych_link_bytes_total{worker="b",source="a"} 1e9
# TYPE diptych_link_read_seconds counter
diptych_link_read_seconds_total{worker="a",source="b"} 2.0
# TYPE diptych_handoff_last_segment_seconds histogram
diptych_handoff_last_segment_seconds_bucket{le="+Inf"} 4.0
diptych_handoff_last_segment_seconds_sum 0.02
diptych_handoff_last_segment_seconds_count 4.0
"""


def test_a_link_is_read_from_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(METRICS)
    assert read_link(tmp_path / "metrics") == LinkProfile(2e9, 0.005)
    (tmp_path / "metrics").write_text("diptych_link_bytes_total 5\n")
    with pytest.raises(WorkloadError, match="contains no hand-off"):
        read_link(tmp_path / "metrics")
    (tmp_path / "metrics").write_text("{{{\n")
    with pytest.raises(WorkloadError, match="format of Prometheus"):
        read_link(tmp_path / "metrics")
    with pytest.raises(WorkloadError, match="cannot read"):
        read_link(tmp_path / "none")


def test_roofline_of_a_gpu() -> None:
    """A decode of one sequence reads all weights; a long prompt is limited by compute; two ranks halve both."""
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


def test_weights_in_few_bits_are_fewer_bytes_and_rows_of_8_bits_twice_as_fast() -> None:
    spec, whole = check_model(Path(resolve_model("tiny"))), Efficiency(1.0, 1.0, 0.0)

    def timer(gpu: str, quantize: str | None, **layouts: NumberLayout) -> RooflineTimer:
        return RooflineTimer.of(spec, Parallelism(quantize=quantize, on_gpus=True), GPUS[gpu], whole, layouts)

    plain = timer("H100", None)
    for quantize, share, rate in (("int8", 0.5, 1), ("int4", 0.25, 1), ("fp8", 0.5, 1), ("w8a8", 0.5, 2)):
        of = timer("H100", quantize)
        assert share * plain.dense_bytes < of.dense_bytes < 1.25 * share * plain.dense_bytes
        assert of.token_flops == plain.token_flops / rate
    fp8 = NumberLayout(Format.FP8, 128, has_fp8_rows=True)
    assert timer("H100", None, some=fp8).token_flops == plain.token_flops / 2
    assert timer("A100", None, some=fp8).token_flops == plain.token_flops
    assert timer("H100", None, some=fp8, other=NumberLayout(Format.FP8, 128)).token_flops == plain.token_flops
