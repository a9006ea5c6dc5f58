"""Whole blocks of kivi in numpy are those of the torch kernel, bit for bit, and move between unlike pools."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from diptych.kernels.kv.kivi import round_blocks, widen_blocks
from diptych.workers.common.errors import LayoutMismatch
from diptych.workers.kv.bridge import Bridge
from diptych.workers.kv.device_kv import Staged
from diptych.workers.kv.dtypes import GROUP, KIVI, vector_bytes
from diptych.workers.kv.kivi import Floats, head_block_bytes, rounded, widened
from diptych.workers.kv.layout import DOT, LAYER_MAJOR, ROWS, SCALES_LAST, KVLayout
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.packing import unpacked
from diptych.workers.kv.segment import Read, Segment
from diptych.workers.kv.wire import STORAGE, stored, widen

from ...support.gpu.fake_cuda import make_device_memory, seen_by_host
from ...support.handoff_pair import make_memory
from .test_bridge import bring


@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (3, 96), (2, 128)])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-36, 1e30])
def test_numpy_rounds_as_torch_does(heads: int, dim: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(5, 2, GROUP, heads, dim, generator=generator) * scale
    rows[1, :, :, :, 3] += 40 * scale  # a channel of large numbers
    rows[2, 0], rows[3, 1, 4:9, 0, 1] = 0.0, torch.nan
    rows[3, 0, 2, 0, 0], rows[4, 1, 5, 0, 2] = torch.inf, -torch.inf
    pool = torch.zeros(7, 2, heads, head_block_bytes(dim), dtype=torch.uint8)
    pairs = torch.tensor([[0, 6], [1, 1], [2, 3], [3, 2], [4, 0]])
    round_blocks(rows, pool, pairs)
    blocks = rounded(rows.numpy())
    assert np.array_equal(blocks, pool[pairs[:, 1]].numpy())
    keys, values = widen_blocks(pool, pairs[:, 1])
    found = widened(blocks, dim)
    for own, expected in ((found[:, 0], keys), (found[:, 1], values)):
        assert np.array_equal(own.reshape(expected.shape), expected.numpy(), equal_nan=True)
    assert blocks.shape[-1] == GROUP * vector_bytes(KIVI, dim) == 20 * dim


KEPT = KVLayout("kivi", GROUP, 3, 4, 32, "m")
WIDE = replace(KEPT, dtype="float32")
TABLE, NUM_BLOCKS = (5, 0, 3, 2, 1, 4), 6
PEERS = [
    replace(KEPT, tensor_parallel=2),
    replace(KEPT, tensor_parallel=4, axis_order=LAYER_MAJOR),
    replace(WIDE, block_size=64),
    replace(WIDE, tensor_parallel=2, block_size=96, dtype="bfloat16"),
    replace(WIDE, dtype="int8", packing=DOT),
]


def rows_of(memory: KVMemory, blocks: Sequence[int]) -> Floats:
    """KV of these blocks of a pool, [layers, 2, tokens, heads, 32], as the numbers that its bytes stand for."""
    layout, view = memory.layout, memory.region.view
    assert view is not None
    runs = layout.runs(memory.num_blocks, blocks, 0, layout.num_layers)
    data = b"".join(view[s : s + n] for s, n in zip(runs.offsets.tolist(), runs.lengths.tolist(), strict=True))
    heads, (num, layers) = layout.heads_per_rank, (len(blocks), layout.num_layers)
    pieces = np.frombuffer(data, np.uint8).reshape(-1, layout.layer_bytes)
    if layout.has_tail:
        found = widened(pieces.reshape(-1, 2, heads, head_block_bytes(32)), 32)
    else:
        vectors = pieces.view(STORAGE[layout.dtype])
        rows = unpacked(vectors, layout) if layout.packing != ROWS else vectors
        found = widen(np.ascontiguousarray(rows).data, layout.dtype, "float32", 32)
        found = found.reshape(-1, 2, layout.block_size, heads, 32)
    order = (layout.tensor_parallel, num, layers) if layout.is_block_major else (layout.tensor_parallel, layers, num)
    by_rank = found.reshape(*order, 2, layout.block_size, heads, 32)
    by_rank = by_rank if layout.is_block_major else by_rank.swapaxes(1, 2)
    return by_rank.transpose(2, 3, 1, 4, 0, 5, 6).reshape(layers, 2, -1, layout.num_kv_heads, 32)


def filled(layout: KVLayout) -> KVMemory:
    memory = make_memory(layout, NUM_BLOCKS)
    numbers = np.random.default_rng(1).standard_normal(memory.region.num_bytes // 4, dtype=np.float32)
    if layout.dtype == "bfloat16":
        numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16).repeat(2)
    elif layout.dtype != "float32":  # bytes whose halves are bfloat16s of a usual size
        numbers = np.random.default_rng(1).choice(np.arange(0x38, 0x47, dtype=np.uint8), memory.region.num_bytes)
    assert memory.region.view is not None
    memory.region.view[: numbers.nbytes] = numbers.tobytes()
    return memory


@pytest.mark.parametrize("peer", PEERS, ids=str)
@pytest.mark.parametrize("num_held", [0, 1])
def test_whole_blocks_move_between_unlike_pools(peer: KVLayout, num_held: int) -> None:
    """To ranks that are others as they are; to and from other dtypes as each side's numbers say."""
    for source_layout, own_layout in ((peer, KEPT), (KEPT, peer)):
        source, ours = filled(source_layout), make_memory(own_layout, NUM_BLOCKS)
        bridge = Bridge(ours, source_layout, NUM_BLOCKS)
        num_source = len(TABLE) * GROUP // source_layout.block_size
        theirs = TABLE[:num_source]
        segment = Segment(0, theirs, (1,) * num_source, 0, KEPT.num_layers)
        own = TABLE[: num_source * source_layout.block_size // own_layout.block_size]
        first_token = num_held * max(GROUP, own_layout.block_size)
        bring(bridge, source, ours, Read(0, segment, own, first_token))
        sent, found = rows_of(source, theirs), rows_of(ours, own)
        sent, found = (rows[:, :, first_token : found.shape[2]] for rows in (sent, found))
        match own_layout.dtype:
            case "kivi" if source_layout.has_tail:
                expected = sent
            case "kivi":
                blocks = sent.reshape(*sent.shape[:2], -1, GROUP, *sent.shape[3:]).swapaxes(1, 2)
                expected = widened(rounded(blocks.reshape(-1, *blocks.shape[2:])), 32)
                expected = expected.reshape(blocks.shape).swapaxes(1, 2).reshape(sent.shape)
            case dtype:
                vectors = stored(sent.reshape(-1, 32), dtype)
                expected = widen(np.ascontiguousarray(vectors).data, dtype, "float32", 32).reshape(sent.shape)
        assert found.size and np.array_equal(found, expected)


def test_what_cannot_be_converted_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="block_size: 32 here, 48 there: both must be multiples of 32, the"):
        Bridge(make_memory(KEPT, 4), replace(WIDE, block_size=48), 4)


@pytest.mark.parametrize("peer", [*PEERS, KEPT, replace(WIDE, dtype="int8", packing=SCALES_LAST)], ids=str)
@pytest.mark.parametrize("num_held", [0, 1])
def test_a_device_stores_the_bytes_that_a_host_does(peer: KVLayout, num_held: int) -> None:
    """Of whole blocks that come and go between unlike pools, in parts and at once."""
    on_gpus = [layout for layout in (KEPT, peer) if layout.packing != DOT]
    for own_layout in on_gpus:
        source_layout = peer if own_layout is KEPT else KEPT
        source, host = filled(source_layout), make_memory(own_layout, NUM_BLOCKS)
        device = make_device_memory(own_layout, NUM_BLOCKS)
        num_source = len(TABLE) * GROUP // source_layout.block_size
        segment = Segment(0, TABLE[:num_source], (1,) * num_source, 0, KEPT.num_layers)
        own = TABLE[: num_source * source_layout.block_size // own_layout.block_size]
        first_token = num_held * max(GROUP, own_layout.block_size)
        sent = b"".join(source.read(source.runs(segment.block_ids, 0, KEPT.num_layers)))
        Bridge(host, source_layout, NUM_BLOCKS).convert(memoryview(sent), segment, own, first_token)
        assert device.device is not None
        device.device.staging.view[: len(sent)] = sent
        bridge, staged = Bridge(device, source_layout, NUM_BLOCKS), Staged(segment, 0, len(sent), is_on_device=False)
        device.device.convert(bridge, staged, own, first_token)
        assert seen_by_host(device).region.view == host.region.view and any(host.region.view or b"")
