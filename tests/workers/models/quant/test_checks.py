"""What is wrong with a quantised checkpoint is named, before anything is served."""

import json
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
from .test_formats import FORMATS, load, tensors_of
from .writers import awq, compressed_tensors, edit_config, gptq, quantised

Q = "model.layers.0.self_attn.q_proj"
PACKED = compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False)
NF4, STATE = FORMATS["bitsandbytes nf4"], "weight.quant_state.bitsandbytes__nf4"
GROUPS = {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}
TORCHAO_BY_MODULE = {
    "_type": "FqnToConfig",
    "_data": {"fqn_to_config": {"_default": None, "x": {"_type": "NF4Config"}}},
}
Edit = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1, num_hidden_layers=1)


def edit(path: Path, change: Edit) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def put(**tensors: Tensor) -> Edit:
    """Put tensors of one module, by their short names."""
    return lambda all_: all_.update({f"{Q}.{short}": tensor for short, tensor in tensors.items()})


def infinite(name: str) -> Edit:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3] = torch.inf

    return change


@pytest.mark.parametrize(
    ("format", "change", "named"),
    [
        (PACKED, lambda t: t.pop(f"{Q}.weight_packed"), rf"{Q}.weight_packed of shape \[128, 8\] and dtype I32 is"),
        (PACKED, put(weight_scale=torch.ones(128, 3)), rf"{Q}.weight_scale must have shape \[128, 4\]"),
        (PACKED, lambda t: t.pop(f"{Q}.weight_zero_point"), rf"{Q}.weight_zero_point of shape \[16, 4\]"),
        (PACKED, infinite(f"{Q}.weight_scale"), rf"{Q}.weight_scale has a scale that is no finite number"),
        (PACKED, put(weight_g_idx=torch.full((64,), 9, dtype=torch.int32)), "groups from 0 to 3"),
        (gptq(4, 16), lambda t: t.pop(f"{Q}.qzeros"), rf"tensor {Q}.qzeros of shape \[4, 16\]"),
        (gptq(4, 16), put(g_idx=torch.full((64,), -1)), "groups from 0 to 3"),
        (gptq(4, 16), put(bias=torch.ones(128)), rf"tensor {Q}.bias is unexpected"),
        (awq(16), put(qweight=torch.zeros(64, 8, dtype=torch.int32)), rf"{Q}.qweight must have shape \[64, 16\]"),
        (FORMATS["fp8 blocks"], lambda t: t.pop(f"{Q}.weight_scale_inv"), rf"tensor {Q}.weight_scale_inv"),
        (NF4, lambda t: t.pop(f"{Q}.weight.absmax"), rf"tensor {Q}.weight.absmax"),
        (NF4, put(**{STATE: torch.tensor([1, 2], dtype=torch.uint8)}), rf"{STATE} has no sizes"),
        (NF4, put(**{STATE: torch.full((4096,), ord("["), dtype=torch.uint8)}), rf"{STATE} has no sizes"),
        (FORMATS["torchao 4, group"], lambda t: t.pop(f"{Q}._weight_scale"), rf"{Q}._weight_scale of shape"),
        (
            FORMATS["torchao 4, group"],
            put(_weight_scale=torch.ones(128, 3)),
            rf"{Q}._weight_scale must have scales that divide \[128, 64\], found \[128, 3\]",
        ),
        (FORMATS["torchao 4, group"], infinite(f"{Q}._weight_scale"), rf"{Q}._weight_scale has a scale that is no"),
        (FORMATS["torchao 4, group"], put(_weight_qdata=torch.zeros(128, 32, dtype=torch.uint8)), "and dtype I8 or F8"),
        (FORMATS["torchao int8"], put(_weight_act_pre_scale=torch.ones(64)), "act_pre_scale scales activations"),
        (FORMATS["2:4"], lambda t: t.pop(f"{Q}.bitmask"), rf"{Q}.bitmask of shape \[128, 8\]"),
        (FORMATS["2:4"], put(compressed=torch.ones(128, 33)), rf"{Q}.compressed must have two numbers of each four"),
        (FORMATS["2:4"], put(compressed=torch.ones(64, 32)), rf"{Q}.bitmask must have shape \[64, 8\]"),
        (FORMATS["2:4"], put(bitmask=torch.full((128, 8), 7, dtype=torch.uint8)), rf"{Q}.bitmask must have two of"),
        (FORMATS["2:4"], put(shape=torch.tensor([[64], [128]])), rf"{Q}.shape must say \[128, 64\]"),
        (FORMATS["modelopt nvfp4"], lambda t: t.pop(f"{Q}.weight_scale_2"), rf"{Q}.weight_scale_2"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_the_config(
    source: Path, tmp_path: Path, format: tuple[Any, Any], change: Edit, named: str
) -> None:
    packed, _ = quantised(source, tmp_path, *format)
    edit(packed, change)
    with pytest.raises(CheckpointError, match=named):
        load(packed, torch.float32)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "hqq"}, "gptq, awq, fp8, mxfp4, bitsandbytes, modelopt, modelopt_fp4, torchao"),
        ({"quant_method": "gptq", "bits": 5}, "bits must be 2, 3, 4 or 8, found 5"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be an integer"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "must be one of gptq, gptq_v2"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version must be one of gemm"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two sizes"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo must be one of FP8, NVFP4"),
        ({"quant_method": "compressed-tensors"}, "config_groups must say what is quantised"),
        (
            {"quant_method": "compressed-tensors", "ignore": ["re:("], "format": "int-quantized"} | GROUPS,
            "ignore must hold regular expressions",
        ),
        ({"quant_method": "compressed-tensors", "colour": 1}, "colour is not known here; known are config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}},
            "format must be one of int-quantized",
        ),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "older checkpoints of torchao are pickles"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}},
            "quant_type.default._type must be one of Int8WeightOnlyConfig, .* found 'Int4WeightOnlyConfig'",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": TORCHAO_BY_MODULE}},
            "fqn_to_config.x._type must be one of Int8WeightOnlyConfig",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config.format must be one of dense, sparse-24-bitmask",
        ),
    ],
)  # fmt: skip
def test_a_config_that_is_not_known_is_named(source: Path, tmp_path: Path, config: dict[str, Any], named: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"quantization_config": config})
    )
    with pytest.raises(CheckpointError, match=named):
        load_spec(tmp_path)


def test_groups_must_divide_inputs(source: Path, tmp_path: Path) -> None:
    packed, _ = quantised(source, tmp_path, *gptq(4, 16))
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config=config | {"group_size": 48})
    with pytest.raises(CheckpointError, match=rf"weight {Q}.weight has 64 inputs, which groups of 48 .* do not divide"):
        Checkpoint(packed, load_spec(packed))


def test_a_weight_that_no_group_has_is_named(source: Path, tmp_path: Path) -> None:
    packed, _ = quantised(source, tmp_path, *PACKED)
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config=config | {"ignore": ["re:.*q_proj"]})
    with pytest.raises(CheckpointError, match=rf"weight {Q}.weight is quantised, but config.json has no group for it"):
        Checkpoint(packed, load_spec(packed))


def test_zero_points_that_a_config_mislabels_are_known_by_their_values(source: Path, tmp_path: Path) -> None:
    """A symmetric checkpoint of the second version, whose config says the first."""
    packed, plain = quantised(source, tmp_path, *gptq(4, 16, is_symmetric=True, is_v2=True))
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config={k: v for k, v in config.items() if k != "checkpoint_format"})
    found, expected = (tensors_of(load(path, torch.float32)) for path in (packed, plain))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_bias_of_zeros_beside_a_weight_is_left_out(source: Path, tmp_path: Path) -> None:
    packed, plain = quantised(source, tmp_path, *gptq(4, 16))
    edit(packed, lambda tensors: tensors.update({f"{Q}.bias": torch.zeros(128)}))
    assert tensors_of(load(packed, torch.float32)).keys() == tensors_of(load(plain, torch.float32)).keys()


def test_what_is_quantised_otherwise_has_another_fingerprint(source: Path, tmp_path: Path) -> None:
    packed, _ = quantised(source, tmp_path, *gptq(4, 16))
    before = Checkpoint(packed, load_spec(packed)).fingerprint()
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    edit_config(packed, quantization_config=config | {"checkpoint_format": "gptq_v2"})
    assert Checkpoint(packed, load_spec(packed)).fingerprint() != before
