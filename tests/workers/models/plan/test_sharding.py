"""Shares of a decoder: those of all ranks together are the whole, and what cannot be shared is refused."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.linear import Linear, linear
from diptych.kernels.cpu.load import library
from diptych.workers.common.errors import ConfigError
from diptych.workers.execution.cpu.compiled import read_weights
from diptych.workers.models.checkpoint.weights import Checkpoint, LayerWeights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import AttentionSpec, MlpSpec, ModelSpec
from diptych.workers.models.plan.formats import check_shares
from diptych.workers.models.plan.sharding import Share, check_divides, spec_of, vocabulary_sizes

from ....support.checkpoints import make_checkpoint

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(library() is None, reason="the kernels are not built")


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 query heads, 4 key-value heads, a bias everywhere."""
    changes = {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    return make_checkpoint(tmp_path_factory.mktemp("biased") / "llama", "llama", 5, **changes)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 and 384 inputs of the products that ranks cut: in groups of 128 whole, of 64 and of 32 in parts."""
    changes: dict[str, Any] = {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    return make_checkpoint(tmp_path_factory.mktemp("wide") / "llama", "llama", 6, intermediate_size=384, **changes)


def without_bias(of: Linear) -> Linear:
    found = Linear.from_buffer_copy(of)
    found.bias = None
    return found


def projections(fused: Tensor, spec: ModelSpec) -> list[Tensor]:
    """Queries, keys and values of a fused weight or bias."""
    attention = attention_of(spec)
    return list(fused.split([attention.q_size, attention.kv_size, attention.kv_size]))


def attention_of(spec: ModelSpec) -> AttentionSpec:
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    return attention


def shares(path: Path, size: int, quantize: str | None = None) -> list[list[LayerWeights]]:
    with Checkpoint(path, load_spec(path)) as checkpoint:
        whole = [checkpoint.load(torch.float32, CPU, share=Share(i, size), quantize=quantize) for i in range(size)]
        return [weights.layers for weights in whole]


def assert_joined(whole: LayerWeights, parts: list[LayerWeights], spec: ModelSpec) -> None:
    """`parts`, in rank order, are `whole`; repeated key-value heads are equal."""
    size = len(parts)
    part_spec = spec_of(spec, Share(0, size))
    copies = max(size // spec.kv.num_heads, 1)
    for name in ("qkv", "qkv_bias"):
        q, k, v = projections(getattr(whole, name), spec)
        split = [projections(getattr(part, name), part_spec) for part in parts]
        assert torch.equal(q, torch.cat([p[0] for p in split]))
        for which, full in ((1, k), (2, v)):
            assert torch.equal(full, torch.cat([p[which] for p in split[::copies]]))
            assert all(torch.equal(p[which], split[i // copies * copies][which]) for i, p in enumerate(split))
    for name in ("gate_up", "gate_up_bias"):
        halves = [getattr(part, name).chunk(2) for part in parts]
        assert torch.equal(getattr(whole, name), torch.cat([h[0] for h in halves] + [h[1] for h in halves]))
    for name in ("o", "down"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts], dim=1))
        bias = f"{name}_bias"
        assert torch.equal(getattr(whole, bias), getattr(parts[0], bias))
        assert all(getattr(part, bias) is None for part in parts[1:])
    for name in ("input_norm", "mlp_norm"):
        assert all(torch.equal(getattr(whole, name), getattr(part, name)) for part in parts)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_all_shares_together_are_the_whole(biased: Path, size: int) -> None:
    spec = load_spec(biased)
    with Checkpoint(biased, spec) as checkpoint:
        whole = checkpoint.load(torch.float32, CPU).layers
    for i, parts in enumerate(zip(*shares(biased, size), strict=True)):
        assert_joined(whole[i], list(parts), spec)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_vocabulary_is_divided_as_evenly_as_may_be(biased: Path, size: int, quantize: str | None) -> None:
    """500 tokens, also over ranks that cannot share the heads."""
    spec = load_spec(biased)
    with Checkpoint(biased, spec) as checkpoint:
        whole = checkpoint.load(torch.float32, CPU, quantize=quantize)
        readers = [checkpoint.reader(torch.float32, CPU, share=Share(i, size), quantize=quantize) for i in range(size)]
        outers = [reader.outer() for reader in readers]
        embeds = [outer.tensor("embed") for outer in outers]
        assert torch.equal(whole.lm_head, torch.cat([outer.as_stored("lm_head") for outer in outers]))
        assert all(torch.equal(whole.norm, outer.tensor("norm")) for outer in outers)
    assert torch.equal(whole.embed, torch.cat(embeds))
    sizes = vocabulary_sizes(spec.vocab_size, size)
    assert sizes == [len(embed) for embed in embeds]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8", "w8a8", "mxfp4"])
def test_all_quantised_shares_together_are_the_whole_quantised(wide: Path, quantize: str, size: int) -> None:
    (whole,) = shares(wide, 1, quantize)
    for i, parts in enumerate(zip(*shares(wide, size, quantize), strict=True)):
        assert_joined(whole[i], list(parts), load_spec(wide))


@needs_kernels
@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8", "w8a8", "mxfp4"])
def test_packed_shares_are_of_the_whole_quantised(wide: Path, quantize: str) -> None:
    """A product with the identity matrix shows which weights a rank holds."""
    (whole,) = shares(wide, 1, quantize)
    kernels = library()
    assert kernels is not None
    with Checkpoint(wide, load_spec(wide)) as checkpoint:
        for rank in range(2):
            share = Share(rank, 2)
            team = Team(kernels, 1)
            packed = read_weights(team, checkpoint.reader(torch.float32, CPU, share=share, quantize=quantize)).layers
            for i, layer in enumerate(whole):
                for field in ("o", "down"):
                    weights, held = getattr(layer, field), getattr(packed[i], field)
                    part = weights[:, share.part_of(weights.shape[1])]
                    found = linear(team, torch.eye(part.shape[1]), replace(held, of=without_bias(held.of)))
                    assert torch.equal(found.T, part)
            team.close()


@pytest.mark.parametrize(
    ("quantize", "is_refused"), [("int4", True), ("mxfp4", True), ("int8", False), ("fp8", False), (None, False)]
)
def test_groups_with_one_scale_are_not_cut(biased: Path, quantize: str | None, is_refused: bool) -> None:
    spec = load_spec(biased)  # 160 inner, of which each of two ranks has 80
    check_shares(spec, quantize, 1)
    refused = pytest.raises(ConfigError, match="80 inputs of the intermediate size") if is_refused else nullcontext()
    with refused:
        check_shares(spec, quantize, 2)


def test_ranks_that_share_a_key_value_head_hold_it_whole(qwen3: Path) -> None:
    """Two KV heads over eight ranks; the norms of single heads are everybody's."""
    parts = shares(qwen3, 8)
    whole = shares(qwen3, 1)[0]
    spec = load_spec(qwen3)
    ours = spec_of(spec, Share(5, 8))
    mlp, whole_mlp = ours.layers[0].feed_forward, spec.layers[0].feed_forward
    assert (attention_of(ours).num_heads, attention_of(ours).num_kv_heads) == (1, 1)
    assert isinstance(mlp, MlpSpec) and isinstance(whole_mlp, MlpSpec)
    assert mlp.intermediate_size == whole_mlp.intermediate_size // 8
    assert torch.equal(projections(parts[5][0].qkv, ours)[1], projections(whole[0].qkv, spec)[1][spec.kv.dim :])
    norms = [part[0].q_norm for part in parts]
    assert whole[0].q_norm is not None
    assert all(norm is not None and torch.equal(norm, whole[0].q_norm) for norm in norms)


def test_progress_counts_what_the_share_reads(biased: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Checkpoint(biased, load_spec(biased)) as checkpoint:
        weights = checkpoint.load(torch.float32, CPU, lambda done, total: seen.append((done, total)), Share(0, 4))
    tensors = [weights.embed, weights.norm, weights.lm_head]
    for layer in weights.layers:
        tensors += [t for name in LayerWeights.__slots__ if (t := getattr(layer, name)) is not None]
    total = sum(t.nbytes for t in tensors)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)


def changed(spec: ModelSpec, intermediate_size: int | None = None, **heads: int) -> ModelSpec:
    """The same with other sizes in every layer."""
    mlp = spec.layers[0].feed_forward if intermediate_size is None else MlpSpec(intermediate_size)
    layer = replace(spec.layers[0], attention=replace(attention_of(spec), **heads), feed_forward=mlp)
    return replace(spec, layers=(layer,) * spec.num_layers)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "8 attention heads: use one of 1, 2, 4, 8"),
        ({}, 16, "8 attention heads"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "3 key-value heads, nor they it"),
        ({"intermediate_size": 164}, 8, "intermediate size of 164: use one of 1, 2, 4$"),
    ],
)
def test_what_cannot_be_shared_is_refused(biased: Path, changes: dict[str, int], size: int, message: str) -> None:
    spec = changed(load_spec(biased), **changes)
    with pytest.raises(ConfigError, match=message):
        check_divides(spec, size)


def test_no_rank_is_without_tokens(biased: Path) -> None:
    with pytest.raises(ConfigError, match="none of the model's 3 tokens"):
        check_divides(replace(load_spec(biased), vocab_size=3), 4)


@pytest.mark.parametrize(("num_kv_heads", "size"), [(4, 1), (4, 2), (4, 8), (1, 8), (8, 4)])
def test_what_can_be_shared_is_taken(biased: Path, num_kv_heads: int, size: int) -> None:
    check_divides(changed(load_spec(biased), num_kv_heads=num_kv_heads), size)
