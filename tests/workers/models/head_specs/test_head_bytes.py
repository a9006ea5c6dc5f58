"""Bytes of a head, known before it is read, are those of the tensors that a worker keeps."""

from pathlib import Path

import pytest
import torch

from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.checkpoint.weights import DTYPES, Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import ModelSpec
from diptych.workers.models.head_specs.head_bytes import head_weight_bytes
from diptych.workers.models.heads.draft_head import SharedWeights
from diptych.workers.models.heads.loading import load_head

from ....support.heads import eagle3_config, make_eagle3, make_mtp
from ....support.tensors import tensors_of
from ...conftest import CheckpointOf

CPU = torch.device("cpu")


def kept_bytes(folder: Path, path: Path, target: ModelSpec, dtype: str) -> int:
    """Of all tensors of floats that the loaded head holds, each once."""
    with Checkpoint(path, target) as checkpoint:
        outer = checkpoint.reader(DTYPES[dtype], CPU).outer()
        embed = outer.tensor("embed")
        shared = SharedWeights(embed, outer.tensor("lm_head") if outer.has("lm_head") else embed)
    head = load_head(folder, target, shared, DTYPES[dtype], CPU)
    weights = head.weights  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    return sum({id(each): each.nbytes for each in tensors_of(weights) if each.is_floating_point()}.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("own_embed", [True, False])
@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_of_eagle3(checkpoint_of: CheckpointOf, tmp_path: Path, form: str, own_embed: bool, dtype: str) -> None:
    path = checkpoint_of("llama")
    target = load_spec(path)
    folder = make_eagle3(tmp_path, eagle3_config(form, layer={"num_hidden_layers": 2}), 1, own_embed=own_embed)
    assert head_weight_bytes(folder, target, dtype) == kept_bytes(folder, path, target, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("arch", "names"), [("deepseek-v3", "deepseek"), ("qwen3", "qwen3-next")])
def test_of_mtp(checkpoint_of: CheckpointOf, tmp_path: Path, arch: str, names: str, alone: bool, dtype: str) -> None:
    """Routers of mixtures are float32; a module without embeddings has a copy of the target's."""
    path = checkpoint_of(arch)
    target = load_spec(path)
    folder = make_mtp(tmp_path / "module", path, names, 5, alone=alone)
    assert head_weight_bytes(folder, target, dtype) == kept_bytes(folder, path, target, dtype)


def test_a_folder_without_a_module(checkpoint_of: CheckpointOf) -> None:
    path = checkpoint_of("deepseek-v3")
    with pytest.raises(CheckpointError, match="holds no MTP module"):
        head_weight_bytes(path, load_spec(path), "bfloat16")
