"""Ranks that hold whole experts: together they compute what one rank does, and each reads no more than its own."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.workers.common.errors import ConfigError
from diptych.workers.device.kv_cache import KVCache
from diptych.workers.kv.layout import KVLayout
from diptych.workers.models.checkpoint.weights import Checkpoint, DecoderWeights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import MoeSpec
from diptych.workers.models.layers.decoder import Decoder
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.layers.step import Step
from diptych.workers.models.plan.expert_placement import Placement, place_experts
from diptych.workers.models.plan.kv_plan import layout_of
from diptych.workers.models.plan.rank_settings import RankSettings, told_of
from diptych.workers.models.plan.sharding import Share, check_divides, share_of_worker, spec_of
from diptych.workers.parallel.groups import Alone, Group

from ...support.checkpoints import make_checkpoint, random_prompts
from ..parallel.test_groups import as_ranks

CPU, BLOCK_SIZE, NUM_EXPERTS = torch.device("cpu"), 16, 6
HOT = [[40, 1, 1, 1, 30, 2]] * 3  # of each of the three layers that have experts


@dataclass
class Loaded:
    weights: DecoderWeights
    num_bytes: int
    logits: Tensor | None  # at rank 0


def placed(path: Path, kind: str, folder: Path, num_copies: int = 0) -> dict[int, Placement]:
    """kind: as the setting, or "loads" for those of HOT."""
    if kind == "loads":
        (folder / "loads.json").write_text(json.dumps(HOT))
        kind = str(folder / "loads.json")
    return place_experts(load_spec(path), 2, kind, num_copies)


def two_prompts() -> Step:
    """Of 40 and 21 tokens."""
    first, second = random_prompts(8, [40, 21])
    lens, tables = np.array([40, 21], dtype=np.int32), np.array([[5, 9, 2], [7, 1, 0]], dtype=np.int32)
    return Step(lens, lens, tables, np.array(first + second, dtype=np.int32), np.array([39, 60], dtype=np.int32))


def compute(path: Path, group: Group, experts: dict[int, Placement] | None, memory_fd: int | None = None) -> Loaded:
    spec, share = load_spec(path), Share(group.rank, group.size, experts)
    layout = layout_of(spec, "float32", BLOCK_SIZE, tensor_parallel=group.size)
    cache = KVCache(layout, 16, CPU, rank=group.rank, shared=memory_fd)
    read: list[int] = []
    with Checkpoint(path, spec) as checkpoint:
        weights = checkpoint.load(torch.float32, CPU, lambda done, _: read.append(done), share)
    decoder = Decoder(spec_of(spec, share), weights, group, experts)
    logits = decoder.compute(two_prompts(), cache, rope_tables(spec, 512, CPU))
    assert (logits is None) == (group.rank > 0)
    return Loaded(weights, read[-1], logits)


@pytest.mark.parametrize(
    ("arch", "kind", "num_copies"),
    [
        ("mixtral", "contiguous", 0),
        ("qwen3moe", "round_robin", 0),
        ("mixtral", "loads", 2),
        ("qwen3moe", "loads", 0),
        ("gemma4-moe", "loads", 2),
    ],
)
def test_ranks_with_experts_of_their_own(arch: str, kind: str, num_copies: int, tmp_path: Path) -> None:
    """Of an inner size that two ranks cannot share."""
    sizes: dict[str, Any] = {"intermediate_size" if arch == "mixtral" else "moe_intermediate_size": 33}
    path = make_checkpoint(tmp_path / arch, arch, 4, num_key_value_heads=2, **sizes)
    experts = placed(path, kind, tmp_path, num_copies)
    whole = compute(path, Alone(), None)
    memory_fd = os.memfd_create("test-kv")
    try:
        found = as_ranks(2, tmp_path / "rendezvous", lambda group: compute(path, group, experts, memory_fd))
    finally:
        os.close(memory_fd)
    ranks = [each for each in found if isinstance(each, Loaded)]
    assert ranks[0].logits is not None
    torch.testing.assert_close(ranks[0].logits, whole.logits, rtol=1e-4, atol=1e-4)
    for layer, placement in experts.items():
        every = whole.weights.layers[layer].experts_down
        assert every is not None and len(every) == NUM_EXPERTS
        for rank, held in enumerate(placement.held):
            own = ranks[rank].weights.layers[layer].experts_down
            assert own is not None and torch.equal(own, every[list(held)])
    assert sum(len(held) for held in experts[0].held) == NUM_EXPERTS + num_copies
    if not num_copies:
        assert max(rank.num_bytes for rank in ranks) < 0.6 * whole.num_bytes


@pytest.mark.parametrize(("arch", "idle"), [("qwen3moe", None), ("qwen3moe", 0), ("gemma4-moe", 1)])
def test_workers_with_tokens_of_their_own(arch: str, idle: int | None, tmp_path: Path) -> None:
    """Each the same two prompts, as one that has all experts; or one of them none."""
    path = make_checkpoint(tmp_path / arch, arch, 4)
    spec, whole = load_spec(path), compute(path, Alone(), None)

    def work(group: Group) -> Tensor | None:
        share = share_of_worker(spec, group.rank, group.size, "round_robin")
        with Checkpoint(path, spec) as checkpoint:
            weights = checkpoint.load(torch.float32, CPU, share=share)
        assert share.experts is not None
        first = min(share.experts)
        held, every = weights.layers[first].experts_down, whole.weights.layers[first].experts_down
        assert held is not None and every is not None and torch.equal(held, every[group.rank :: 2])
        decoder = Decoder(spec_of(spec, share), weights, None, share.experts, group)
        if group.rank == idle:
            decoder.serve()
            return None
        cache = KVCache(layout_of(spec, "float32", BLOCK_SIZE), 16, CPU)
        logits = decoder.compute(two_prompts(), cache, rope_tables(spec, 512, CPU))
        mixture = spec.layers[first].feed_forward
        assert decoder.expert_tokens is not None and isinstance(mixture, MoeSpec)
        assert decoder.expert_tokens[first].sum() == 61 * mixture.routing.top_k  # of our own tokens, not of theirs
        return logits

    for rank, logits in enumerate(as_ranks(2, tmp_path / "rendezvous", work)):
        assert (logits is None) == (rank == idle)
        if isinstance(logits, Tensor):
            assert whole.logits is not None
            torch.testing.assert_close(logits, whole.logits, rtol=1e-4, atol=1e-4)


def test_ranks_are_told_of_the_placement(tmp_path: Path, family_path: Path) -> None:
    experts = placed(family_path, "loads", tmp_path, 2)
    layout = KVLayout("float32", 16, 2, 4, 8, "m", tensor_parallel=2, layer_shapes=((4, 8), (2, 8)))
    settings = RankSettings("", layout, "float32", 64, 1, size=2, experts=told_of(Share(0, 2, experts)), rank=1)
    told = RankSettings.from_json(settings.to_json())
    assert (told.share, told.layout) == (Share(1, 2, experts), layout)


@pytest.fixture
def family_path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "qwen3moe", "qwen3moe", 4)


def test_layers_without_experts_have_no_placement(family_path: Path, tmp_path: Path) -> None:
    assert list(placed(family_path, "contiguous", tmp_path)) == [0, 1, 3]


def test_what_ranks_cannot_share_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expert_parallel=2 needs a model with experts"):
        place_experts(load_spec(llama), 2)
    with pytest.raises(ConfigError, match="data_parallel=2 needs a model with experts"):
        share_of_worker(load_spec(llama), 1, 2, "contiguous")
    path = make_checkpoint(tmp_path / "mixtral", "mixtral", 4, intermediate_size=33)
    check_divides(load_spec(path), 2, whole_experts=True)
    with pytest.raises(ConfigError, match="intermediate size of 33"):
        check_divides(load_spec(path), 2)
    with pytest.raises(ConfigError, match="use 1 to 6"):
        place_experts(load_spec(path), 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not valid JSON"),
        ("{}", "a list of 3 lists"),
        (json.dumps(HOT[:2]), "a list of 3 lists"),
        (json.dumps([*HOT[:2], [1, 2]]), "a list of 3 lists"),
        (json.dumps([*HOT[:2], "123456"]), "a list of 3 lists"),
        (json.dumps([*HOT[:2], [1, 2, 3, 4, 5, True]]), "only numbers"),
        (json.dumps([*HOT[:2], [1, 2, 3, 4, 5, -1]]), "at least 0"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_file_of_loads_is_checked(text: str | None, message: str, family_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        place_experts(load_spec(family_path), 2, str(path))


def test_copies_need_loads(family_path: Path) -> None:
    with pytest.raises(ConfigError, match="expert_copies=1 needs measured loads"):
        place_experts(load_spec(family_path), 2, "contiguous", 1)
