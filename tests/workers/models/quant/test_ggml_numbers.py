"""Numbers, scales and offsets of ggml's blocks mean what the decoded blocks are."""

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from diptych.kernels.cpu.formats import Format
from diptych.workers.models.gguf.gguf_types import BLOCKS
from diptych.workers.models.plan.ggml_layouts import GGML_LAYOUTS
from diptych.workers.models.quant.ggml_blocks import decode_blocks
from diptych.workers.models.quant.ggml_numbers import numbers_of_blocks
from diptych.workers.models.rounding.numbers import meant

from ..gguf.gguf_writer import random_blocks


@pytest.mark.parametrize("name", BLOCKS)
def test_numbers_mean_what_blocks_do(name: str) -> None:
    of, layout = BLOCKS[name], GGML_LAYOUTS[name]
    raw = torch.from_numpy(random_blocks((7, 3 * of.block), Type[name], seed=5))
    found, expected = numbers_of_blocks(raw, of), decode_blocks(raw, *of)
    largest = expected.unflatten(1, (-1, layout.group)).abs().amax(dim=2).repeat_interleave(layout.group, dim=1)
    assert ((meant(found, layout) - expected).abs() <= 1e-6 * largest).all()
    assert (found.offsets is not None) == layout.has_offsets
    low, high = {Format.INT4: (-8, 7), Format.TABLE4: (0, 15)}.get(layout.format, (-128, 127))
    assert low <= int(found.numbers.min()) and int(found.numbers.max()) <= high
