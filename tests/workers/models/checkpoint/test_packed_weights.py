"""Weights packed for a GPU's kernels: what they mean is what the checkpoint's numbers mean, for every format."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diptych.kernels.cpu.formats import Format, NumberLayout
from diptych.kernels.cpu.linear import WeightNumbers
from diptych.kernels.gemm.linear import Weight
from diptych.kernels.gemm.packed_weight import Coding, PackedWeight
from diptych.kernels.gemm.scaled_gemm import ScaledWeight
from diptych.workers.models.checkpoint.packed_weights import packed_numbers, products_of, read_weight
from diptych.workers.models.checkpoint.weights import Checkpoint, DecoderWeights, load_weights
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.sharding import WHOLE, Share, share_of_first

from ....support.checkpoints import make_checkpoint
from ..quant.test_formats import FORMATS
from ..quant.writers import mxfp4_experts, quantised

CPU = torch.device("cpu")
DECODED = ("bitsandbytes nf4", "torchao", "gptq 3, orders of their own", "2:4")  # in some fields, by number_layouts.py


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1)


def both(path: Path, share: Share = WHOLE, quantize: str | None = None) -> tuple[DecoderWeights, DecoderWeights]:
    """Packed, and decoded."""
    with Checkpoint(path, load_spec(path)) as checkpoint:
        packed = load_weights(checkpoint.reader(torch.float32, CPU, share=share, quantize=quantize), read_weight)
        decoded = load_weights(checkpoint.reader(torch.float32, CPU, share=share, quantize=quantize))
    return packed, decoded


def meant(of: Weight) -> Tensor:
    return of if isinstance(of, Tensor) else of.unpacked()


def assert_same(packed: DecoderWeights, decoded: DecoderWeights) -> None:
    for own, other in zip(packed.layers, decoded.layers, strict=True):
        for field in fields(own):
            found, expected = getattr(own, field.name), getattr(other, field.name)
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(meant(found), expected.as_subclass(Tensor), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(meant(packed.lm_head), meant(decoded.lm_head), rtol=1e-6, atol=1e-7)


def kinds_of(weights: DecoderWeights) -> set[type]:
    return {type(of) for layer in weights.layers for of in products_of(layer)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rank", [None, 1])
def test_every_format(name: str, rank: int | None, source: Path, tmp_path: Path) -> None:
    path, _ = quantised(source, tmp_path, *FORMATS[name])
    share = WHOLE if rank is None else replace(share_of_first(load_spec(path), 2), rank=rank)
    packed, decoded = both(path, share)
    assert_same(packed, decoded)
    if not name.startswith(DECODED):
        assert not isinstance(packed.layers[0].qkv, Tensor)


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8", "w8a8", "mxfp4"])
@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "deepseek-v2"])
def test_weights_that_are_rounded_at_load(arch: str, quantize: str, tmp_path: Path) -> None:
    packed, decoded = both(make_checkpoint(tmp_path / arch, arch, 3), quantize=quantize)
    assert_same(packed, decoded)
    wanted = ScaledWeight if quantize == "w8a8" else PackedWeight
    assert kinds_of(packed) == {wanted} and isinstance(packed.lm_head, PackedWeight)


@pytest.mark.parametrize("name", ["packed 4, zero points", "packed 4, activations' order", "int8, channel"])
def test_experts(name: str, tmp_path: Path) -> None:
    path, _ = quantised(make_checkpoint(tmp_path / "source", "qwen3moe", 3), tmp_path, *FORMATS[name])
    packed, decoded = both(path)
    assert_same(packed, decoded)
    experts = next(of for layer in packed.layers if (of := layer.experts_down) is not None)
    assert isinstance(experts, PackedWeight) and (experts.order is not None) == ("order" in name)
    assert (experts.zeros is None) == (name == "int8, channel") and experts.offsets is None


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    path, _ = mxfp4_experts(make_checkpoint(tmp_path / "source", "gptoss", 2), tmp_path)
    packed, decoded = both(path)
    assert_same(packed, decoded)
    experts = packed.layers[0].experts_gate_up
    assert isinstance(experts, PackedWeight) and experts.coding == Coding.E2M1
    assert experts.scales.dtype == torch.bfloat16, "powers of two"


def fp8(n: int, k: int, group: int, seed: int = 0) -> WeightNumbers:
    """Scales are of blocks of 128 outputs."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randn(n, k, generator=random).to(torch.float8_e4m3fn).view(torch.int8)
    scales = torch.rand(-(-n // 128), -(-k // group), generator=random).repeat_interleave(128, dim=0)[:n]
    return WeightNumbers(numbers, scales)


def test_scales_of_blocks_stay_blocks_where_parts_begin_with_one() -> None:
    layout = NumberLayout(Format.FP8, 128, has_fp8_rows=True)
    parts = [fp8(256, 200, 128), fp8(130, 200, 128, seed=1)]
    found = packed_numbers(parts, layout, CPU)
    assert isinstance(found, ScaledWeight) and found.has_blocks and found.scales.shape == (4, 2)
    shifted = packed_numbers([fp8(72, 200, 128), *parts], layout, CPU)
    assert isinstance(shifted, PackedWeight) and shifted.coding == Coding.E4M3
    assert torch.equal(shifted.unpacked()[72:], found.unpacked())
    for others in (replace(layout, has_fp8_rows=False), layout):
        widened = packed_numbers(parts, others, CPU, quantises_rows=others != layout)
        assert isinstance(widened, PackedWeight) and torch.equal(widened.unpacked(), found.unpacked())


def test_offsets_that_are_no_zero_points_stay_offsets() -> None:
    random = torch.Generator().manual_seed(0)
    numbers = torch.randint(-8, 8, (24, 64), generator=random, dtype=torch.int8)
    scales, offsets = torch.rand(24, 2, generator=random), torch.randn(24, 2, generator=random)
    found = packed_numbers([WeightNumbers(numbers, scales, offsets)], NumberLayout(Format.INT4, 32, True), CPU)
    assert isinstance(found, PackedWeight) and found.zeros is None and found.offsets is not None
    spread = [of.repeat_interleave(32, dim=1) for of in (scales, offsets)]
    torch.testing.assert_close(found.unpacked(), numbers * spread[0] + spread[1])
