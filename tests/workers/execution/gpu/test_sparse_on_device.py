"""Sparse attention on the CUDA engine, on a fake device: tokens of an engine on CPU, in graphs and without."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.workers.common.request import Request
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.device.device import Device
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.gpu.buckets import token_buckets
from diptych.workers.execution.model_runner import ModelRunner

from ....support.checkpoints import make_checkpoint, random_prompts
from ....support.drafters import KnowingDrafter, of_outputs
from ....support.engines import assert_clean, run, tokens
from ....support.gpu import serving
from ....support.gpu.serving import GREEDY, early, generate, late, load, steps_of

ROOT = Path(__file__).parents[4]
LENGTHS = (5, 60, 63, 64, 65, 150)
BUDGET = 64  # four blocks: one of them by its score
SAMPLING = replace(GREEDY, max_tokens=24)
SPARSE: dict[str, Any] = {"sparse_attention": "quest", "sparse_budget_tokens": BUDGET}
ARRIVALS = [0, 1, 2, 9, 9, 12]


def make(folder: Path) -> Path:
    """Three of its five layers are sparse, so KV of sparse decodes differs from that of full attention."""
    return make_checkpoint(folder / "llama", "llama", seed=5, num_hidden_layers=5)


def on(path: Path, device: Device | None, **changes: Any) -> ModelRunner:
    return load(path, device, **(SPARSE | changes))


def answers(runner: ModelRunner, **config: Any) -> list[list[int]]:
    prompts = random_prompts(3, LENGTHS)
    return generate(runner, prompts, [SAMPLING] * len(prompts), **config).token_ids


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="module")
def expected(deep: Path) -> list[list[int]]:
    sparse, full = answers(on(deep, None)), answers(load(deep, None))
    assert sum(a != b for a, b in zip(sparse, full, strict=True)) > 2
    return sparse


@pytest.mark.parametrize("make_device", [late, early])
def test_tokens(deep: Path, expected: list[list[int]], make_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes in graphs, beside small prompts on their lane, and in graphs beside large ones."""
    runner = on(deep, make_device())
    assert answers(runner) == expected
    assert answers(runner, arrivals=ARRIVALS, chunk_tokens=16) == expected
    monkeypatch.setattr(steps_of(runner)._own.prompts, "_buckets", token_buckets(8))
    assert answers(runner, arrivals=ARRIVALS, chunk_tokens=40) == expected


def test_sinks_and_experts(tmp_path: Path) -> None:
    """Of gpt-oss, whose layers with a window stay as they are."""
    kinds = ["sliding_attention", "full_attention"] * 3
    path = make_checkpoint(tmp_path / "gptoss", "gptoss", seed=5, num_hidden_layers=6, layer_types=kinds)
    sparse = answers(on(path, None))
    assert sparse != answers(load(path, None))
    assert answers(on(path, early())) == sparse


def test_without_graphs(deep: Path, expected: list[list[int]]) -> None:
    device = late()
    runner = on(deep, device, cuda_graphs=False)
    assert answers(runner, arrivals=ARRIVALS, chunk_tokens=40) == expected
    assert device.num_captured == 0


def test_blocks_whose_bounds_stand_are_not_read_again(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the two newest, at the first sparse step of a sequence; in no later one. After a prompt also at the
    second: before a step is recorded, the blocks that it fills may still be replaced by equal ones."""
    runner, launched = on(deep, early()), list[int]()
    part = steps_of(runner)._own._bounds
    launch = part.launch
    monkeypatch.setattr(part, "launch", lambda lane, blocks: (launched.append(len(blocks)), launch(lane, blocks)))
    generate(runner, random_prompts(3, [150, 60]), [replace(SAMPLING, max_tokens=60)] * 2)
    assert launched == [8, 8, 3]  # of contexts of 151, 152 and 65 tokens


def test_bounds_are_right_after_each_step(deep: Path) -> None:
    """Of steps under way, too: the device computes at once."""
    runner = on(deep, early())
    engine = Engine(runner, SchedulerConfig(chunk_tokens=40))
    for i, prompt in enumerate(random_prompts(3, LENGTHS)):
        engine.submit(f"0/{i}", Request(f"0/{i}", tuple(prompt), SAMPLING, 600.0), [])
    cache, num_compared = runner._cache, 0
    while engine.scheduler.has_work or engine.steps:
        engine.step()
        for sequence in engine.scheduler.sequences():
            known = steps_of(runner)._bounded._known.get(sequence)
            if known is not None and known.table is sequence.block_table:
                blocks = torch.tensor(known.table[: -(-known.context_len // 16)])
                for layer, bounds in cache.bounds.layers.items():
                    keys = cache.layer(layer)[blocks][:, 0].flatten(0, 1)[: known.context_len].split(16)
                    of = torch.stack([torch.stack((each.amin(0), each.amax(0)), dim=1) for each in keys])
                    assert torch.equal(bounds[blocks][..., : of.shape[-1]], of)
                    num_compared += len(blocks)
    assert num_compared > 100
    assert_clean(engine)


def test_requests_choose_for_themselves(deep: Path, expected: list[list[int]]) -> None:
    full, prompts = answers(load(deep, None)), random_prompts(3, LENGTHS)
    engine = Engine(on(deep, late(), sparse_by_default=False), SchedulerConfig())
    for i, prompt in enumerate(prompts):
        asked = True if i % 2 else None
        engine.submit(f"0/{i}", Request(f"0/{i}", tuple(prompt), SAMPLING, 600.0, sparse_attention=asked), [])
    outputs = run(engine)
    for i in range(len(prompts)):
        assert [e.token_id for e in tokens(outputs, f"0/{i}")] == (expected if i % 2 else full)[i]


def test_drafts_beside_sparse_rows(deep: Path, expected: list[list[int]]) -> None:
    """Graphs in which rows of some sequences attend together, and rows of others are sparse."""
    runner, launched = on(deep, early(), speculation="ngram", max_draft_tokens=3), set[tuple[int, bool]]()
    graphs = steps_of(runner)._own.graphs
    forward = graphs.forward

    def spied(bucket: int, max_queries: int, is_sparse: bool) -> None:
        launched.add((max_queries, is_sparse))
        forward(bucket, max_queries, is_sparse)

    graphs.forward = spied
    drafter = KnowingDrafter(0.7, 3, of_outputs({f"0/{i}": of for i, of in enumerate(expected)}))
    engine = Engine(runner, SchedulerConfig(), drafter=drafter)
    for i, prompt in enumerate(random_prompts(3, LENGTHS)):
        engine.submit(f"0/{i}", Request(f"0/{i}", tuple(prompt), SAMPLING, 600.0), [])
    outputs = run(engine)
    assert [[e.token_id for e in tokens(outputs, f"0/{i}")] for i in range(len(LENGTHS))] == expected
    assert {queries > 1 for queries, is_sparse in launched if is_sparse} == {True, False}
    assert drafter.counts["accepted"] > 10


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("has_graphs", [False, pytest.param(True, marks=pytest.mark.long)])
def test_tokens_by_interpreted_kernels(tmp_path: Path, has_graphs: bool) -> None:
    small = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 100}
    path = make_checkpoint(tmp_path / "small", "llama", seed=5, **small)
    module = "tests.workers.execution.gpu.test_sparse_on_device"
    code = f"import triton; from {module} import interpreted; interpreted({str(path)!r}, {has_graphs})"
    env = os.environ | {"TRITON_INTERPRET": "1", "DIPTYCH_TRITON": "interpret", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def interpreted(path: str, has_graphs: bool) -> None:
    """Compare the tokens of a fake device whose kernels are interpreted with those of plain torch."""
    prompts, sampling = random_prompts(6, [90], 100), replace(GREEDY, max_tokens=4)
    sizes = {"max_running": 1, "max_context_tokens": 112}
    serving.GRAPH_TOKENS = 8
    sparse = generate(on(Path(path), None, **sizes), prompts, [sampling]).token_ids
    assert sparse != generate(load(Path(path), None, **sizes), prompts, [sampling]).token_ids
    device = early()
    runner = on(Path(path), device, cuda_graphs=has_graphs, **sizes)
    assert generate(runner, prompts, [sampling]).token_ids == sparse
    assert (device.num_replayed > 0) is has_graphs
