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
TORCHAO_TILES = {
    "_type": "Int4WeightOnlyConfig",
    "_data": {"int4_packing_format": {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}},
}
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


def of_weights(**args: object) -> dict[str, Any]:
    """A config of compressed-tensors with these arguments of weights."""
    groups = {"a": {"targets": ["Linear"], "weights": {"num_bits": 8} | args}}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}


def infinite(name: str) -> Edit:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3] = torch.inf

    return change


def not_a_number(name: str) -> Edit:
    """Make an e4m3 number NaN."""
    return lambda tensors: tensors[name].view(torch.uint8).view(-1)[5:6].fill_(127)


def text_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


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
        (FORMATS["modelopt nvfp4"], put(weight_scale_2=torch.tensor(3e38)), rf"{Q}.weight_scale_2 has a scale"),
        (FORMATS["nvfp4"], put(weight_global_scale=torch.tensor([1e-38])), rf"{Q}.weight_global_scale has a"),
        (FORMATS["nvfp4"], put(weight_g_idx=torch.arange(64) % 4), rf"{Q}.weight has inputs in the order"),
        (FORMATS["bitsandbytes int8"], put(weight_format=torch.tensor(2, dtype=torch.uint8)), "weight_format must be"),
        (FORMATS["int8, channel"], put(weight_zero_point=torch.ones(128, 1, dtype=torch.int8)), "has zero points"),
        (FORMATS["fp8 tensor"], not_a_number(f"{Q}.weight"), rf"{Q}.weight has a number that is NaN"),
        (FORMATS["fp8, channel"], not_a_number(f"{Q}.weight"), rf"{Q}.weight has a number that is NaN"),
        (FORMATS["torchao fp8"], not_a_number(f"{Q}._weight_qdata"), rf"{Q}._weight_qdata has a number that is NaN"),
        (NF4, put(**{STATE: text_of('{"blocksize": Infinity, "shape": [128, 64]}')}), rf"{STATE} has no sizes"),
        (FORMATS["torchao int4"], put(_weight_scale=torch.ones(3, 128)), r"must have groups that divide 64 inputs"),
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
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "NF4Config", "_data": {}}}},
            "quant_type.default._type must be one of Int4WeightOnlyConfig, Int8WeightOnlyConfig, .* found 'NF4Config'",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": TORCHAO_TILES}},
            "default._data.int4_packing_format must be PLAIN: .* found 'TILE_PACKED_TO_4D'",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": TORCHAO_BY_MODULE}},
            "fqn_to_config.x._type must be one of Int4WeightOnlyConfig",
        ),
        *(
            ({"quant_method": method, "bits": 4, "colour": 1} if method in ("gptq", "awq") else
             {"quant_method": method, "quant_algo": "FP8", "colour": 1} if method == "modelopt" else
             {"quant_method": method, "colour": 1}, "colour is not known here; known are .* take it out of the file")
            for method in ("gptq", "awq", "fp8", "mxfp4", "bitsandbytes", "modelopt", "torchao")
        ),
        (of_weights(rotation="hadamard"), "config_groups.a.weights.rotation is not known here; known are num_bits"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"x": 1}} | GROUPS, "scheme.x is not known"),
        ({"quant_method": "compressed-tensors", "moe_sparsity_config": {"m": 1}} | GROUPS, "moe_sparsity_config must"),
        ({"quant_method": "gptq", "bits": 4, "adapter": {"rank": 8}}, "adapter must be absent"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*q": {"bits": 8}}}, "dynamic must only leave modules out"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype must be one of int32"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend must be autoawq"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "version must be one of gemm"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype must be one of fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "pre_quant_scale": True}, "pre_quant_scale must be false"),
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


def changed_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    change(config)
    edit_config(path, quantization_config=config)


@pytest.mark.parametrize(
    ("format", "change"),
    [
        (gptq(4, 16, is_symmetric=True), lambda c: c.update(checkpoint_format="gptq_v2")),  # mislabelled
        (gptq(4, 16, is_v2=True), lambda c: c.update(format=c.pop("checkpoint_format"))),  # its newer name
        (gptq(4, 16), lambda c: c.pop("sym")),
        (gptq(4, 16, is_symmetric=True), lambda c: c.pop("sym")),
        (gptq(4, 16), lambda c: c.update(dynamic={"-:.*lm_head": {}}, meta={"quantizer": ["gptqmodel:5.0"]})),
        (
            FORMATS["int8, channel"],
            lambda c: c["config_groups"]["group_0"]["weights"].update(strategy=None, group_size=-1),
        ),
    ],
)
def test_what_a_config_says_otherwise_means_the_same(
    source: Path, tmp_path: Path, format: tuple[Any, Any], change: Callable[[dict[str, Any]], object]
) -> None:
    packed, plain = quantised(source, tmp_path, *format)
    changed_config(packed, change)
    found, expected = (tensors_of(load(path, torch.float32)) for path in (packed, plain))
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=2e-7, atol=0)


def test_zero_points_elsewhere_contradict_a_symmetric_checkpoint(source: Path, tmp_path: Path) -> None:
    """Whether it is decoded, or computed in its numbers."""
    packed, _ = quantised(source, tmp_path, *gptq(4, 16))
    changed_config(packed, lambda c: c.update(sym=True))
    with pytest.raises(CheckpointError, match=rf"{Q}.qzeros has zero points that are not in the middle, .* sym: true"):
        load(packed, torch.float32)
    with Checkpoint(packed, load_spec(packed)) as checkpoint:
        fields = next(iter(checkpoint.reader(torch.float32, torch.device("cpu")).layers()))
        layout = fields.layout("qkv")
        assert layout is not None and not layout.has_offsets
        with pytest.raises(CheckpointError, match=rf"{Q}.qzeros has zero points that are not in the middle"):
            fields.numbers("qkv", layout)


def test_words_that_do_not_fill_a_weight(tmp_path: Path) -> None:
    """12 outputs: AutoAWQ has none such; the zero points of GPTQ and compressed-tensors end within 32."""
    sizes = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 96}
    source = make_checkpoint(tmp_path / "source", "llama", 1, num_hidden_layers=1, head_dim=4, **sizes)
    for i, format in enumerate((gptq(4, 16), PACKED)):
        packed, plain = quantised(source, tmp_path / str(i), *format)
        found, expected = (tensors_of(load(path, torch.float32)) for path in (packed, plain))
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=2e-7, atol=0)
    packed, _ = quantised(source, tmp_path / "awq", *awq(16), of=("q_proj.weight",))
    edit(
        packed, lambda t: t.update({f"{Q.replace('q_proj', 'k_proj')}.qweight": torch.zeros(48, 1, dtype=torch.int32)})
    )
    with pytest.raises(CheckpointError, match=r"k_proj.weight has 12 outputs, which words of 8 do not divide"):
        load(packed, torch.float32)


def test_scales_of_kv_are_said_to_be_unused(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, plain = quantised(source, tmp_path, *FORMATS["fp8, channel"])
    attention = Q.removesuffix(".q_proj")
    edit(packed, lambda t: t.update({f"{attention}.{of}_scale": torch.tensor(0.5) for of in "kv"}))
    changed_config(packed, lambda c: c.update(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}))
    with caplog.at_level("INFO", logger="diptych.worker"):
        found = tensors_of(load(packed, torch.float32))
    assert found.keys() == tensors_of(load(plain, torch.float32)).keys()
    assert f"has 2 scales of KV ({attention}.k_scale, ...), which are not used" in caplog.text


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
