"""Heads whose weights are quantised are what their numbers mean, alone and beside a target that is quantised too."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.head_specs.head_bytes import head_weight_bytes
from diptych.workers.models.heads.draft_head import SharedWeights
from diptych.workers.models.heads.loading import load_head

from ....support.heads import SPECFORGE, SPECULATORS, eagle3_config, make_eagle3, make_mtp
from ....support.paged_head import CPU
from ...conftest import CheckpointOf
from ..quant.test_formats import tensors_of
from ..quant.writers import compressed_tensors, edit_config, fp8_blocks, fp8_tensor, gptq, quantised

PACKED = compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False)
MATRICES = ("_proj.weight", "fc.weight", "lm_head.weight")


def weights_of(head: Any) -> dict[str, Tensor]:
    """All tensors of a head, by name."""

    def walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, Tensor):
            yield name, value
        elif is_dataclass(value):
            for field in fields(value):
                yield from walk(getattr(value, field.name), f"{name}.{field.name}")
        elif isinstance(value, list | tuple):
            for i, each in enumerate(value):
                yield from walk(each, f"{name}.{i}")

    return dict(walk(head.weights, ""))


def assert_alike(packed: Path, plain: Path, target: Path) -> None:
    spec = load_spec(target)
    shape = (spec.vocab_size, spec.hidden_size)
    shared = SharedWeights(torch.ones(shape), torch.zeros(shape))
    found, expected = (weights_of(load_head(of, spec, shared, torch.float32, CPU)) for of in (packed, plain))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=2e-7, atol=0)
    assert head_weight_bytes(packed, spec, "bfloat16") == head_weight_bytes(plain, spec, "bfloat16")


@pytest.mark.parametrize(
    ("form", "format", "of"),
    [
        (SPECFORGE, fp8_tensor(), MATRICES),
        (SPECFORGE, gptq(4, 16), MATRICES),
        (SPECULATORS, PACKED, ("_proj.weight", "fc.weight")),
    ],
    ids=["fp8", "gptq", "packed"],
)
def test_eagle3_heads(
    form: str, format: tuple[Any, Any], of: tuple[str, ...], checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    source = make_eagle3(tmp_path / "source", eagle3_config(form), 3)
    packed, plain = quantised(source, tmp_path, *format, of=of)
    assert_alike(packed, plain, checkpoint_of("llama"))


@pytest.mark.parametrize(
    ("arch", "names", "format", "of"),
    [
        ("llama", "deepseek", fp8_blocks(16, 32), ("_proj.weight",)),
        ("deepseek-v3", "deepseek", fp8_blocks(16, 32), ("_proj.weight",)),
        ("llama", "deepseek", PACKED, ("_proj.weight",)),
        ("llama", "qwen3-next", gptq(4, 16), ("_proj.weight", "mtp.fc.weight")),
    ],
)
def test_modules_beside_a_target(
    arch: str, names: str, format: tuple[Any, Any], of: tuple[str, ...], checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    """The folder is the target's, too, which has no use for the module."""
    source = make_mtp(tmp_path / "source", checkpoint_of(arch), names, 4, alone=False)
    packed, plain = quantised(source, tmp_path, *format, of=of)
    assert_alike(packed, plain, packed)
    ours, theirs = (
        tensors_of(Checkpoint(folder, load_spec(folder)).load(torch.float32, CPU)) for folder in (packed, plain)
    )
    assert all(torch.allclose(ours[key], theirs[key], rtol=2e-7, atol=0) for key in theirs)


def test_groups_of_a_config_name_layers_as_the_files_do(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    source = make_mtp(tmp_path / "source", checkpoint_of("llama"), "deepseek", 4, alone=False)
    packed, plain = quantised(source, tmp_path, *PACKED)
    of_head = PACKED[1]["config_groups"]["group_0"]["weights"]
    groups = {
        "target": {"targets": [r"re:model\.layers\.[012]\..*"], "weights": of_head | {"num_bits": 8}},
        "head": {"targets": [r"re:model\.layers\.3\..*"], "weights": of_head},
    }
    edit_config(packed, quantization_config=PACKED[1] | {"config_groups": groups})
    assert_alike(packed, plain, plain)


def test_what_contradicts_a_config_is_named(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    source = make_eagle3(tmp_path / "source", eagle3_config(SPECFORGE), 3)
    packed, _ = quantised(source, tmp_path, *gptq(4, 16), of=MATRICES)
    edit_config(packed, quantization_config=gptq(4, 32)[1])
    with pytest.raises(CheckpointError, match=r"qzeros must have shape \[\d+, \d+\]"):
        load_head(
            packed, load_spec(checkpoint_of("llama")), SharedWeights(*[torch.ones(500, 64)] * 2), torch.float32, CPU
        )
