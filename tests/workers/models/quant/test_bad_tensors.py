"""Every tensor of a quantised weight that is missing, or has another shape or dtype, or scales that are not finite, is
named before anything is served: whether weights are decoded, or computed in the numbers that are stored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych.workers.common.errors import CheckpointError
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec

from ....support.checkpoints import make_checkpoint
from .test_formats import FORMATS, load
from .writers import mxfp4_experts, quantised

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
OF_EXPERTS = "mxfp4 of experts"
CPU = torch.device("cpu")
# Tensors that a reader need not have: they repeat what others say.
NOT_NEEDED = {
    "weight_shape",
    "input_scale",
    "activation_scale",
    "weight_format",
}  # missing or not: see below for the first
MAY_BE_MISSING = {
    ("qzeros", "awq, symmetric"),
    *(("_weight_zero_point", f"torchao {of}") for of in ("int8", "4, group")),  # the config does not say
}
SCALES = ("scale", "absmax", "SCB", "scales", "scale_2", "scale_inv", "quant_map")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of each format, made once."""
    found: dict[str, Path] = {}
    llama = make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1, num_hidden_layers=1)

    def of(name: str) -> Path:
        if name not in found:
            folder = tmp_path_factory.mktemp("format")
            if name == OF_EXPERTS:
                source = make_checkpoint(folder / "source", "gptoss", 1, num_hidden_layers=1)
                found[name] = mxfp4_experts(source, folder)[0]
            else:
                found[name] = quantised(llama, folder, *FORMATS[name])[0]
        return found[name]

    return of


def tensors_of_weight(path: Path) -> dict[str, Tensor]:
    """Tensors of one quantised weight, by name."""
    prefix = (f"{Q}.", f"{EXPERTS}_blocks", f"{EXPERTS}_scales")
    return {name: of for name, of in load_file(path / "model.safetensors").items() if name.startswith(prefix)}


def changed(path: Path, folder: Path, name: str, tensor: Tensor | None) -> Path:
    """Copy a checkpoint, with another tensor, or none, of that name."""
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


def read_numbers(path: Path) -> None:
    """Read what the compiled kernels would be given, where they compute with the numbers."""
    with Checkpoint(path, load_spec(path)) as checkpoint:
        for fields in checkpoint.reader(torch.float32, CPU).layers():
            for field in ("qkv", "experts_down"):
                layout = fields.layout(field) if fields.has(field) else None
                if layout is not None:
                    fields.numbers(field, layout)
                elif fields.has(field):
                    fields.tensor(field)


def assert_named(path: Path, name: str) -> None:
    """Loading fails, and says of which tensor."""
    for read in (lambda: load(path, torch.float32), lambda: read_numbers(path)):
        with pytest.raises(CheckpointError, match=rf"{name}\b"):
            read()


def spoiled(tensor: Tensor) -> Tensor:
    """One more row, or three instead of one."""
    if not tensor.ndim:
        return tensor.repeat(3)
    return torch.cat((tensor, tensor[:1]) if len(tensor) > 1 else (tensor,) * 3)


def other_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8).to(torch.int16)


@pytest.mark.parametrize("name", [*FORMATS, OF_EXPERTS])
def test_each_tensor_is_needed_as_it_is(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    path = made(name)
    tensors = tensors_of_weight(path)
    assert len(tensors) > 1
    for i, (full, tensor) in enumerate(tensors.items()):
        short = full.removeprefix(f"{Q}.")
        if short in NOT_NEEDED or (short == "g_idx" and name != "gptq 4, activations' order"):
            continue
        copies = {"missing": None, "shape": spoiled(tensor), "dtype": other_dtype(tensor)}
        for what, copy in copies.items():
            if what == "missing" and (short, name) in MAY_BE_MISSING:
                continue
            # Without its numbers a weight may seem to be none that is quantised: then it is the weight that is named.
            # Numbers of other sizes may contradict those that are beside them.
            named = {"missing": rf"({full}|{Q}\.weight(_scale)?)", "shape": rf"({full}|{Q}\.bitmask)"}.get(what, full)
            assert_named(changed(path, tmp_path / f"{i}-{what}", full, copy), named)


@pytest.mark.parametrize("name", [*FORMATS, OF_EXPERTS])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scales_are_finite(name: str, value: float, made: Callable[[str], Path], tmp_path: Path) -> None:
    path = made(name)
    for i, (full, tensor) in enumerate(tensors_of_weight(path).items()):
        if not full.endswith(SCALES) or full.rpartition(".")[2] in NOT_NEEDED:
            continue
        bad = tensor.clone()
        if tensor.dtype in (torch.uint8, torch.float8_e8m0fnu):
            if "absmax" in full:
                continue  # whole numbers, which are always finite
            bad.view(torch.uint8).view(-1)[-1] = 255  # NaN in E8M0
        else:
            bad.view(-1)[-1] = torch.nan if tensor.dtype == torch.float8_e4m3fn else value  # which has no infinity
        assert_named(changed(path, tmp_path / str(i), full, bad), full)


def with_config(path: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a checkpoint, whose quantization_config is changed in place."""
    shutil.copytree(path, folder)
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize("name", ["packed 4, group", "int8, group", "gptq 4", "awq", "modelopt nvfp4", "nvfp4"])
def test_groups_that_do_not_divide_the_inputs(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        (weights_of(config) if "config_groups" in config else config)["group_size"] = 48

    with pytest.raises(CheckpointError, match=rf"weight {Q}.weight has 64 inputs, which groups of 48 .* do not divide"):
        load(with_config(made(name), tmp_path / "changed", change), torch.float32)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("packed 4, group", lambda c: weights_of(c).update(num_bits=8), f"{Q}.weight_packed must have shape"),
        ("packed 8", lambda c: weights_of(c).update(num_bits=4), f"{Q}.weight_packed must have shape"),
        ("packed 4, group", lambda c: weights_of(c).update(symmetric=False), f"{Q}.weight_zero_point of shape"),
        ("packed 4, group", lambda c: weights_of(c).update(actorder="group"), f"{Q}.weight_g_idx of shape"),
        ("packed 4, group", lambda c: weights_of(c).update(strategy="channel"), f"{Q}.weight_scale must have shape"),
        ("int8, channel", lambda c: weights_of(c).update(strategy="tensor"), f"{Q}.weight_scale must have shape"),
        ("int8, channel", lambda c: weights_of(c).update(type="float"), f"{Q}.weight must have shape .* F8_E4M3"),
        ("fp8, channel", lambda c: weights_of(c).update(type="int"), f"{Q}.weight must have shape .* I8"),
        ("fp8, block", lambda c: weights_of(c).update(block_structure=[8, 8]), f"{Q}.weight_scale must have shape"),
        ("gptq 4", lambda c: c.update(bits=8), f"{Q}.qweight must have shape"),
        ("gptq 4", lambda c: c.update(group_size=32), f"{Q}.qzeros must have shape"),
        ("awq", lambda c: c.update(group_size=32), f"{Q}.scales must have shape"),
        ("fp8 blocks", lambda c: c.update(weight_block_size=[64, 64]), f"{Q}.weight_scale_inv must have shape"),
        ("fp8 blocks", lambda c: c.pop("weight_block_size"), f"{Q}.weight has a scale for each block"),
        ("modelopt nvfp4", lambda c: c.update(quant_algo="FP8"), f"{Q}.weight must have"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_the_tensors(
    name: str, change: Callable[[dict[str, Any]], object], named: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        load(with_config(made(name), tmp_path / "changed", change), torch.float32)


def test_a_shape_that_contradicts_the_tensors(made: Callable[[str], Path], tmp_path: Path) -> None:
    name = f"{Q}.weight_shape"
    path = changed(made("packed 4, group"), tmp_path / "changed", name, torch.tensor([128, 32]))
    assert_named(path, name)
    assert load(changed(made("packed 4, group"), tmp_path / "without", name, None), torch.float32)
