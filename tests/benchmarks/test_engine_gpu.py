"""benchmarks/gpu/engine_gpu.py without a GPU: its parts run on a fake device and make no claims about a GPU."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.roofline import Roofline
from benchmarks.gpu.gpu_engine import drafts, limits, loading, measure, models, rig, timed
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.models.plan.tensor_names import expected_tensors

ROOT = Path(__file__).parents[2]
# What engine_gpu.py may import beyond torch, triton, numpy, safetensors and protobuf: nothing. Of what we depend on:
OTHERS = (
    *("blake3", "grpc", "grpc_health", "grpc_reflection", "httptools", "jinja2", "nixl", "prometheus_client", "psutil"),
    *("ray", "rich", "starlette", "tokenizers", "transformers", "typer", "uvicorn", "uvloop", "yaml"),
)

TINY_RUN = """
import json, sys
from dataclasses import replace
sys.modules.update(dict.fromkeys(OTHERS))
sys.path.insert(0, ROOT)
import torch
torch.set_num_threads(1)
import benchmarks.gpu.engine_gpu
from benchmarks.gpu.gpu_engine import measure
from benchmarks.gpu.gpu_engine.models import llama3
from benchmarks.gpu.gpu_engine.rig import Settings, make_rig
from benchmarks.gpu.gpu_engine.timed import HostClock, TimedDevice
from benchmarks.common.roofline import Roofline
from diptych.workers.device.fake_device import FakeDevice

spec = replace(llama3(64, 96, 2, 16, factor=32.0, is_tied=True, num_heads=4, num_kv_heads=2), vocab_size=300)
limits = Roofline(0, 1e9, 0.0, 1e12)
runs = []
for graphs, kv_dtype in ((True, "auto"), (False, "auto"), (False, "int8")):
    settings = Settings(
        max_context_tokens=128, max_batch_tokens=64, max_running=4, kv_memory_bytes=1 << 20, dtype="float32",
        cuda_graphs=graphs, kv_dtype=kv_dtype,
    )
    fake = FakeDevice()
    rig = make_rig(spec, settings, TimedDevice(fake, HostClock()))
    found = [
        *measure.decode(rig, measure.DecodeCase(3, 40, num_steps=4), limits),
        *measure.decode(rig, measure.DecodeCase(5, 40), limits),  # more than may run
        *measure.decode(rig, measure.DecodeCase(1, 120), limits),  # longer than a context
        *measure.prompts(rig, measure.PromptCase(2, 50, repeat=2), limits),
        *measure.serve(rig, measure.ServingCase(6, 20, 10), limits),
        *measure.memory(rig),
    ]
    state = rig.engine.check_integrity()
    rig.runner.close()
    runs.append({
        "figures": [figure.as_json() for figure in found],
        "held": state.num_unaccounted_blocks + state.load.num_blocks - state.load.num_free_blocks,
        "replayed": fake.num_replayed,
        "num_weights": rig.num_weight_bytes // 4,
    })
modules = sorted({name.partition(".")[0] for name, module in sys.modules.items() if module is not None})
print(json.dumps({"runs": runs, "modules": modules}))
"""


def test_without_a_gpu_it_says_so_and_measures_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.engine_gpu"],
        cwd=ROOT,
        env={"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.strip() == "This measures the engine on a GPU, and torch sees none here."


def test_runner_and_engine_compute_every_case_with_few_packages() -> None:
    names = f"OTHERS = {OTHERS!r}\nROOT = {str(ROOT)!r}\n"
    done = subprocess.run([sys.executable, "-c", names + TINY_RUN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not set(OTHERS) & set(found["modules"])
    for run, has_graphs in zip(found["runs"], (True, False, False), strict=True):
        check_figures(run["figures"])
        assert run["held"] == 0 and run["num_weights"] == NUM_READ + (2 * 2 + 1) * 64
        assert (run["replayed"] > 0) == has_graphs


NUM_READ = 2 * 64 * (16 * 12 + 3 * 96) + 300 * 64  # weights in a step: two layers' matrices, and the head


def test_drafts_that_are_right_at_a_set_rate_yield_more_than_a_token_a_step() -> None:
    """Without a right one a step yields one token: the speculator drafts little, and what it drafts is rejected."""
    settings = rig.Settings(
        max_context_tokens=160, max_batch_tokens=64, max_running=4, kv_memory_bytes=1 << 20, dtype="float32",
        max_draft_tokens=4,
    )  # fmt: skip
    made = rig.make_rig(models.TINY, settings, timed.TimedDevice(FakeDevice(), timed.HostClock()))
    found = [
        {figure.unit.partition(",")[0]: figure.value for figure in drafts.speculation(made, case)}
        for case in (drafts.DraftCase(2, 8, acceptance, num_steps=8, num_turns=1) for acceptance in (1.0, 0.0))
    ]
    right, wrong = (figures["tokens of a sequence in a step"] for figures in found)
    assert 1.5 < right <= 5 and wrong == 1
    for figures in found:
        assert figures["times as fast as without"] == pytest.approx(figures["tokens/s"] / figures["tokens/s without"])
    state = made.engine.check_integrity()
    made.runner.close()
    assert state.num_unaccounted_blocks == 0


def test_sequences_come_with_whole_blocks_where_kv_has_a_tail() -> None:
    spec = replace(models.llama3(64, 96, 2, 32, factor=32.0, is_tied=True, num_heads=2, num_kv_heads=1), vocab_size=300)
    settings = rig.Settings(
        max_context_tokens=160, max_batch_tokens=64, max_running=4, kv_memory_bytes=1 << 20, dtype="float32",
        kv_dtype="kivi", block_size=32,
    )  # fmt: skip
    made = rig.make_rig(spec, settings, timed.TimedDevice(FakeDevice(), timed.HostClock()))
    found = list(measure.decode(made, measure.DecodeCase(3, 64, num_steps=4), Roofline(0, 1e9, 0.0, 1e12)))
    assert all(math.isfinite(figure.value) for figure in found) and bool(made.logits.isfinite().all())
    made.runner.close()


def check_figures(figures: list[dict[str, Any]]) -> None:
    named = [(f["what"], f["case"], f["unit"]) for f in figures]
    assert named == [
        ("decode step", "batch 3, context 40", "ms"),
        ("decode", "batch 3, context 40", "tokens/s"),
        ("host gap a step", "batch 3, context 40", "µs"),
        ("prefill", "2 prompts of 50", "tokens/s"),
        ("prefill", "2 prompts of 50", "TFLOP/s"),
        ("serving", "6 requests, 20 in, 10 out", "output tokens/s"),
        ("serving", "6 requests, 20 in, 10 out", "tokens/s, prompts too"),
        ("serving", "6 requests, 20 in, 10 out", named[7][2]),
        ("serving", "6 requests, 20 in, 10 out", "preemptions"),
        ("memory", "weights", "GiB"),
        ("memory", "KV cache", "GiB"),
    ]
    assert all(math.isfinite(f["value"]) and f["value"] >= 0 for f in figures)
    step, rate, gap = figures[:3]
    assert rate["value"] == pytest.approx(3e3 / step["value"])
    assert step["share"] == pytest.approx(4 * NUM_READ / 1e9 / (step["value"] / 1e3))
    assert 0 <= gap["share"] < 1


def test_loading_comes_by_way_of_the_buffers() -> None:
    figures = list(loading.loading(FakeDevice(), 1e9, loading.WRITTEN_BYTES))
    assert [f.case for f in figures] == ["bfloat16 to bfloat16", "float32 to bfloat16"]
    assert all(f.share == pytest.approx(f.value) and f.value > 0 for f in figures)


def test_the_shapes_are_those_of_known_models() -> None:
    shapes = models.SHAPES
    for name, num_weights in (("1b", 1_235_814_400), ("8b", 8_030_261_248), ("v2-lite", 15_706_484_224)):
        spec = shapes[name]
        assert sum(math.prod(shape) for shape in expected_tensors(spec).values()) == num_weights


def test_random_weights_follow_the_seed_and_keep_sizes() -> None:
    spec = replace(models.llama3(64, 96, 2, 128, factor=8.0, is_tied=False), vocab_size=99)
    one, same, other = (models.random_weights(spec, torch.bfloat16, torch.device("cpu"), seed) for seed in (1, 1, 2))
    assert torch.equal(one.layers[1].qkv, same.layers[1].qkv) and not torch.equal(one.embed, other.embed)
    assert not torch.equal(one.layers[0].qkv, one.layers[1].qkv)
    assert one.layers[0].gate_up.shape == (192, 64) and one.layers[0].qkv.shape == (48 * 128, 64)
    assert one.lm_head is not one.embed
    assert 0.9 < one.layers[0].down.float().std().item() * 96**0.5 < 1.1
    assert models.num_bytes(one) == 2 * sum(math.prod(shape) for shape in expected_tensors(spec).values())


def test_random_experts_lie_side_by_side() -> None:
    spec = models.SHAPES["v2-lite"]
    of = spec.layers[1].feed_forward
    small = replace(of, num_experts=4, expert=replace(of.expert, intermediate_size=24))
    spec = replace(spec, vocab_size=99, hidden_size=64, layers=(replace(spec.layers[1], feed_forward=small),))
    layer = models.random_weights(spec, torch.bfloat16, torch.device("cpu")).layers[0]
    assert layer.experts_gate_up.shape == (4, 48, 64) and layer.experts_down.shape == (4, 64, 24)
    assert layer.router.dtype == torch.float32 and layer.kv_b.shape == (16 * 256, 512)


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], 0.0),
        ([(0.0, 2.0)], 0.0),
        ([(0.0, 2.0), (2.0, 3.0)], 0.0),
        ([(0.0, 2.0), (2.5, 3.0), (4.0, 5.0)], 1.5),
        ([(0.0, 10.0), (1.0, 2.0), (3.0, 4.0), (11.0, 12.0)], 1.0),  # lanes that work at the same time
    ],
)
def test_idle_is_what_no_lane_works_in(spans: list[tuple[float, float]], idle: float) -> None:
    assert timed.idle_s(spans) == pytest.approx(idle)


class Counting:
    """A clock that ticks once whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0

    def stamp(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, start: int, end: int) -> float:
        return float(end - start)


@pytest.fixture(params=[True, False])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeDevice]:
    yield FakeDevice(is_late=request.param)


def test_notes_are_of_work_and_only_while_they_are_taken(fake: FakeDevice) -> None:
    clock = Counting()
    device = timed.TimedDevice(fake, clock)
    lane, done = device.lane("main"), list[str]()
    lane.run(lambda: done.append("before"))
    spans = device.take(lambda: [lane.run(lambda: done.append("in")), lane.run(clock.stamp)])
    lane.run(lambda: done.append("after"))
    device.synchronize()
    assert done == ["before", "in", "after"]
    assert spans == [(0.0, 1.0), (2.0, 4.0)]  # the second work looked at the clock itself


def test_a_graph_of_a_timed_lane_replays(fake: FakeDevice) -> None:
    device = timed.TimedDevice(fake, Counting())
    lane, numbers = device.lane("main"), torch.zeros(3)
    replay = device.capture(lane, lambda: numbers.add_(1))
    numbers.zero_()
    spans = device.take(lambda: [lane.run(replay) for _ in range(2)])
    assert numbers.tolist() == [2, 2, 2] and len(spans) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_every_part_runs_on_a_gpu(graphs: bool) -> None:
    from diptych.workers.device.cuda_device import CudaDevice

    reached = limits.roofline()
    device = timed.TimedDevice(CudaDevice(torch.device("cuda")), timed.CudaClock())
    settings = rig.Settings(max_context_tokens=4096, max_running=16, kv_memory_bytes=1 << 30, cuda_graphs=graphs)
    made = rig.make_rig(replace(models.SHAPES["1b"], layers=models.SHAPES["1b"].layers[:2]), settings, device)
    figures = [
        *measure.decode(made, measure.DecodeCase(16, 1024, num_steps=8), reached),
        *measure.prompts(made, measure.PromptCase(2, 512, repeat=2), reached),
        *measure.serve(made, measure.ServingCase(20, 64, 32), reached),
        *measure.memory(made),
        *loading.loading(device, limits.link_bytes_s(device), 1 << 28),
    ]
    made.runner.close()
    assert len(figures) == 14 and all(math.isfinite(f.value) and f.value >= 0 for f in figures)
    assert all(f.share is None or f.share >= 0 for f in figures)
