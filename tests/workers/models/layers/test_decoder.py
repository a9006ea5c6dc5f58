"""The decoder's logits at every prompt position equal transformers', for every family, on one and two ranks."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.workers.device.kv_cache import KVCache
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.layers import layer as layer_module
from diptych.workers.models.layers.decoder import Decoder
from diptych.workers.models.layers.layer import Layer
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.layers.step import Step
from diptych.workers.models.plan.kv_plan import layout_of
from diptych.workers.models.plan.sharding import Share, spec_of
from diptych.workers.parallel.groups import Alone, Group

from ....support.checkpoints import ARCHITECTURES, random_prompts, reference_model
from ...conftest import CheckpointOf
from ...parallel.test_groups import as_ranks

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def prompt_logits(
    path: Path,
    prompt: list[int],
    block_table: list[int],
    group: Group | None = None,
    memory_fd: int | None = None,
    sampled: Sequence[int] | None = None,
) -> Tensor | None:
    """[R, vocab], on rank 0 alone, of the rows `sampled`, or of all: the whole prompt in one chunk, its KV in the
    blocks named."""
    group = group or Alone()
    spec, share = load_spec(path), Share(group.rank, group.size)
    own = spec_of(spec, share)
    layout = layout_of(spec, "float32", BLOCK_SIZE, tensor_parallel=group.size)
    cache = KVCache(layout, max(block_table) + 1, CPU, rank=group.rank, shared=memory_fd)
    cache.tensor.fill_(torch.nan)  # nothing may depend on what blocks held before
    with Checkpoint(path, spec) as checkpoint, torch.inference_mode():
        decoder = Decoder(own, checkpoint.load(torch.float32, CPU, share=share), group)
        return decoder.compute(prompt_step(prompt, block_table, sampled), cache, rope_tables(spec, len(prompt), CPU))


def prompt_step(prompt: list[int], block_table: list[int], sampled: Sequence[int] | None) -> Step:
    lens, rows = [len(prompt)], range(len(prompt)) if sampled is None else sampled
    words = (np.array(of, dtype=np.int32) for of in (lens, lens, [block_table], prompt, list(rows)))
    return Step(*words)


def assert_equal(found: object, expected: Tensor) -> None:
    assert isinstance(found, Tensor)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prompt_logits_equal_transformers(arch: str, checkpoint_of: CheckpointOf) -> None:
    path = checkpoint_of(arch)
    reference = reference_model(path)
    for length in (1, 16, 17, 300):
        [prompt] = random_prompts(length, [length])
        block_table = list(range(-(-length // BLOCK_SIZE), 0, -1))
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        assert_equal(prompt_logits(path, prompt, block_table), expected)


@pytest.mark.parametrize(("arch", "num_whole"), [("gemma4", 3), ("llama", 2), ("mixtral", 2), ("deepseek-v3", 2)])
def test_what_is_sampled_is_computed_alone_once_the_last_layer_has_stored_its_kv(
    arch: str, num_whole: int, checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is sampled no more than that."""
    path, [prompt], block_table = checkpoint_of(arch), random_prompts(5, [70]), [4, 2, 0, 1, 3]
    attend, seen = layer_module.attend_in, list[int]()

    def watched(layer: Layer, q: Tensor, *rest: Any) -> Tensor:
        seen.append(len(q))
        return attend(layer, q, *rest)

    monkeypatch.setattr(layer_module, "attend_in", watched)
    every, num_layers = prompt_logits(path, prompt, block_table), len(load_spec(path).layers)
    assert seen == [70] * num_layers
    for sampled in ([30, 69], []):
        seen.clear()
        found = prompt_logits(path, prompt, block_table, sampled=sampled)
        assert seen == [70] * num_whole + [2] * (num_layers - num_whole) * (len(sampled) > 0)
        if sampled:
            assert_equal(found, every[sampled])
        else:
            assert found is None


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("arch", "sampled"),
    [*((arch, None) for arch in ARCHITECTURES), *((arch, [30, 69]) for arch in ("gemma4", "llama"))],
)
def test_ranks_together_compute_what_one_does(
    arch: str, sampled: list[int] | None, size: int, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    """4: with key-value heads that two ranks share. sampled: rows that alone are computed in the last layers."""
    path, [prompt] = checkpoint_of(arch), random_prompts(5, [70])
    block_table = [4, 2, 0, 1, 3]
    expected = prompt_logits(path, prompt, block_table)
    expected = expected if sampled is None else expected[sampled]
    memory_fd = os.memfd_create("test-kv")
    try:
        found = as_ranks(
            size,
            tmp_path / "rendezvous",
            lambda group: prompt_logits(path, prompt, block_table, group, memory_fd, sampled),
        )[0]
    finally:
        os.close(memory_fd)
    assert_equal(found, expected)
