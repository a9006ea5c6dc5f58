"""Moves of KV between devices' layouts against the bridge that does so between host pools (workers/kv/bridge.py)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from diptych.kernels.kv.kv_move import KVSlots, move_kv
from diptych.kernels.kv.kv_scales import quantise
from diptych.workers.kv.bridge import Bridge, _head_copies
from diptych.workers.kv.layout import LAYER_MAJOR, KVLayout, Region
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.segment import Segment

SOURCE = KVLayout("float32", 4, 3, 8, 16, "model", tensor_parallel=2)
LATENTS = replace(SOURCE, num_kv_heads=1, head_dim=24, num_vectors=1)
OURS = [
    replace(SOURCE, dtype="bfloat16"),
    replace(SOURCE, block_size=6, axis_order=LAYER_MAJOR),
    replace(SOURCE, tensor_parallel=4),
    replace(SOURCE, tensor_parallel=1, dtype="bfloat16", block_size=3),
    replace(SOURCE, tensor_parallel=16, axis_order=LAYER_MAJOR),
]
PAIRS = [(SOURCE, ours) for ours in OURS] + [
    (LATENTS, replace(LATENTS, block_size=6, axis_order=LAYER_MAJOR, tensor_parallel=4)),
    (LATENTS, replace(LATENTS, dtype="bfloat16", tensor_parallel=1)),
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCKS, TABLE, THEIRS, FIRST_TOKEN = 12, (5, 2, 9, 7, 0, 4, 11), (3, 8, 1, 6), 5


def ranks_of(pool: torch.Tensor, layout: KVLayout) -> list[torch.Tensor]:
    """[block, layer, vector, slot, head, dim] of each rank."""
    inner = (layout.num_vectors, layout.block_size, layout.heads_per_rank, layout.head_dim)
    if layout.is_block_major:
        return list(pool.view(layout.tensor_parallel, BLOCKS, layout.num_layers, *inner))
    return list(pool.view(layout.tensor_parallel, layout.num_layers, BLOCKS, *inner).transpose(1, 2))


def empty_pool(layout: KVLayout) -> torch.Tensor:
    return torch.full((BLOCKS * layout.block_bytes // DTYPES[layout.dtype].itemsize,), 7.0, dtype=DTYPES[layout.dtype])


def bridged(source: torch.Tensor, theirs: KVLayout, ours: KVLayout) -> torch.Tensor:
    """What a hand-off makes of all layers of four blocks."""
    pool = empty_pool(ours)
    view = memoryview(pool.view(torch.uint8).numpy())
    memory = KVMemory(ours, BLOCKS, Region(pool.data_ptr(), len(view), view))
    bridge = Bridge(memory, theirs, BLOCKS)
    segment = Segment(0, THEIRS, (0,) * len(THEIRS), 0, theirs.num_layers)
    copies = bridge.staged(segment, 0)
    read = source.view(torch.uint8).numpy()
    staged = np.concatenate([read[at : at + n] for at, n in zip(copies.remote, copies.lengths, strict=True)])
    bridge.convert(memoryview(staged), segment, TABLE, FIRST_TOKEN)
    return pool


@pytest.mark.parametrize(("layout", "ours"), PAIRS, ids=lambda o: f"{o.dtype}-{o.block_size}-{o.tensor_parallel}")
def test_a_move_is_what_the_bridge_does(layout: KVLayout, ours: KVLayout) -> None:
    source = empty_pool(layout).normal_(generator=torch.Generator().manual_seed(0))
    target = empty_pool(ours)
    theirs, mine = ranks_of(source, layout), ranks_of(target, ours)
    num_tokens = min(len(THEIRS) * layout.block_size, len(TABLE) * ours.block_size) - FIRST_TOKEN
    for copy in _head_copies(layout, ours):
        read = KVSlots(theirs[copy.wire_rank][..., copy.wire_heads, :], torch.tensor(THEIRS))
        written = KVSlots(mine[copy.rank][..., copy.heads, :], torch.tensor(TABLE))
        move_kv(read, written, FIRST_TOKEN, num_tokens)
    assert torch.equal(target, bridged(source, layout, ours))


def test_what_is_narrowed_comes_back_within_a_rounding() -> None:
    """Into a buffer of 8-bit numbers and scales, and out of it into other blocks."""
    numbers = torch.randn(BLOCKS, 3, 2, 4, 8, 16, generator=torch.Generator().manual_seed(1))
    stored, scales = torch.zeros(5, 3, 2, 4, 8, 16, dtype=torch.int8), torch.zeros(5, 3, 2, 4, 8)
    buffer = KVSlots(stored, torch.arange(5), 0, scales)
    source = KVSlots(numbers, torch.tensor(THEIRS))
    move_kv(source, buffer, 1, 14)
    assert torch.equal(stored[1, :, :, 2], quantise(numbers[THEIRS[1], :, :, 2], torch.int8)[0])
    back = torch.zeros_like(numbers)
    move_kv(buffer, KVSlots(back, torch.tensor(THEIRS)), 1, 14)
    moved = torch.tensor([THEIRS[1], THEIRS[2]])
    assert (back[moved] - numbers[moved]).abs().max() < numbers.abs().max() / 127 * 0.51
    assert not back[THEIRS[0], :, :, 0].any() and not back[THEIRS[3], :, :, 3].any()


def test_tokens_that_a_table_does_not_reach_are_refused() -> None:
    slots = KVSlots(torch.zeros(BLOCKS, 3, 2, 4, 8, 16), torch.tensor(THEIRS), start=4)
    for first, num in ((3, 2), (4, 17)):
        with pytest.raises(AssertionError):
            move_kv(slots, slots, first, num)
