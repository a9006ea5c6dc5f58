from dataclasses import replace

import pytest
import torch

from diptych.kernels.kv.kv_move import KVSlots, move_kv_triton, move_kv_twin
from diptych.kernels.kv.kv_scales import LARGEST, numbers_in

from .common import DEVICE, Launch, meta, normal

FP8 = torch.float8_e4m3fn


def launch(source: torch.dtype, target: torch.dtype) -> None:
    slots = [
        KVSlots(
            meta(100, 32, 2, block_size, 16, 128 // numbers_in(dtype), dtype=dtype).narrow(4, 4, 8),
            meta(9, dtype=torch.int64),
            0,
            meta(100, 32, 2, 16, block_size, dtype=torch.bfloat16).transpose(3, 4).narrow(4, 4, 8)
            if dtype in LARGEST
            else None,
        )
        for dtype, block_size in ((source, 16), (target, 64))
    ]
    move_kv_triton(*slots, 3, 100)


LAUNCHES = [
    Launch("bfloat16", lambda: launch(torch.bfloat16, torch.bfloat16)),
    Launch("bfloat16 to int8", lambda: launch(torch.bfloat16, torch.int8)),
    Launch("int8 to bfloat16", lambda: launch(torch.int8, torch.bfloat16), is_gated=False),
    Launch("int8", lambda: launch(torch.int8, torch.int8), is_gated=False),
    Launch("float32 to bfloat16", lambda: launch(torch.float32, torch.bfloat16), is_gated=False),
    Launch("bfloat16 to int4", lambda: launch(torch.bfloat16, torch.uint8)),
    Launch("int4 to bfloat16", lambda: launch(torch.uint8, torch.bfloat16), is_gated=False),
    Launch("int4 to int8", lambda: launch(torch.uint8, torch.int8), is_gated=False),
    Launch("int4", lambda: launch(torch.uint8, torch.uint8), is_gated=False),
    Launch("bfloat16 to float8", lambda: launch(torch.bfloat16, FP8), ("sm_90", "sm_100", "gfx942"), is_gated=False),
    Launch("float8", lambda: launch(FP8, FP8), is_gated=False),  # bytes, which every chip copies
]


def pool(dtype: torch.dtype, block_size: int, num_heads: int, is_layer_major: bool) -> KVSlots:
    """Of 11 blocks and 2 layers; numbers are small whole ones, of which every vector has a 127. Of 4 bits any bytes."""
    outer = (2, 11) if is_layer_major else (11, 2)
    numbers = (normal(*outer, 2, block_size, num_heads, 20, dtype=torch.float32) * 20).round().clamp_(-127, 127)
    numbers[..., 3] = 127
    if dtype == torch.uint8:
        numbers = (numbers.int() & 255)[..., :10]
    scales = torch.full((*outer, 2, num_heads, block_size), 0.25, dtype=torch.bfloat16, device=DEVICE).transpose(3, 4)
    if is_layer_major:
        numbers, scales = numbers.transpose(0, 1), scales.transpose(0, 1)
    table = torch.randperm(11, generator=torch.Generator().manual_seed(block_size)).to(DEVICE)
    return KVSlots(numbers.to(dtype), table, 2, scales if dtype in LARGEST else None)


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize(("source_size", "target_size"), [(5, 5), (4, 7), (7, 3)])
def test_move_kv(source_size: int, target_size: int, source_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    """Two heads out of five go into three, over blocks of another size and axes in another order."""
    source = pool(source_dtype, source_size, 5, is_layer_major=True)
    found: list[tuple[torch.Tensor, ...]] = []
    for run in (move_kv_twin, move_kv_triton):
        target = pool(target_dtype, target_size, 3, is_layer_major=False)
        run(heads(source, 2), heads(target, 1), 5, 24)
        found.append((target.numbers,) if target.scales is None else (target.numbers, target.scales))
    for expected, ours in zip(*found, strict=True):
        assert torch.equal(expected, ours)
    untouched = pool(target_dtype, target_size, 3, is_layer_major=False)
    assert torch.equal(found[0][0][..., 0, :], untouched.numbers[..., 0, :])
    assert not torch.equal(found[0][0], untouched.numbers)


def test_bytes_of_float8_are_moved_with_their_scales() -> None:
    source, found = pool(torch.int8, 4, 2, is_layer_major=True), list[KVSlots]()
    for run in (move_kv_twin, move_kv_triton):
        target = pool(torch.int8, 7, 2, is_layer_major=False)
        for slots in (source, target):
            assert slots.scales is not None
            slots.scales.copy_(normal(*slots.scales.shape, dtype=torch.bfloat16, seed=slots.numbers.shape[3]))
        run(as_float8(source), as_float8(target), 5, 24)
        found.append(target)
    assert torch.equal(found[0].numbers, found[1].numbers)
    assert found[0].scales is not None and found[1].scales is not None
    assert torch.equal(found[0].scales, found[1].scales)


def as_float8(slots: KVSlots) -> KVSlots:
    return replace(slots, numbers=slots.numbers.view(FP8))


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_move_of_one_vector_a_token(target_dtype: torch.dtype) -> None:
    """Of latents, which are no key and value."""
    source, found = latents(pool(torch.float32, 4, 1, is_layer_major=True)), []
    for run in (move_kv_twin, move_kv_triton):
        target = latents(pool(target_dtype, 7, 1, is_layer_major=False))
        run(source, target, 5, 24)
        found.append(target.numbers)
    assert torch.equal(*found)


def latents(slots: KVSlots) -> KVSlots:
    return KVSlots(slots.numbers[:, :, :1].contiguous(), slots.table, slots.start)


def heads(slots: KVSlots, first: int) -> KVSlots:
    """Two of them."""
    scales = None if slots.scales is None else slots.scales.narrow(4, first, 2)
    return KVSlots(slots.numbers.narrow(4, first, 2), slots.table, slots.start, scales)
