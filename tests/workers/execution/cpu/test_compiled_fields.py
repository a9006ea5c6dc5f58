"""Quantised checkpoints packed for the compiled kernels in the numbers that they have: what is multiplied is what these
mean, whole and by shares."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych.kernels.cpu.formats import Format
from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.linear import linear
from diptych.kernels.cpu.load import library
from diptych.workers.execution.cpu.compiled import read_weights
from diptych.workers.execution.cpu.compiled_fields import pack_field
from diptych.workers.models.checkpoint.weights import Checkpoint
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.sharding import WHOLE, Share, share_of_first

from ....support.checkpoints import make_checkpoint
from ...models.quant.test_formats import FORMATS
from ...models.quant.writers import quantised

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built")
CPU = torch.device("cpu")
FIELDS = ("qkv", "o", "gate_up", "down")
# Format, group of `qkv`, whose 64 inputs are all here, and of `down`, whose 160 are cut in two; offsets.
# Others are decoded.
KEPT = {
    "int8, rows too": (Format.W8A8, 64, 80, False),
    "fp8, rows too": (Format.FP8, 64, 80, False),
    "int8, channel": (Format.INT8, 64, 80, False),
    "int8, tensor": (Format.INT8, 64, 80, False),
    "int8, zero points": (Format.INT8, 64, 80, True),
    "int8, group": (Format.INT8, 16, 16, False),
    "fp8, channel": (Format.FP8, 64, 80, False),
    "fp8, tensor": (Format.FP8, 64, 80, False),
    "fp8, block": (Format.FP8, 32, 16, False),
    "packed 4, group": (Format.INT4, 16, 16, False),
    "packed 4, zero points": (Format.INT4, 16, 16, True),
    "packed 3": (Format.INT4, 64, 80, False),
    "packed 8": (Format.INT8, 64, 80, False),
    "nvfp4": (Format.TABLE4, 16, 16, False),
    "mxfp4": (Format.TABLE4, 32, 16, False),
    "gptq 4": (Format.INT4, 16, 16, True),
    "gptq 4, symmetric": (Format.INT4, 32, 16, False),
    "gptq 3": (Format.INT4, 32, 16, True),
    "gptq 2, v2": (Format.INT4, 16, 16, True),
    "gptq 8, all inputs": (Format.INT8, 64, 80, True),
    "awq": (Format.INT4, 16, 16, True),
    "awq, symmetric": (Format.INT4, 16, 16, False),
    "packed 8, tensor, zero points": (Format.INT8, 64, 80, True),
    "fp8 tensor, transformers": (Format.FP8, 64, 80, False),
    "fp8 blocks": (Format.FP8, 32, 16, False),
    "fp8 blocks, powers of 2": (Format.FP8, 16, 16, False),
    "fp8 tensor": (Format.FP8, 64, 80, False),
    "modelopt nvfp4": (Format.TABLE4, 16, 16, False),
    "bitsandbytes int8": (Format.INT8, 64, 80, False),
    "2:4, int8": (Format.INT8, 64, 80, False),
    "2:4, fp8": (Format.FP8, 64, 80, False),
}

# With inputs in an order of their own: of `qkv`; a rank's part of the inputs of `down` is decoded.
ORDERED = {
    "gptq 4, activations' order": (Format.INT4, 16, True),
    "packed 4, activations' order": (Format.INT4, 16, True),
    "int8, activations' order": (Format.INT8, 16, False),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", 1)


@pytest.fixture(scope="module")
def team() -> Team:
    kernels = library()
    assert kernels is not None
    return Team(kernels, 1)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_tied_head_is_the_embeddings_or_a_copy_in_int8(team: Team, tmp_path: Path, quantize: str | None) -> None:
    path = make_checkpoint(tmp_path, "llama", 3, tie_word_embeddings=True)
    with Checkpoint(path, load_spec(path)) as checkpoint:
        outer = read_weights(team, checkpoint.reader(torch.float32, CPU, quantize=quantize)).outer
        embed = checkpoint.load(torch.float32, CPU).embed
    assert Format(outer.head.of.format) == (Format.PLAIN if quantize is None else Format.INT8)
    assert outer.embed is None if quantize is None else torch.equal(outer.embed, embed)


def products(team: Team, path: Path, share: Share) -> dict[str, tuple[torch.Tensor, Format, int, bool]]:
    """Weights of the first layer, by multiplying units, and how they are packed."""
    found = dict[str, tuple[torch.Tensor, Format, int, bool]]()
    with Checkpoint(path, load_spec(path)) as checkpoint:
        fields = next(iter(checkpoint.reader(torch.float32, CPU, share=share).layers()))
        for name in FIELDS:
            packed = pack_field(team, fields, name, take=lambda n: torch.empty(n, dtype=torch.uint8))
            rows = linear(team, torch.eye(packed.of.k), packed)
            found[name] = rows.T, Format(packed.of.format), packed.of.group, packed.offsets is not None
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_multiplied_is_what_the_numbers_mean(name: str, team: Team, source: Path, tmp_path: Path) -> None:
    packed, plain = quantised(source, tmp_path, *FORMATS[name])
    shares = [WHOLE, *(replace(share_of_first(load_spec(packed), 2), rank=rank) for rank in range(2))]
    found = dict[str, tuple[torch.Tensor, Format, int, bool]]()
    for share in shares:
        found, expected = (products(team, path, share) for path in (packed, plain))
        for field in FIELDS:
            rtol = 8e-3 if name == "nvfp4" else 2e-6  # the library multiplies in bfloat16
            torch.testing.assert_close(found[field][0], expected[field][0], rtol=rtol, atol=1e-7)
    kept = KEPT.get(name)
    if kept is not None:
        format, of_qkv, of_down, has_offsets = kept
        assert found["qkv"][1:] == (format, of_qkv, has_offsets)
        assert found["down"][1:] == (format, of_down, has_offsets)
    elif name in ORDERED:
        assert (found["qkv"][1:], found["down"][1]) == (ORDERED[name], Format.PLAIN)
    elif "nf4" in name:  # blocks of 64 do not divide the 160 inputs of `down`
        assert (found["qkv"][1:3], found["down"][1]) == ((Format.TABLE4, 64), Format.PLAIN)
    else:
        assert {found[field][1] for field in FIELDS} == {Format.PLAIN}
