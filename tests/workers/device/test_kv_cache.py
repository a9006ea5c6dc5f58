"""The KV pool: its bytes are at the addresses of KVMemory, and its size is the requested one, within limits."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from diptych.kernels.cpu.attention import is_packed, pack
from diptych.kernels.cpu.library import Library
from diptych.kernels.cpu.load import library
from diptych.kernels.kv.kv_scales import quantise
from diptych.workers.common.errors import ConfigError
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.kv_cache import KVCache
from diptych.workers.device.kv_convert import STORED
from diptych.workers.kv.dtypes import stored_size
from diptych.workers.kv.layout import DOT, LAYER_MAJOR, ROWS, SCALES_LAST, KVLayout, Shape
from diptych.workers.kv.packing import unpacked
from diptych.workers.kv.scaled import quantised
from diptych.workers.models.plan.kv_plan import MAX_CONTEXTS, plan_num_blocks

from ...support.gpu.fake_cuda import seen_by_host
from ...support.handoff_pair import memory_bytes

LAYOUT = KVLayout(dtype="float32", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8, model_id="test")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_describes_the_tensor(dtype: str) -> None:
    layout = KVLayout(dtype=dtype, block_size=4, num_layers=3, num_kv_heads=2, head_dim=8, model_id="test")
    cache = KVCache(layout, 5, torch.device("cpu"))
    memory = cache.memory
    assert cache.tensor.shape == (5, 3, 2, 4, 2, 8)
    assert cache.tensor.is_contiguous()
    assert not cache.tensor.any()
    view = memory.region.view
    assert view is not None
    assert memory.region.num_bytes == cache.tensor.numel() * cache.tensor.element_size() == len(view)
    assert memory.region.address == cache.tensor.data_ptr()

    cache.layer(1)[2].normal_(generator=torch.Generator().manual_seed(0))
    runs = memory.runs([2], 1, 1)
    (offset,), (length,) = runs.offsets.tolist(), runs.lengths.tolist()
    assert bytes(view[offset : offset + length]) == cache.tensor[2, 1].contiguous().view(torch.uint8).numpy().tobytes()
    view[offset : offset + length] = bytes(length)
    assert not cache.tensor.any()


def test_the_pool_is_as_large_as_asked_up_to_its_cap() -> None:
    block = LAYOUT.block_bytes
    assert plan_num_blocks(LAYOUT, max_context_tokens=10, num_bytes=100 * block + 1) == 100
    assert plan_num_blocks(LAYOUT, max_context_tokens=10, num_bytes=10**15) == 3 * MAX_CONTEXTS
    assert plan_num_blocks(LAYOUT, max_context_tokens=10, num_bytes=3 * block) == 3


def test_a_pool_that_cannot_hold_one_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one context of 10 tokens needs .* lower max_context_tokens to 8 or less"):
        plan_num_blocks(LAYOUT, max_context_tokens=10, num_bytes=3 * LAYOUT.block_bytes - 1)
    with pytest.raises(ConfigError, match=r"raise kv_memory_bytes \(or the memory fraction\)$"):
        plan_num_blocks(LAYOUT, max_context_tokens=10, num_bytes=LAYOUT.block_bytes - 1)


def test_a_pool_that_cannot_be_mapped_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be mapped"):
        KVCache(LAYOUT, (1 << 60) // LAYOUT.block_bytes, torch.device("cpu"))


def test_layer_major_is_the_same_cache_with_another_outer_axis() -> None:
    layout = replace(LAYOUT, axis_order=LAYER_MAJOR)
    cache, other = KVCache(layout, 5, torch.device("cpu")), KVCache(LAYOUT, 5, torch.device("cpu"))
    assert cache.tensor.shape == (3, 5, 2, 4, 2, 8)
    for i in range(3):
        assert cache.layer(i).shape == other.layer(i).shape == (5, 2, 4, 2, 8)
    cache.layer(2)[4].fill_(1.0)
    runs = cache.memory.runs([4], 2, 1)
    view = cache.memory.region.view
    assert view is not None and len(runs.offsets) == 1
    start, length = int(runs.offsets[0]), int(runs.lengths[0])
    assert bytes(view[start : start + length]) == torch.ones(length // 4).numpy().tobytes()
    assert cache.tensor.count_nonzero() == length // 4


def test_a_packed_layer_is_as_the_kernels_take_it() -> None:
    layout = KVLayout(
        "bfloat16", block_size=32, num_layers=3, num_kv_heads=4, head_dim=16, model_id="test", packing=DOT
    )
    cache = KVCache(layout, 5, torch.device("cpu"))
    assert cache.layer(1).shape == (5, 2, 4, 2, 16 * 16) and is_packed(cache.layer(1))
    rows = torch.randn(5, 2, 32, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache.layer(1).copy_(pack(rows))
    runs, view = cache.memory.runs([2], 1, 1), cache.memory.region.view
    assert view is not None
    piece = np.frombuffer(view, np.uint16, layout.layer_bytes // 2, int(runs.offsets[0]))
    assert (unpacked(piece, layout)[0] == rows[2].view(torch.uint16).numpy()).all()


def test_a_latent_is_one_vector() -> None:
    layout = replace(LAYOUT, num_kv_heads=1, head_dim=40, num_vectors=1)
    assert layout.block_bytes == 4 * 3 * 40 * 4  # slots, layers, numbers, bytes of each
    assert not replace(layout, block_size=16, head_dim=48).can_be_dot
    cache = KVCache(layout, 5, torch.device("cpu"))
    assert cache.memory.region.num_bytes == 5 * layout.block_bytes
    assert cache.layer(1).shape == (5, 1, 4, 1, 40)


@pytest.mark.parametrize("order", [LAYER_MAJOR, LAYOUT.axis_order])
def test_unlike_layers_have_the_bytes_that_they_need(order: str) -> None:
    layout = replace(LAYOUT, axis_order=order, layer_shapes=((2, 8), (2, 8), (1, 40)))
    assert layout.block_bytes == 2 * 4 * (2 * 2 * 8 + 40) * 4
    cache = KVCache(layout, 5, torch.device("cpu"))
    assert [cache.layer(i).shape for i in range(3)] == [(5, 2, 4, 2, 8)] * 2 + [(5, 2, 4, 1, 40)]
    view = cache.memory.region.view
    assert view is not None and len(view) == 5 * layout.block_bytes
    for i in range(3):
        cache.layer(i).fill_(i + 1)  # whole layers: what one has is no other's
    for i in range(3):
        assert (cache.layer(i) == i + 1).all()
        runs = cache.memory.runs([4], i, 1)
        (start,), (length,) = runs.offsets.tolist(), runs.lengths.tolist()
        assert bytes(view[start : start + length]) == cache.layer(i)[4].contiguous().numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", [LAYER_MAJOR, LAYOUT.axis_order])
@pytest.mark.parametrize("kernels", [None, library()], ids=["torch", "compiled"])
def test_packed_layers_of_a_target_and_its_draft_are_unlike(order: str, dtype: str, kernels: Library | None) -> None:
    shapes = ((4, 16), (4, 16), (2, 48))
    layout = KVLayout(
        dtype, 32, 3, *shapes[0], "test", order, packing=DOT, layer_shapes=shapes, num_draft_layers=1, draft_id="d"
    )
    cache = KVCache(layout, 5, torch.device("cpu"), library=kernels)
    generator, view = torch.Generator().manual_seed(0), cache.memory.region.view
    rows = [torch.randn(5, 2, 32, *shape, generator=generator).to(cache.tensor.dtype) for shape in shapes]
    for i, (heads, dim) in enumerate(shapes):
        assert cache.layer(i).shape == (5, 2, heads, 2, 16 * dim) and is_packed(cache.layer(i))
        cache.layer(i).copy_(pack(rows[i]))
    assert view is not None
    cache.copy_blocks([(2, 4)])
    number, of = {"float32": (np.uint32, torch.uint32), "bfloat16": (np.uint16, torch.uint16)}[dtype]
    for group in layout.layer_groups(0, 3):
        for i in group.layers:
            for block, source in ((2, 2), (4, 2), (3, 3)):
                runs = cache.memory.runs([block], i, 1)
                start, length = int(runs.offsets[0]), int(runs.lengths[0])
                piece = np.frombuffer(view[start : start + length], number)
                assert (unpacked(piece, group.uniform)[0] == rows[i][source].view(of).numpy()).all()


@pytest.mark.parametrize("order", [LAYER_MAJOR, LAYOUT.axis_order])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_numbers_and_scales_of_a_gpus_packing_are_views_of_a_layers_bytes(order: str, dtype: str) -> None:
    """As a hand-off finds them; of layers that are unlike, and of a draft."""
    shapes = ((2, 8), (2, 8), (1, 40))
    layout = replace(LAYOUT, dtype=dtype, axis_order=order, packing=SCALES_LAST, layer_shapes=shapes)
    layout = replace(layout, num_draft_layers=1, draft_id="d")
    cache = KVCache(layout, 5, torch.device("cpu"), gpu=FakeDevice(is_late=False))
    memory = seen_by_host(cache.memory)
    for group in layout.layer_groups(0, 3):
        for i in group.layers:
            numbers, scales = cache.parts(i)
            heads, dim = shapes[i]
            assert scales is not None and scales.shape == (5, 2, 4, heads)
            assert numbers.shape == (*scales.shape, stored_size(dtype, dim))
            assert scales.stride(2) == 1, "slots side by side"
            rows = torch.randn(*scales.shape, dim, generator=torch.Generator().manual_seed(i))
            stored, own = quantise(rows, numbers.dtype)
            numbers.copy_(stored)
            scales.copy_(own)
            piece = memory_bytes(memory, memory.runs([3], i, 1))
            found = unpacked(np.frombuffer(piece, np.uint8), group.uniform)
            assert found.tobytes() == quantised(rows[3].reshape(-1, dim).numpy(), dtype).tobytes()


@pytest.mark.parametrize("order", [LAYER_MAJOR, LAYOUT.axis_order])
@pytest.mark.parametrize("packing", [ROWS, DOT])
@pytest.mark.parametrize("kernels", [None, library()], ids=["torch", "compiled"])
def test_blocks_are_copied_whole_and_only_where_asked(order: str, packing: str, kernels: Library | None) -> None:
    layout = replace(LAYOUT, axis_order=order, packing=packing, block_size=16, head_dim=16)
    cache = KVCache(layout, 5, torch.device("cpu"), library=kernels)
    cache.tensor.normal_(generator=torch.Generator().manual_seed(0))
    for i in range(3):
        cache.layer(i)[[1, 3]] = torch.nan
    before = [cache.layer(i).clone() for i in range(3)]
    cache.copy_blocks([])
    cache.copy_blocks([(0, 3), (0, 1)])
    for i in range(3):
        assert torch.equal(cache.layer(i), before[i][[0, 0, 2, 0, 4]])


@pytest.mark.parametrize("order", [LAYER_MAJOR, LAYOUT.axis_order])
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("kernels", [None, library()], ids=["torch", "compiled"])
def test_blocks_of_every_dtype_are_copied_byte_by_byte(order: str, dtype: str, kernels: Library | None) -> None:
    layout = replace(LAYOUT, axis_order=order, dtype=dtype, block_size=32, head_dim=32)
    memory = (cache := KVCache(layout, 5, torch.device("cpu"), library=kernels)).memory
    assert memory.region.view is not None
    random = torch.randint(256, (memory.region.num_bytes,), generator=torch.Generator().manual_seed(0))
    memory.region.view[:] = random.to(torch.uint8).numpy().tobytes()
    before = [[memory_bytes(memory, memory.runs([block], i, 1)) for block in range(5)] for i in range(3)]
    cache.copy_blocks([(0, 3), (0, 1)])
    for i in range(3):
        after = [memory_bytes(memory, memory.runs([block], i, 1)) for block in range(5)]
        assert after == [before[i][block] for block in (0, 0, 2, 0, 4)]


@pytest.mark.parametrize("shapes", [(), ((2, 8), (1, 16), (1, 16))], ids=["alike", "unlike"])
@pytest.mark.parametrize("order", [LAYER_MAJOR, LAYOUT.axis_order])
@pytest.mark.parametrize("kernels", [None, library()], ids=["torch", "compiled"])
def test_blocks_are_copied_in_every_rank(order: str, kernels: Library | None, shapes: tuple[Shape, ...]) -> None:
    memory_fd = os.memfd_create("test-kv")
    layout = replace(LAYOUT, axis_order=order, tensor_parallel=2, layer_shapes=shapes)
    cpu = torch.device("cpu")
    try:
        first = KVCache(layout, 3, cpu, shared=memory_fd, library=kernels)
        second = KVCache(layout, 3, cpu, rank=1, shared=memory_fd)
    finally:
        os.close(memory_fd)
    second.tensor.normal_(generator=torch.Generator().manual_seed(0))
    before = [second.layer(i).clone() for i in range(3)]
    first.copy_blocks([(2, 0)])
    for i in range(3):
        assert torch.equal(second.layer(i), before[i][[2, 1, 2]])


@pytest.mark.parametrize("order", [LAYER_MAJOR, LAYOUT.axis_order])
def test_the_first_rank_has_all_heads_of_a_draft_that_it_computes_alone(order: str) -> None:
    shapes, memory_fd, cpu = ((2, 8), (2, 8), (3, 8)), os.memfd_create("test-kv"), torch.device("cpu")
    layout = replace(LAYOUT, axis_order=order, tensor_parallel=2, layer_shapes=shapes, num_draft_layers=1)
    layout = replace(layout, draft_id="d", draft_tensor_parallel=1)
    try:
        first = KVCache(layout, 5, cpu, shared=memory_fd)
        second = KVCache(layout, 5, cpu, rank=1, shared=memory_fd)
    finally:
        os.close(memory_fd)
    assert [first.layer(i).shape for i in range(3)] == [(5, 2, 4, 1, 8)] * 2 + [(5, 2, 4, 3, 8)]
    for i in range(2):
        second.layer(i).fill_(i + 1)
    first.layer(2)[3].normal_(generator=torch.Generator().manual_seed(0))
    view = first.memory.region.view
    assert view is not None and len(view) == 5 * layout.block_bytes
    runs = first.memory.runs([3], 2, 1)
    (offset,), (length,) = runs.offsets.tolist(), runs.lengths.tolist()
    assert bytes(view[offset : offset + length]) == first.layer(2)[3].contiguous().view(torch.uint8).numpy().tobytes()
    assert [second.layer(i).unique().tolist() for i in range(2)] == [[1.0], [2.0]], "nobody writes into another's part"


@pytest.mark.parametrize("order", [LAYER_MAJOR, LAYOUT.axis_order])
def test_ranks_on_a_fake_device_share_a_memory_file(order: str) -> None:
    memory_fd, cpu = os.memfd_create("test-kv"), torch.device("cpu")
    layout = replace(LAYOUT, axis_order=order, tensor_parallel=2)
    try:
        first = KVCache(layout, 5, cpu, shared=memory_fd, gpu=FakeDevice())
        second = KVCache(layout, 5, cpu, rank=1, shared=memory_fd, gpu=FakeDevice(is_late=False))
    finally:
        os.close(memory_fd)
    second.layer(1)[3].fill_(2.0)
    first.layer(1)[3].fill_(1.0)
    memory = first.memory
    assert memory.region.view is None and memory.device is not None and second.memory.device is None
    assert memory.region.num_bytes == 5 * layout.block_bytes
    read = torch.frombuffer(bytearray(memory.device.read(memory.runs([3], 1, 1))), dtype=torch.float32)
    assert read.view(2, -1).mean(dim=1).tolist() == [1.0, 2.0], "rank by rank"
    assert first.by_block[0].shape[0] == second.by_block[0].shape[0] == 5, "of one's own"
