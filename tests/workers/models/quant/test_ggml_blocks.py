"""Blocks of ggml, decoded to what the gguf package makes of them, in every bit; and their numbers, which mean that."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from diptych.kernels.cpu.formats import Format
from diptych.workers.models.gguf.gguf_types import BLOCKS, NOT_READ, READ
from diptych.workers.models.plan.ggml_layouts import GGML_LAYOUTS
from diptych.workers.models.quant.ggml_blocks import decode_blocks, numbers_of_blocks
from diptych.workers.models.rounding.numbers import meant

from ..gguf.gguf_writer import SCALES, random_blocks


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_mean_what_they_mean_to_gguf(name: str) -> None:
    type_, of = Type[name], BLOCKS[name]
    raw = random_blocks((7, 3 * of.block), type_, seed=5)
    if not SCALES[type_]:  # of exponents: up to where the largest number is none
        raw.reshape(-1, of.num_bytes)[:, 0] = np.linspace(0, 252, 21).astype(np.uint8)
    found = decode_blocks(torch.from_numpy(raw), of)
    assert found.shape == (7, 3 * of.block)
    expected = torch.from_numpy(gguf.dequantize(raw, type_))
    assert torch.equal(bits(found), bits(expected))


def bits(numbers: torch.Tensor) -> torch.Tensor:
    """Bits of numbers, without the sign of zeros."""
    return numbers.view(torch.int32) & torch.where(numbers == 0, 0x7FFFFFFF, -1)


@pytest.mark.parametrize("name", BLOCKS)
def test_numbers_mean_what_blocks_do(name: str) -> None:
    of, layout = BLOCKS[name], GGML_LAYOUTS[name]
    raw = torch.from_numpy(random_blocks((7, 3 * of.block), Type[name], seed=5))
    found, expected = numbers_of_blocks(raw, of), decode_blocks(raw, of)
    largest = expected.unflatten(1, (-1, layout.group)).abs().amax(dim=2).repeat_interleave(layout.group, dim=1)
    assert ((meant(found, layout) - expected).abs() <= 1e-6 * largest).all()
    assert (found.offsets is not None) == layout.has_offsets
    low, high = {Format.INT4: (-8, 7), Format.TABLE4: (0, 15)}.get(layout.format, (-128, 127))
    assert low <= int(found.numbers.min()) and int(found.numbers.max()) <= high


def test_types_have_the_sizes_that_gguf_says() -> None:
    for number, of in READ.items():
        assert (Type(number).name, *gguf.GGML_QUANT_SIZES[Type(number)]) == of
    assert {number: Type(number).name for number in NOT_READ} == NOT_READ
    assert READ.keys() | NOT_READ.keys() >= {int(of) for of in Type}
