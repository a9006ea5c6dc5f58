"""Checkpoints for Marlin-24, written tile by tile as compressed-tensors' compressor did: what is loaded is what their
numbers mean, whole and by shares."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.sharding import WHOLE, share_of_first
from diptych.workers.models.quant.marlin24 import meta_places

from ....support.checkpoints import make_checkpoint
from ..quant.test_checks import edit
from ..quant.test_formats import load, tensors_of
from ..quant.writers import Writer, Written, drawn, quantised, scales_of

PAIRS = torch.tensor(list(combinations(range(4), 2)))
Q = "model.layers.0.self_attn.q_proj"


def marlin24(bits: int, group: int) -> tuple[Writer, dict[str, Any]]:
    """group: 0: all inputs."""

    def write(weight: Tensor, i: int) -> Written:
        n, k = weight.shape
        size = group or k
        numbers, scales = drawn(i, (n, k // 2), bits), scales_of(i, (n, k // size))
        places = PAIRS[drawn(500 + i, (n, k // 4), 16) % len(PAIRS)]
        dense = torch.zeros(n, k // 4, 4)
        dense.scatter_(2, places, numbers.float().unflatten(1, (-1, 2)) - (1 << (bits - 1)))
        meant = dense.flatten(1) * scales.float().repeat_interleave(size, 1)
        return {
            "weight_packed": packed_tiles(numbers.T, bits),
            "scale_packed": permuted_scales(scales.T) if size < k // 2 else scales.T,
            "meta": metadata(places),
        }, meant

    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    weights |= {"group_size": group or None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    sparsity = {"format": "dense", "sparsity_structure": "2:4"}
    section = {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": groups}
    return write, section | {"ignore": ["lm_head"], "sparsity_config": sparsity}


def packed_tiles(numbers: Tensor, bits: int) -> Tensor:
    """numbers: [k / 2, n]. Each thread's numbers of four tiles in turn, as `get_permutations_24` lists them."""
    places: list[int] = []
    for thread in range(32):
        column = thread // 4
        rows = [2 * (thread % 4), 2 * (thread % 4) + 1, 2 * (thread % 4 + 4), 2 * (thread % 4 + 4) + 1]
        own = [16 * row + column // 2 * 256 + 8 * (column % 2) + 4 * block for block in (0, 1) for row in rows]
        places += [place + j for j in range(4) for place in own]
    turn = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    order = torch.tensor(places).reshape(-1, len(turn))[:, turn].reshape(-1)
    inputs, outputs = numbers.shape
    tiles = numbers.reshape(inputs // 16, 16, outputs // 16, 16).transpose(1, 2).reshape(-1, 1024)[:, order]
    per_word = 32 // bits
    words = (tiles.reshape(inputs // 16, -1, per_word) << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def permuted_scales(scales: Tensor) -> Tensor:
    order = [8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]
    return scales.reshape(-1, 64)[:, order].reshape(scales.shape)


def metadata(places: Tensor) -> Tensor:
    """places: [n, k / 4, 2]."""
    n = len(places)
    quads = (places[..., 0] | places[..., 1] << 2).unflatten(1, (-1, 4))
    words = (quads << torch.tensor([0, 4, 8, 12])).sum(-1)
    found = torch.zeros(words.numel(), dtype=torch.int64)
    found[meta_places(n, words.shape[1], 0, n).flatten()] = words.flatten()
    return torch.where(found >= 1 << 15, found - (1 << 16), found).to(torch.int16).view(-1, 2 * n)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 512, "intermediate_size": 128, "num_key_value_heads": 4, "num_hidden_layers": 1}
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1, **sizes)


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 0), (8, 128)])
def test_what_is_loaded_is_what_the_numbers_mean(bits: int, group: int, source: Path, tmp_path: Path) -> None:
    packed, plain = quantised(source, tmp_path, *marlin24(bits, group))
    for share in (WHOLE, *(replace(share_of_first(load_spec(plain), 2), rank=rank) for rank in range(2))):
        found, expected = (tensors_of(load(path, torch.float32, share)) for path in (packed, plain))
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=2e-7, atol=0)


def test_places_of_metadata_are_cutlass_s() -> None:
    """Some that compressed-tensors 0.10.2 gives (utils/semi_structured_conversions.py), of the first rows."""
    places = meta_places(64, 4, 0, 64)
    assert sorted(places.flatten().tolist()) == list(range(256))
    assert places[:5, 0].tolist() == CUTLASS_PLACES[0]
    assert places[:5, 1].tolist() == CUTLASS_PLACES[1]


CUTLASS_PLACES = ([0, 4, 64, 68, 1], [2, 6, 66, 70, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.meta"), rf"tensor {Q}.meta of shape \[16, 256\]"),
        (lambda t: t.update({f"{Q}.meta": t[f"{Q}.meta"] * 0}), rf"{Q}.meta must name two of each four"),
        (lambda t: t.update({f"{Q}.scale_packed": torch.ones(3, 128).half()}), rf"{Q}.scale_packed must have shape"),
        (lambda t: t[f"{Q}.scale_packed"].fill_(torch.inf), rf"{Q}.scale_packed has a scale that is no finite"),
    ],
)
def test_tensors_that_contradict_the_config(
    change: Callable[[dict[str, Tensor]], object], message: str, source: Path, tmp_path: Path
) -> None:
    packed, _ = quantised(source, tmp_path, *marlin24(4, 128))
    edit(packed, change)
    with pytest.raises(CheckpointError, match=message):
        load(packed, torch.float32)


def test_sizes_that_fill_no_tiles_are_named(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", 1, num_hidden_layers=1, num_key_value_heads=4)
    packed, _ = quantised(source, tmp_path, *marlin24(4, 0), of=("q_proj.weight",))
    edit(packed, lambda t: t.update({f"{Q.replace('self_attn.q', 'mlp.gate')}.weight_packed": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"gate_proj.weight must be symmetric, .* multiple of 64 outputs"):
        load(packed, torch.float32)
