"""Checkpoints that are quantised as published: what is loaded is what their numbers mean, whole and by shares."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diptych.workers.common.errors import ConfigError
from diptych.workers.models.checkpoint.weights import Checkpoint, DecoderWeights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.sharding import WHOLE, Share, share_of_first
from diptych.workers.models.quant import stored_weight

from ....support.checkpoints import make_checkpoint
from .writers import (
    Writer,
    awq,
    bitsandbytes,
    bitsandbytes_int8,
    by_activations,
    compressed_tensors,
    fp8_blocks,
    fp8_tensor,
    fp8_with_rows,
    gptq,
    nvfp4_modelopt,
    quantised,
    sparse24,
    torchao,
    torchao_int4,
    w8a8,
)

CPU = torch.device("cpu")
FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "int8, rows too": w8a8(),
    "fp8, rows too": fp8_with_rows(),
    "int8, channel": compressed_tensors("int-quantized", num_bits=8, strategy="channel"),
    "int8, tensor": compressed_tensors("int-quantized", num_bits=8, strategy="tensor"),
    "int8, zero points": compressed_tensors("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "int8, group": compressed_tensors("int-quantized", num_bits=8, strategy="group", group_size=16),
    "fp8, channel": compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8, tensor": compressed_tensors("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "fp8, block": compressed_tensors(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
    ),
    "packed 4, group": compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=16),
    "packed 4, zero points": compressed_tensors(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False
    ),
    "packed 4, activations' order": by_activations(4, 16, is_packed=True),
    "int8, activations' order": by_activations(8, 16, is_packed=False),
    "packed 8, tensor, zero points": compressed_tensors(
        "pack-quantized", num_bits=8, strategy="tensor", symmetric=False
    ),
    "packed 3": compressed_tensors("pack-quantized", num_bits=3, strategy="channel"),
    "packed 8": compressed_tensors("pack-quantized", num_bits=8, strategy="channel"),
    "nvfp4": compressed_tensors(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "mxfp4": compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "gptq 4": gptq(4, 16),
    "gptq 4, symmetric": gptq(4, 32, is_symmetric=True),
    "gptq 4, activations' order": gptq(4, 16, ordered=False),
    "gptq 3, orders of their own": gptq(3, 32, ordered=False, alike=False),
    "gptq 3": gptq(3, 32),
    "gptq 2, v2": gptq(2, 16, is_v2=True),
    "gptq 8, all inputs": gptq(8, -1),
    "awq": awq(16),
    "awq, symmetric": awq(16, has_zeros=False),
    "fp8 blocks": fp8_blocks(16, 32),
    "fp8 blocks, powers of 2": fp8_blocks(32, 16, torch.float8_e8m0fnu),
    "fp8 tensor": fp8_tensor(),
    "fp8 tensor, transformers": fp8_tensor(by_transformers=True),
    "modelopt nvfp4": nvfp4_modelopt(),
    "bitsandbytes nf4": bitsandbytes(is_nested=False),
    "bitsandbytes nf4, nested": bitsandbytes(is_nested=True),
    "bitsandbytes int8": bitsandbytes_int8(),
    "2:4": sparse24(),
    "2:4, int8": sparse24("int-quantized", num_bits=8, strategy="channel"),
    "2:4, fp8": sparse24("float-quantized", num_bits=8, type="float", strategy="channel"),
    "torchao int8": torchao(),
    "torchao 4, group": torchao(bits=4, group=16),
    "torchao int4": torchao_int4(16),
    "torchao fp8": torchao(is_float=True),
    "torchao fp8, tensor": torchao(is_float=True, by_tensor=True),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1)


def load(path: Path, dtype: torch.dtype, share: Share = WHOLE, quantize: str | None = None) -> DecoderWeights:
    with Checkpoint(path, load_spec(path)) as checkpoint:
        return checkpoint.load(dtype, CPU, share=share, quantize=quantize)


def tensors_of(weights: DecoderWeights) -> dict[str, Tensor]:
    found = {"embed": weights.embed, "norm": weights.norm, "lm_head": weights.lm_head}
    for i, layer in enumerate(weights.layers):
        names = (name for name in layer.__slots__)
        found |= {f"{i}.{name}": of for name in names if (of := getattr(layer, name)) is not None}
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_loaded_is_what_the_numbers_mean(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weight, "PIECE_NUMBERS", 720)  # rows at once: 11, 5 and 4, which begin within words
    packed, plain = quantised(source, tmp_path, *FORMATS[name])
    spec = load_spec(packed)
    shares = [WHOLE, *(replace(share_of_first(spec, 2), rank=rank) for rank in range(2))]
    for share in shares:
        found, expected = (tensors_of(load(path, torch.float32, share)) for path in (packed, plain))
        assert found.keys() == expected.keys()
        for key in expected:
            rtol = 8e-3 if name == "nvfp4" else 2e-7  # the library multiplies in bfloat16
            torch.testing.assert_close(found[key], expected[key], rtol=rtol, atol=0)


def test_quantize_is_of_what_the_checkpoint_has_not_in_as_few_bits(source: Path, tmp_path: Path) -> None:
    """Numbers of the format that is asked for stay; those of more bits are rounded again; fewer contradict it."""
    packed, plain = quantised(source, tmp_path / "4", *FORMATS["packed 4, group"])
    decoded, rounded, found = (
        tensors_of(load(path, torch.bfloat16, quantize=quantize))
        for path, quantize in ((plain, None), (plain, "int4"), (packed, "int4"))
    )
    assert torch.equal(found["lm_head"], rounded["lm_head"]) and not torch.equal(found["lm_head"], decoded["lm_head"])
    assert all(torch.equal(found[key], decoded[key]) for key in decoded if key != "lm_head")
    with pytest.raises(ConfigError, match=r"quantize=int8 asks for more bits than .*q_proj\.weight has \(int4\)"):
        load(packed, torch.bfloat16, quantize="int8")
    packed, plain = quantised(source, tmp_path / "8", *FORMATS["int8, channel"])
    found, rounded = (tensors_of(load(path, torch.bfloat16, quantize="int4")) for path in (packed, plain))
    assert all(torch.equal(found[key], rounded[key]) for key in rounded)
