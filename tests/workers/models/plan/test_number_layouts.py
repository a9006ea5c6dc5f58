"""Layouts of quantised weights, planned from config and index, are those that a worker finds in the tensors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.load import library
from diptych.workers.execution.cpu.compiled import Arena, packed_layer
from diptych.workers.execution.cpu.compiled_shape import attention_ids
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.kept_numbers import NONE, described
from diptych.workers.models.plan.number_layouts import planned_layouts
from diptych.workers.models.plan.sharding import WHOLE, share_of_first
from diptych.workers.models.plan.tensor_names import HEAD, expected_tensors, layer_tensors
from diptych.workers.models.plan.weight_bytes import weight_bytes

from ....support.checkpoints import make_checkpoint
from ..gguf.gguf_writer import write_gguf
from ..quant.test_formats import FORMATS
from ..quant.writers import mxfp4_experts, quantised


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1)


@pytest.mark.parametrize("name", FORMATS)
def test_a_plan_knows_what_a_worker_keeps(name: str, source: Path, tmp_path: Path) -> None:
    path, _ = quantised(source, tmp_path, *FORMATS[name])
    spec = load_spec(path)
    with Checkpoint(path, spec) as checkpoint:
        found = checkpoint.layouts
    assert bool(found) == (name != "2:4" and "torchao" not in name)
    assert planned_layouts(path, spec) == found
    (path / "model.safetensors").unlink()
    assert planned_layouts(path, spec) == found


def test_parts_of_a_product_have_one_order_or_are_decoded(source: Path, tmp_path: Path) -> None:
    """GPTQ's `desc_act`: what reads the same inputs has one order. A rank's part of the inputs has none."""
    kept = dict[tuple[str, int], set[str]]()
    for name in ("gptq 4, activations' order", "gptq 3, orders of their own"):
        path, _ = quantised(source, tmp_path / name, *FORMATS[name])
        spec = load_spec(path)
        for size in (1, 2):
            with Checkpoint(path, spec) as checkpoint:
                share = share_of_first(spec, size)
                reader = checkpoint.reader(torch.float32, torch.device("cpu"), share=share)
                fields = next(iter(reader.layers()))
                found = {field: fields.layout(field) for field in ("qkv", "o", "gate_up", "down")}
                assert all(layout is None or layout.has_order for layout in found.values())
                kept[name, size] = {field for field, layout in found.items() if layout is not None}
                line = reader.describe()
                assert line is not None and ("inputs by activations" in line) == bool(kept[name, size])
    one, other = ((f"gptq {of}", size) for of, size in (("4, activations' order", 1), ("3, orders of their own", 1)))
    assert kept[one] == {"qkv", "o", "gate_up", "down"} and kept[other] == {"o", "down"}
    assert kept[one[0], 2] == {"qkv", "gate_up"} and not kept[other[0], 2]


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    path, plain = mxfp4_experts(make_checkpoint(tmp_path / "source", "gptoss", 2), tmp_path)
    spec = load_spec(path)
    with Checkpoint(path, spec) as checkpoint:
        found = checkpoint.layouts
    assert {name.rpartition(".")[2] for name in found} == {"gate_up_proj", "down_proj"}
    assert planned_layouts(path, spec) == found
    assert planned_layouts(plain, spec) == {}


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_gguf_files(arch: str, tmp_path: Path) -> None:
    others: dict[str, Any] = {"norm_topk_prob": True, "mlp_only_layers": []} if arch == "qwen3moe" else {}
    path, _ = write_gguf(make_checkpoint(tmp_path / "source", arch, 6, **others), tmp_path)
    spec = load_spec(path)
    with Checkpoint(path, spec) as checkpoint:
        found = checkpoint.layouts
    products = [name for name in expected_tensors(spec) if name.endswith("_proj.weight")]
    planned = planned_layouts(path, spec)
    assert len({of.format for of in planned.values()}) > 1
    assert planned == {name: of for name, of in found.items() if name in (*products, HEAD)}


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
@pytest.mark.parametrize("name", ["int8, channel", "packed 4, zero points", "mxfp4", "fp8, block"])
def test_planned_bytes_are_those_of_the_packed_weights(name: str, source: Path, tmp_path: Path) -> None:
    path, _ = quantised(source, tmp_path, *FORMATS[name])
    spec, kernels = load_spec(path), library()
    assert kernels is not None
    team, layouts = Team(kernels, 1), planned_layouts(path, spec)
    for share in (WHOLE, replace(share_of_first(spec, 2), rank=1)):
        with Checkpoint(path, spec) as checkpoint:
            fields = checkpoint.reader(torch.bfloat16, torch.device("cpu"), share=share).layers()
            kinds = zip(spec.layers, attention_ids(spec), fields, strict=True)
            layers = [packed_layer(team, own, Arena(), of, attention) for of, attention, own in kinds]
        planned = weight_bytes(spec, share, "bfloat16", None, layouts)
        for field in ("qkv", "o", "gate_up", "down"):
            packed = [getattr(layer, field) for layer in layers]
            tensors = [of for each in packed for of in (each.weight, each.scales, each.offsets) if of is not None]
            assert planned[field] == sum(of.nbytes for of in tensors)
        assert planned["qkv"] < weight_bytes(spec, share, "bfloat16")["qkv"]
    team.close()


def test_a_line_says_what_is_computed_how(source: Path, tmp_path: Path) -> None:
    path, _ = quantised(source, tmp_path, *FORMATS["packed 4, zero points"])
    spec = load_spec(path)
    fields = [layer_tensors(spec, i) for i in range(spec.num_layers)]
    line = described(fields, planned_layouts(path, spec), WHOLE, None)
    assert line == f"{4 * spec.num_layers} in int4, groups of 16, zero points"
    assert described(fields, NONE, WHOLE, None) == f"{4 * spec.num_layers} in decoded weights"
