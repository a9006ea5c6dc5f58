"""Between any two layouts every byte arrives where a simple loop puts it, and no other byte changes."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.proto import kv_pb2
from diptych.workers.common.errors import LayoutMismatch, TransportError
from diptych.workers.handoff.wire_chunks import wire_runs
from diptych.workers.kv.bridge import PART_BYTES, Bridge
from diptych.workers.kv.checksums import pool_checksums
from diptych.workers.kv.dtypes import is_scaled, stored_size, vector_bytes
from diptych.workers.kv.layout import BLOCK_MAJOR, DOT, LAYER_MAJOR, ROWS, SCALES_LAST, KVLayout, Shape
from diptych.workers.kv.layout_check import check_bridge
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.packing import to_wire
from diptych.workers.kv.scaled import dequantised, quantised
from diptych.workers.kv.segment import CHECKSUM_BYTES, Read, Segment
from diptych.workers.kv.wire import STORAGE, on_the_wire, piece_bytes
from diptych.workers.transport.runs import gather

from ...support.handoff_pair import SMALL, make_memory

POISON = 0xA5
NUM_LAYERS = 3
NUM_DRAFT = 2  # layers of a draft, beside those
DIM = 16
UNLIKE = ((4, 16), (1, 48), (4, 16))
HAVE_KEYS = "ce"  # of drafts, those with keys and values beside latents too
DRAFTED = {"num_draft_layers": 1, "draft_id": "d"}  # beside shapes of which the last one is a draft's


def num_ranks(layout: KVLayout, layer: int) -> int:
    """Ranks that a layer's heads are divided over."""
    is_draft = layer >= layout.num_layers - layout.num_draft_layers
    return 1 if is_draft and layout.draft_tensor_parallel == 1 else layout.tensor_parallel


def num_vectors_of(layout: KVLayout, layer: int) -> int:
    is_draft = layer >= layout.num_layers - layout.num_draft_layers
    return layout.draft_num_vectors if is_draft and layout.draft_num_vectors else layout.num_vectors


def index(layout: KVLayout, num_blocks: int, at: tuple[int, int, int, int, int, int]) -> np.ndarray:
    """Of the elements of a vector, its scale first, counted from the pool's start; at = rank, block, layer, kv, slot,
    head within the rank. By the words of kv/layout.py and kv/packing.py, one axis after the other."""
    rank, block, layer, kv, slot, head = at
    shapes = layout.layer_shapes or ((layout.num_kv_heads, layout.head_dim),) * layout.num_layers
    own = [(max(heads // num_ranks(layout, i), 1), dim) for i, (heads, dim) in enumerate(shapes)]
    own = [(heads, stored_size(layout.dtype, dim)) for heads, dim in own]
    scale = 2 if is_scaled(layout.dtype) else 0  # elements: a scaled cache is of bytes
    slots = [num_vectors_of(layout, i) * layout.block_size for i in range(layout.num_layers)]
    sizes = [num * heads * (dim + scale) for num, (heads, dim) in zip(slots, own, strict=True)]
    start, (heads, dim) = rank * num_blocks * sum(sizes), own[layer]
    if layout.axis_order == BLOCK_MAJOR:
        start += block * sum(sizes) + sum(sizes[:layer])
    else:
        start += num_blocks * sum(sizes[:layer]) + block * sizes[layer]
    d = np.arange(dim)
    if layout.packing == ROWS:
        return start + ((kv * layout.block_size + slot) * heads + head) * (dim + scale) + np.arange(dim + scale)
    if layout.packing == SCALES_LAST:
        vector = (kv * layout.block_size + slot) * heads + head
        by_head = (kv * heads + head) * layout.block_size + slot
        numbers = start + vector * dim + d
        return np.concatenate((start + 2 * layout.block_size * heads * dim + 2 * by_head + np.arange(2), numbers))
    pair = 2 if layout.dtype == "bfloat16" else 1
    group, s = divmod(slot, 16)
    start += ((kv * heads + head) * (layout.block_size // 16) + group) * 16 * (dim + scale)
    scales = start + 16 * dim + s * scale + np.arange(scale)
    if kv == 0:
        return np.concatenate((scales, start + (d // pair * 16 + s) * pair + d % pair))
    return np.concatenate((scales, start + (s // pair * dim + d) * pair + s % pair))


def holders(layout: KVLayout, layer: int, head: int) -> list[tuple[int, int]]:
    """(rank, head within it) of every copy of a head of the model."""
    ranks, heads = num_ranks(layout, layer), layout.shape_of(layer)[0]
    if heads >= ranks:
        return [divmod(head, heads // ranks)]
    return [(rank, 0) for rank in range(ranks) if rank // (ranks // heads) == head]


def numbers(memory: KVMemory) -> np.ndarray:
    assert memory.region.view is not None
    return np.frombuffer(memory.region.view, STORAGE[memory.layout.dtype])


def fill(memory: KVMemory, seed: int) -> None:
    """Random numbers; in a scaled cache any two bytes are a scale of a usual size, or two numbers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(memory.region.num_bytes // 2, dtype=np.float32)
    match memory.layout.dtype:
        case "float32":
            numbers(memory)[:] = values[: len(numbers(memory))]
        case "bfloat16":
            numbers(memory)[:] = (values.view(np.uint32) >> 16).astype(np.uint16)[: len(numbers(memory))]
        case _:
            usual = [*range(0x38, 0x47), *range(0xB8, 0xC7)]
            numbers(memory)[:] = rng.choice(np.array(usual, dtype=np.uint8), memory.region.num_bytes)


def converted(vector: np.ndarray, there: str, here: str) -> np.ndarray:
    """One vector of a cache as another dtype has it, number by number."""
    if there == here:
        return vector
    values = numbers_of(vector, there)
    if here == "float32":
        return values
    if here == "int4":
        return quantised(values[None], here)[0]
    if here == "bfloat16":
        return np.array([nearest_bfloat16(value) for value in values], dtype=np.uint16)
    largest, most = np.abs(values).max(), np.float32({"int8": 127, "fp8": 448}[here])
    exact = int((largest / most).reshape(1).view(np.uint32)[0])
    half = exact // 65536 + (exact % 65536 > 0)  # the least bfloat16 that is not less
    scaled = values * (np.float32(1) / np.array([half << 16], dtype=np.uint32).view(np.float32))
    codes = np.rint(scaled).astype(np.int8) if here == "int8" else [nearest_fp8(value) for value in scaled]
    return np.concatenate((np.array([half], dtype=np.uint16).view(np.uint8), np.array(codes).astype(np.uint8)))


def numbers_of(vector: np.ndarray, dtype: str) -> np.ndarray:
    """What a vector of a cache stands for."""
    if dtype == "float32":
        return vector
    if dtype == "bfloat16":
        return (vector.astype(np.uint32) << 16).view(np.float32)
    if dtype == "int4":  # tests/kernels/cpu/test_scaled_attention.py has its arithmetic
        return dequantised(vector[None], dtype)[0]
    return (vector[:2].view(np.uint16).astype(np.uint32) << 16).view(np.float32) * stored(vector[2:], dtype)


def stored(codes: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "int8":
        return codes.view(np.int8).astype(np.float32)
    return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()


def nearest_fp8(value: np.float32) -> int:
    return int(torch.tensor([float(value)]).to(torch.float8_e4m3fn).view(torch.uint8))


def nearest_bfloat16(value: np.float32) -> int:
    """By float64 and a search for the nearest even."""
    below = int(value.view(np.uint32)) >> 16
    near = [np.uint32(bits << 16).view(np.float32) for bits in (below, below + 1)]
    gaps = [abs(float(value) - float(candidate)) for candidate in near]
    return below + (gaps[1] < gaps[0] or (gaps[1] == gaps[0] and below % 2 == 1))


def sent(source: KVMemory, segment: Segment, wire: str) -> bytes:
    """What Pull answers, in chunks of any size."""
    view, found = source.region.view, b""
    assert view is not None
    for part in wire_runs(source, segment, wire, 1000):
        for piece in gather(view, part.runs, part.chunk_bytes):
            found += piece if wire == source.layout.dtype else to_wire(piece, part.uniform, wire)
    return found


def bring(bridge: Bridge, source: KVMemory, ours: KVMemory, read: Read) -> None:
    """What a SegmentReceiver does, without sockets."""
    assert source.region.view is not None and ours.region.view is not None
    if bridge.is_direct(read):
        copies = bridge.direct(read)
        for far, near, length in zip(copies.remote, copies.local, copies.lengths, strict=True):
            ours.region.view[near : near + length] = source.region.view[far : far + length]
        return
    for part in bridge.parts(read.segment, whole_blocks=False):
        staging = memoryview(bytearray(bridge.num_bytes(part)))
        if bridge.wire == source.layout.dtype:
            copies = bridge.staged(part, 0)
            for far, near, length in zip(copies.remote, copies.local, copies.lengths, strict=True):
                staging[near : near + length] = source.region.view[far : far + length]
        else:
            staging[:] = sent(source, part, bridge.wire)
        bridge.convert(staging, part, read.table, read.first_token)


@st.composite
def layouts(draw: st.DrawFn, shapes: tuple[Shape, ...], num_vectors: int, draft_id: str = "") -> KVLayout:
    """shapes: of its layers, of which the last NUM_DRAFT are those of the draft, where there is one."""
    is_unlike = len(set(shapes)) > 1
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int8", "fp8", "int4"]))
    can_be_dot = num_vectors == 2 and all(stored_size(dtype, dim) % 16 == 0 for _, dim in shapes)
    is_even = all(vector_bytes(dtype, dim) % 2 == 0 for _, dim in shapes)
    can_be = {ROWS: True, DOT: can_be_dot, SCALES_LAST: num_vectors == 2 and is_scaled(dtype) and is_even}
    packing = draw(st.sampled_from([packing for packing, can in can_be.items() if can]))
    sizes = {
        ROWS: st.integers(1, 64),
        DOT: st.sampled_from([16, 32, 48, 64]),
        SCALES_LAST: st.sampled_from([4, 16, 60]),
    }
    return KVLayout(
        dtype,
        draw(sizes[packing]),
        len(shapes),
        *shapes[0],
        "m",
        draw(st.sampled_from([BLOCK_MAJOR, LAYER_MAJOR])),
        draw(st.sampled_from([1, 2, 4])),
        packing,
        num_vectors,
        shapes if is_unlike else (),
        NUM_DRAFT if draft_id else 0,
        draft_id,
        draft_tensor_parallel=draw(st.sampled_from([0, 1])) if draft_id else 0,
        draft_num_vectors=2 if draft_id in HAVE_KEYS else 0,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVLayout, KVLayout, int, int, int]:
    """(source, ours, tokens, tokens held, seed)."""
    first, other = (draw(st.sampled_from([1, 2, 4, 8])) for _ in range(2))
    num_vectors = draw(st.sampled_from([2, 2, 1]))
    a, b, c = (first, DIM), (other, draw(st.sampled_from([DIM, 6]))), (other, draw(st.sampled_from([2 * DIM, 6])))
    shapes = draw(st.sampled_from([(a, a, a), (a, a, a), (a, b, a), (a, a, b), (b, a, a)]))
    drafts = {"": (), "a": (a, a), "c": (a, c), "d": (c, c), "e": (b, a)}
    there, here = draw(
        st.sampled_from([("", ""), ("a", "a"), ("d", "d"), ("c", "c"), ("c", "e"), ("", "d"), ("a", "")])
    )
    source = draw(layouts(shapes + drafts[there], num_vectors, there))
    ours = draw(layouts(shapes + drafts[here], num_vectors, here))
    if there == here and draw(st.booleans()):  # often a pair that moves directly, or nearly
        ours = replace(source, axis_order=ours.axis_order)
    num_tokens = draw(st.integers(1, 130))
    num_held = draw(st.integers(0, (num_tokens - 1) // ours.block_size)) * ours.block_size
    return source, ours, num_tokens, num_held, draw(st.integers(0, 1 << 30))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_number_arrives_and_nothing_else_is_touched(case: tuple[KVLayout, KVLayout, int, int, int]) -> None:
    theirs, layout, num_tokens, num_held, seed = case
    rng = random.Random(seed)
    num_theirs, num_ours = theirs.num_blocks_for(num_tokens), layout.num_blocks_for(num_tokens)
    source, ours = make_memory(theirs, num_theirs + 2), make_memory(layout, num_ours + 2)
    fill(source, seed)
    assert ours.region.view is not None
    ours.region.view[:] = bytes([POISON]) * ours.region.num_bytes
    ids = tuple(rng.sample(range(source.num_blocks), num_theirs))
    table = tuple(rng.sample(range(ours.num_blocks), num_ours))
    moves_draft = theirs.draft_id == layout.draft_id != ""
    some = [(0, NUM_LAYERS), (1, 2), (2, 1), *([(3, 2), (4, 1)] if moves_draft else [])]
    first, num_layers = rng.choice(some)
    whole = Segment(0, ids, (1,) * num_theirs, first, num_layers)
    segment = whole.within(num_held // theirs.block_size, len(whole.block_ids))
    bridge = Bridge(ours, theirs, source.num_blocks)
    assert bridge.brings_draft == moves_draft

    bring(bridge, source, ours, Read(0, segment, table, num_held))

    found, given_ = numbers(ours).copy(), numbers(source)
    poison = np.frombuffer(bytes([POISON]) * found.itemsize, found.dtype)[0]
    for token in range(num_held, num_ours * layout.block_size):
        far, slot_there = divmod(token, theirs.block_size)
        near, slot_here = divmod(token, layout.block_size)
        for layer in range(first, first + num_layers):
            for kv in range(num_vectors_of(layout, layer)):
                for head in range(layout.shape_of(layer)[0]):
                    for rank, local in holders(layout, layer, head):
                        at = index(layout, ours.num_blocks, (rank, table[near], layer, kv, slot_here, local))
                        if token < num_tokens:
                            there = (ids[far], layer, kv, slot_there)
                            wire_rank, wire_head = holders(theirs, layer, head)[0]
                            start = index(theirs, source.num_blocks, (wire_rank, *there, wire_head))
                            due = converted(given_[start], theirs.dtype, layout.dtype)
                            assert found[at].tobytes() == due.tobytes(), (token, layer, kv, head)
                        found[at] = poison  # beyond the tokens it may be anything
    assert (found.view(np.uint8) == POISON).all(), "something else was written"


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.parametrize("order", [BLOCK_MAJOR, LAYER_MAJOR])
@pytest.mark.parametrize(
    ("there", "here", "shapes", "drafted"),
    [
        (ROWS, ROWS, (), False),
        (ROWS, DOT, (), False),
        (DOT, DOT, (), False),
        (ROWS, ROWS, UNLIKE, False),
        (ROWS, DOT, UNLIKE, True),
        (DOT, ROWS, (UNLIKE[0], UNLIKE[0], UNLIKE[1]), True),
        (DOT, DOT, (UNLIKE[0], UNLIKE[0], UNLIKE[1]), True),
    ],
)
def test_a_narrower_wire_costs_precision_and_nothing_else(
    wire: str, order: str, there: str, here: str, shapes: tuple[Shape, ...], drafted: bool
) -> None:
    theirs = KVLayout("float32", 16, NUM_LAYERS, 4, 16, "m", order, 2, there, layer_shapes=shapes)
    theirs = replace(theirs, **DRAFTED) if drafted else theirs  # type: ignore[arg-type]
    source, ours = make_memory(theirs, 6), make_memory(replace(theirs, block_size=32, packing=here), 4)
    fill(source, 1)
    bridge = Bridge(ours, theirs, 6, wire)
    assert bridge.wire == wire
    segment = Segment(0, (4, 1, 2, 5), (1,) * 4, 0, NUM_LAYERS)
    bring(bridge, source, ours, Read(0, segment, (3, 0), 0))
    exact = make_memory(ours.layout, 4)
    bring(Bridge(exact, theirs, 6), source, exact, Read(0, segment, (3, 0), 0))
    error = np.linalg.norm(numbers(ours) - numbers(exact)) / np.linalg.norm(numbers(exact))
    assert 0 < error < {"bfloat16": 0.003, "int8": 0.01}[wire]


def test_large_blocks_go_in_parts() -> None:
    theirs = KVLayout("bfloat16", 64, 8, 8, 128, "m")  # 2 MiB a block
    bridge = Bridge(make_memory(replace(theirs, block_size=16), 1), theirs, 100)
    segment = Segment(3, tuple(range(5)), (1,) * 5, 0, 8, bytes(range(5 * CHECKSUM_BYTES)))
    parts = list(bridge.parts(segment, whole_blocks=True))
    assert [p.block_ids for p in parts] == [(0, 1), (2, 3), (4,)]
    assert [p.first_block for p in parts] == [3, 5, 7]
    assert b"".join(p.checksum for p in parts) == segment.checksum
    huge = replace(theirs, block_size=512)
    bridge = Bridge(make_memory(replace(theirs, block_size=16), 1), huge, 100)
    parts = list(bridge.parts(segment, whole_blocks=False))
    assert [(p.first_layer, p.num_layers) for p in parts[:4]] == [(0, 2), (2, 2), (4, 2), (6, 2)] and len(parts) == 20
    assert all(bridge.num_bytes(p) <= PART_BYTES for p in parts)
    assert len(list(bridge.parts(segment, whole_blocks=True))) == 5


def test_equal_layouts_move_whole_runs() -> None:
    source, ours = make_memory(SMALL, 8), make_memory(SMALL, 8)
    bridge = Bridge(ours, SMALL, 8)
    read = Read(0, Segment(0, (4, 5, 2), (1, 1, 1), 0, SMALL.num_layers), (1, 2, 7), 0)
    assert bridge.is_direct(read)
    assert bridge.direct(read).lengths.tolist() == [2 * SMALL.block_bytes, SMALL.block_bytes]
    layered = Bridge(ours, replace(SMALL, axis_order=LAYER_MAJOR), source.num_blocks)
    assert layered.is_direct(read)
    assert layered.direct(read).lengths.tolist() == [SMALL.layer_bytes] * 9
    assert not bridge.is_direct(replace(read, first_token=2))


@pytest.mark.parametrize("wire", ["", "int8"])
@pytest.mark.parametrize("order", [BLOCK_MAJOR, LAYER_MAJOR])
@pytest.mark.parametrize(("packing", "shapes"), [(ROWS, ()), (DOT, ()), (ROWS, UNLIKE), (DOT, UNLIKE)])
def test_both_sides_name_the_same_content_alike(order: str, wire: str, packing: str, shapes: tuple[Shape, ...]) -> None:
    theirs = KVLayout("float32", 16, NUM_LAYERS, 4, 16, "m", order, 2, packing, layer_shapes=shapes)
    theirs = replace(theirs, **DRAFTED)  # type: ignore[arg-type]
    source = make_memory(theirs, 6)
    fill(source, 2)
    assert source.region.view is not None
    ours = make_memory(replace(theirs, axis_order=BLOCK_MAJOR), 6)
    bridge = Bridge(ours, theirs, 6, wire)
    segment = Segment(0, (4, 1, 3), (1,) * 3, 1, 2)
    named = pool_checksums(source, segment.block_ids, 1, 2, wire or theirs.dtype)
    assert len(named) == 3 * CHECKSUM_BYTES
    staged = sent(source, segment, wire or theirs.dtype)
    assert bridge.staged_checksums(memoryview(staged), segment) == named
    damaged = bytearray(staged)
    damaged[-1] ^= 1
    found = bridge.staged_checksums(memoryview(damaged), segment)
    assert found != named and found[: 2 * CHECKSUM_BYTES] == named[: 2 * CHECKSUM_BYTES]
    if bridge.is_direct(Read(0, segment, (2, 0, 5), 0)):
        read = Read(0, segment, (2, 0, 5), 0)
        bring(bridge, source, ours, read)
        assert bridge.direct_checksums(read) == named


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model_id": "other"}, "model_id: m here, other there"),
        ({"num_layers": 4}, "num_target_layers: 3 here, 4 there"),
        ({"num_kv_heads": 4}, "num_kv_heads: 2 here, 4 there"),
        ({"head_dim": 16}, "head_dim: 8 here, 16 there"),
        ({"dtype": "float8"}, "dtype: 'float8' there is unknown"),
        ({"axis_order": "slot,block"}, "axis_order: 'slot,block' there is unknown"),
        ({"packing": "zip"}, "packing: 'zip' there is unknown"),
        ({"packing": DOT}, "packing: blocks of 4 slots of 2 x 8 there cannot be 'dot'"),
        ({"packing": SCALES_LAST}, "packing: blocks of 4 slots of 2 x 8 in float32 there cannot be 'scales_last'"),
        (
            {"packing": SCALES_LAST, "dtype": "int8", "block_size": 6},
            "packing: blocks of 6 slots of 2 x 8 in int8 there cannot be 'scales_last'",
        ),
        ({"draft_packing": SCALES_LAST}, "in float32 there cannot be 'scales_last'"),
        ({"dtype": "kivi", "head_dim": 8}, "head_dim: 8 there cannot be in kivi"),
        (
            {"dtype": "kivi", "block_size": 64},
            "blocks of 64 slots of 2 x 8 there, 0 layers of a draft, cannot",
        ),
        ({"dtype": "kivi", "block_size": 32, "packing": DOT}, "there, 0 layers of a draft, cannot be in kivi"),
        ({"draft_packing": "zip"}, "draft_packing: 'zip' there is unknown"),
        (
            {"packing": SCALES_LAST, "dtype": "fp8", "layer_shapes": ((2, 8), (2, 7), (2, 8))},
            "in fp8 there cannot be 'scales_last'",
        ),
        (
            {"packing": SCALES_LAST, "dtype": "fp8", "num_vectors": 1},
            "packing: blocks of 4 slots of 1 x 8 in fp8 there cannot be 'scales_last'",
        ),
        ({"num_vectors": 1}, "num_vectors: 2 here, 1 there"),
        ({"num_vectors": 3}, "num_vectors: 3 there is not in 1..2"),
        ({"tensor_parallel": 3}, "2 heads there do not divide over 3 ranks"),
        ({"tensor_parallel": 0}, "tensor_parallel: 0 there is not in 1..4096"),
        ({"block_size": 0}, "block_size: 0 there is not in 1..65536"),
        ({"block_size": 1 << 31}, "is not in 1..65536"),
        ({"layer_shapes": ((2, 8), (2, 8), (1, 8))}, "layer 2: heads x dim 2 x 8 here, 1 x 8 there"),
        ({"layer_shapes": ((2, 8), (1, 8))}, "layer_shapes: 2 there of 3 layers, the first 2 x 8"),
        ({"layer_shapes": ((1, 8), (2, 8), (2, 8))}, "layer_shapes: 3 there of 3 layers, the first 1 x 8"),
        ({"layer_shapes": ((2, 8), (0, 8), (2, 8))}, "layer_shapes: 0 x 8 there is no size of a layer"),
        ({"layer_shapes": ((2, 8), (2, 1 << 17), (2, 8))}, "layer_shapes: 2 x 131072 there is no size"),
        ({"layer_shapes": ((2, 8), (3, 8), (2, 8)), "tensor_parallel": 2}, "3 heads there do not divide over 2 ranks"),
        ({"layer_shapes": ((2, 8), (2, 16), (2, 8)), "packing": DOT, "block_size": 16}, "there cannot be 'dot'"),
        ({"num_draft_layers": 1, "draft_id": "d"}, "num_target_layers: 3 here, 2 there"),
        ({"num_draft_layers": 3}, "num_draft_layers: 3 there of 3 layers"),
        ({"draft_tensor_parallel": 3}, "draft_tensor_parallel: 3 there of 1 ranks"),
        ({"draft_num_vectors": 3}, "draft_num_vectors: 3 there is not in 0..2"),
        ({"num_draft_layers": 4, "num_layers": 7, "layer_shapes": ((2, 8),) * 6}, "6 there of 7 layers, the first"),
    ],
)
def test_what_cannot_be_bridged_is_refused_side_by_side(change: dict[str, object], what: str) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        Bridge(make_memory(SMALL, 2), replace(SMALL, **change), 8)  # type: ignore[arg-type]
    assert what in caught.value.message
    assert "Here | there: dtype float32 | " in caught.value.message


@pytest.mark.parametrize("num_pool_blocks", [0, 1 << 62])
def test_a_pool_that_cannot_be_is_refused(num_pool_blocks: int) -> None:
    with pytest.raises(LayoutMismatch, match="reports a pool"):
        Bridge(make_memory(SMALL, 2), SMALL, num_pool_blocks)


def test_a_block_outside_the_sources_pool_is_refused() -> None:
    bridge = Bridge(make_memory(SMALL, 2), replace(SMALL, dtype="bfloat16"), 8)
    with pytest.raises(TransportError, match="does not have"):
        bridge.staged(Segment(0, (8,), (1,), 0, 1), 0)


def test_only_a_narrower_wire_differs_from_the_cache() -> None:
    assert on_the_wire("float32", "") == "float32"
    assert on_the_wire("float32", "bfloat16") == on_the_wire("bfloat16", "bfloat16") == "bfloat16"
    assert on_the_wire("bfloat16", "int8") == "int8"
    assert (on_the_wire("int8", "int4"), on_the_wire("int4", "int8")) == ("int4", "int4")
    with pytest.raises(LayoutMismatch, match="'int3' is unknown"):
        on_the_wire("float32", "int3")
    assert piece_bytes(SMALL, "int8") == 2 * 4 * 2 * (8 + 2)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("order", [BLOCK_MAJOR, LAYER_MAJOR])
def test_numbers_and_scales_of_a_gpus_packing_begin_at_multiples_of_16_bytes(order: str, dtype: str) -> None:
    """In every layer, block and rank, also of drafts and of layers that are unlike."""
    shapes = ((4, 10), (2, 48), (4, 10), (2, 6))
    layout = KVLayout(dtype, 4, 4, 4, 10, "m", order, 2, SCALES_LAST, layer_shapes=shapes, num_draft_layers=1)
    assert layout.can_be_scales_last and layout.rank_block_bytes % 16 == 0
    for layer in range(4):
        heads, dim = max(shapes[layer][0] // 2, 1), shapes[layer][1]
        for start in layout.runs(7, range(7), layer, 1).offsets.tolist():
            assert start % 16 == 0 and (start + 2 * 4 * heads * dim) % 16 == 0


def test_equal_packings_move_directly_and_others_do_not() -> None:
    dot = replace(SMALL, block_size=16, head_dim=16, packing=DOT)
    ours = make_memory(dot, 2)
    read = Read(0, Segment(0, (4,), (1,), 0, dot.num_layers), (1,), 0)
    assert Bridge(ours, dot, 8).is_direct(read)
    assert not Bridge(ours, replace(dot, packing=ROWS), 8).is_direct(read)
    few_bits = replace(dot, dtype="int8", packing=SCALES_LAST)
    assert Bridge(make_memory(few_bits, 2), few_bits, 8).is_direct(read)
    for packing in (ROWS, DOT):
        assert not Bridge(make_memory(few_bits, 2), replace(few_bits, packing=packing), 8).is_direct(read)
    # As wide as ours on the wire, and wider in the source's pool: nothing to copy straight.
    narrow = make_memory(replace(dot, dtype="bfloat16"), 2)
    assert not Bridge(narrow, dot, 8, "bfloat16").is_direct(read)


def test_a_layout_that_says_no_packing_is_rows_and_of_keys_and_values() -> None:
    message = SMALL.to_proto()
    message.ClearField("packing")
    message.ClearField("num_vectors")
    assert KVLayout.from_proto(message) == SMALL


def test_shapes_of_layers_are_told_and_too_many_are_not_kept() -> None:
    layout = replace(SMALL, layer_shapes=((2, 8), (1, 32), (2, 8)))
    assert KVLayout.from_proto(layout.to_proto()) == layout
    message = layout.to_proto()
    message.layer_shapes.extend([kv_pb2.LayerShape(num_kv_heads=2, head_dim=8)] * 5000)
    with pytest.raises(LayoutMismatch, match=r"layer_shapes 2 of 2 x 8, 1 of 1 x 32 \| 4096 of 2 x 8, 1 of 1 x 32;"):
        check_bridge(layout, KVLayout.from_proto(message))


def test_layers_that_are_alike_though_it_says_of_each_are_bridged() -> None:
    said = replace(SMALL, layer_shapes=((2, 8),) * 3)
    bridge = Bridge(make_memory(SMALL, 8), said, 8)
    assert bridge.direct(Read(0, Segment(0, (4, 5), (1, 1), 0, 3), (1, 2), 0)).lengths.tolist() == [
        2 * SMALL.block_bytes
    ]


def test_latents_travel_once_between_any_numbers_of_ranks_and_sizes_of_blocks() -> None:
    """One head of one vector on every rank: the source's first rank is read, and every rank of the sink gets it."""
    theirs = KVLayout("float32", 16, NUM_LAYERS, 1, 24, "m", BLOCK_MAJOR, tensor_parallel=2, num_vectors=1)
    source = make_memory(theirs, 5)
    fill(source, 3)
    segment = Segment(0, (4, 1), (1, 1), 0, NUM_LAYERS)
    for ours in (
        replace(theirs, block_size=64, axis_order=LAYER_MAJOR, tensor_parallel=1),
        replace(theirs, block_size=64, tensor_parallel=4),
    ):
        memory = make_memory(ours, 3)
        bridge = Bridge(memory, theirs, 5)
        assert bridge.num_bytes(segment) == 2 * NUM_LAYERS * 16 * 24 * 4  # of the two ranks one, of the two vectors one
        bring(bridge, source, memory, Read(0, segment, (2,), 0))
        for rank in range(ours.tensor_parallel):
            for layer in range(NUM_LAYERS):
                for token in range(32):
                    at = index(ours, 3, (rank, 2, layer, 0, token, 0))
                    there = index(theirs, 5, (0, segment.block_ids[token // 16], layer, 0, token % 16, 0))
                    assert (numbers(memory)[at] == numbers(source)[there]).all(), (rank, layer, token)


def test_a_draft_of_the_first_rank_alone_has_all_its_heads_there() -> None:
    """Three heads, which two ranks could not share; equal pools move directly, without the second's room."""
    shapes = ((2, 8),) * 3 + ((3, 8),)
    drafted = replace(SMALL, num_layers=4, layer_shapes=shapes, num_draft_layers=1, draft_id="d", tensor_parallel=2)
    with pytest.raises(LayoutMismatch, match="3 heads there do not divide over 2 ranks"):
        check_bridge(drafted, drafted)
    whole = replace(drafted, draft_tensor_parallel=1)
    own_bytes, draft_bytes = 3 * 2 * 4 * 8 * 4, 2 * 4 * 3 * 8 * 4  # of a block in a rank
    assert whole.rank_block_bytes == own_bytes + draft_bytes
    assert KVLayout.from_proto(whole.to_proto()) == whole
    draft = Segment(0, (4, 5), (1, 1), 3, 1)
    bridge = Bridge(make_memory(whole, 8), whole, 8)
    assert bridge.is_direct(Read(0, draft, (1, 2), 0)) and bridge.brings_draft
    copies = bridge.direct(Read(0, draft, (1, 2), 0))
    assert copies.lengths.tolist() == [draft_bytes] * 2
    assert copies.remote.tolist() == [of * whole.rank_block_bytes + own_bytes for of in (4, 5)]
    alone = replace(whole, tensor_parallel=1, draft_tensor_parallel=0)
    assert not Bridge(make_memory(whole, 8), alone, 8).is_direct(Read(0, draft, (1, 2), 0))


def test_a_pool_of_a_target_and_its_draft_moves_in_whole_runs() -> None:
    """Sizes of the two are unlike; where only the target's layers move, a block's run ends before the draft's."""
    drafted = replace(
        SMALL, num_layers=5, layer_shapes=((2, 8),) * 3 + ((1, 32),) * 2, num_draft_layers=2, draft_id="d"
    )
    target = Segment(0, (4, 5), (1, 1), 0, 3)
    draft = replace(target, first_layer=3, num_layers=2)
    both = Bridge(make_memory(drafted, 8), drafted, 8)
    assert both.brings_draft and both.num_layers == 5
    assert both.direct(Read(0, target, (1, 2), 0)).lengths.tolist() == [3 * 2 * 4 * 16 * 4] * 2
    assert both.direct(Read(0, draft, (1, 2), 0)).lengths.tolist() == [2 * 2 * 4 * 32 * 4] * 2
    assert (both.num_bytes(target), both.num_bytes(draft)) == (2 * 3 * 2 * 4 * 16 * 4, 2 * 2 * 2 * 4 * 32 * 4)
    for ours, theirs in ((SMALL, drafted), (drafted, SMALL), (replace(drafted, draft_id="e"), drafted)):
        bridge = Bridge(make_memory(ours, 8), theirs, 8)
        read = Read(0, target, (1, 2), 0)
        assert not bridge.brings_draft and bridge.num_layers == 3 and bridge.is_direct(read)
        assert bridge.direct(read).num_bytes == bridge.num_bytes(target) == 2 * 3 * SMALL.layer_bytes


@pytest.mark.parametrize("order", [BLOCK_MAJOR, LAYER_MAJOR])
@pytest.mark.parametrize(
    ("there", "here", "used"),
    [
        ({"tensor_parallel": 4}, {"tensor_parallel": 4}, ({0}, {1, 2, 3})),
        ({"tensor_parallel": 2, "packing": DOT}, {"tensor_parallel": 4, "packing": DOT}, ({0}, {0, 1})),
        ({"tensor_parallel": 4, "dtype": "int8"}, {"tensor_parallel": 8}, ({0}, {0, 1, 2, 3})),
    ],
)
def test_ranks_that_are_held_apart_are_written_apart(
    order: str, there: dict[str, Any], here: dict[str, Any], used: tuple[set[int], set[int]]
) -> None:
    """Each memory is written as its part of the whole pool, and looks at no bytes of ranks that it does not use."""
    theirs = replace(KVLayout("float32", 16, NUM_LAYERS, 4, 16, "m", order), **there)
    layout = KVLayout("bfloat16", 32, NUM_LAYERS, 4, 16, "m", order)
    layout = replace(layout, **here)
    source, whole, num_ranks = make_memory(theirs, 5), make_memory(layout, 3), layout.tensor_parallel
    fill(source, 1)
    parts = [make_memory(layout, 3, ranks=ranks) for ranks in (range(1), range(1, num_ranks))]
    segment = Segment(0, (4, 1, 2), (1,) * 3, 0, NUM_LAYERS)
    wire = sent(source, segment, theirs.dtype)
    Bridge(whole, theirs, 5).convert(memoryview(wire), segment, (2, 0), 3)
    for part, due in zip(parts, used, strict=True):
        bridge = Bridge(part, theirs, 5)
        [of] = bridge.used_slices_of(segment)
        assert of.used == slice(
            min(due) * len(wire) // theirs.tensor_parallel, (max(due) + 1) * len(wire) // theirs.tensor_parallel
        )
        seen = bytearray(len(wire))
        seen[of.used] = wire[of.used]
        bridge.convert(memoryview(seen), segment, (2, 0), 3)
    assert b"".join(bytes(of.region.view or b"") for of in parts) == bytes(whole.region.view or b"")
