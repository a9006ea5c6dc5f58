"""Converts KV between packings: blocks of a pool, and rows of head_dim numbers. numpy, no torch.

a piece   one layer of one block in one rank
dim       of int4: half of the layout's head_dim, for a byte of two numbers is one element
rows      [vector][slot][head][dim]; a scaled vector: [scale][dim]
dot       [k, v][head][slots / 16][16 * dim]: what a dot product of the CPU takes at once lies together. In a group
          of 16 slots: K as [dim / P][16][P], V as [16 / P][dim][P]; P = 2 for bfloat16, else 1. The scales of a group,
          where vectors have one, are after its numbers: [16]
kivi      blocks that are rounded as a whole, in any packing: [k, v][head][bytes of a head's block] (kivi.py)
scales_last   of scaled dtypes: the numbers of all vectors, [vector][slot][head][dim], then their scales,
          [vector][head][slot]: a GPU loads 16 bytes of either at once
"""

import math
from collections.abc import Iterator

import numpy as np

from .dtypes import SCALE_BYTES, is_scaled, stored_size
from .kivi import head_block_bytes, rounded
from .layout import GROUP, ROWS, SCALES_LAST, KVLayout, LayerGroup, PoolMemory
from .wire import STORAGE, Bytes, Numbers, narrow, row_size


def to_wire(data: Bytes, layout: KVLayout, wire: str) -> bytes:
    """Convert whole blocks (of rows: whole vectors) of one layer group to rows of a narrower dtype, for the wire."""
    if layout.packing != ROWS:
        data = unpacked(np.frombuffer(data, STORAGE[layout.dtype]), layout).data
    return narrow(data, layout.dtype, wire, layout.head_dim)


def unpacked(pieces: Numbers, layout: KVLayout) -> Numbers:
    """Convert whole blocks of a pool that is not of rows to [n, 2, slot, head, row_size], a copy."""
    if layout.packing == SCALES_LAST:
        numbers, scales = _numbers_and_scales(pieces.reshape(-1, layout.layer_bytes), layout)
        return np.concatenate((scales, numbers), axis=-1)
    pair, dim, heads = _pair(pieces), _dim(layout), layout.heads_per_rank
    groups, scale = layout.block_size // GROUP, _scale_size(layout)
    size = scale + dim
    both = pieces.reshape(-1, 2, heads, groups, GROUP * size)
    rows = np.empty((len(both), 2, layout.block_size, heads, size), pieces.dtype)
    keys = both[:, 0, ..., : GROUP * dim].reshape(-1, heads, groups, dim // pair, GROUP, pair)
    values = both[:, 1, ..., : GROUP * dim].reshape(-1, heads, groups, GROUP // pair, dim, pair)
    numbers = rows[..., scale:]
    _split(numbers[:, 0], groups, GROUP, heads, dim // pair, pair)[:] = keys.transpose(0, 2, 4, 1, 3, 5)
    _split(numbers[:, 1], groups, GROUP // pair, pair, heads, dim)[:] = values.transpose(0, 2, 3, 5, 1, 4)
    if scale:
        scales = both[..., GROUP * dim :].reshape(-1, 2, heads, groups, GROUP, scale)
        rows.reshape(-1, 2, groups, GROUP, heads, size)[..., :scale] = scales.transpose(0, 1, 3, 4, 2, 5)
    return rows


class Pool:
    """Layer group of a pool in host memory, to write rows into."""

    def __init__(self, memory: PoolMemory, group: LayerGroup) -> None:
        assert memory.region.view is not None
        layout = group.uniform
        numbers = np.frombuffer(memory.region.view, STORAGE[layout.dtype])
        self._packing, size = layout.packing, row_size(layout.dtype, layout.head_dim)
        self._blocks: Numbers | None = None
        if layout.has_tail:
            whole = layout.num_vectors, layout.heads_per_rank, head_block_bytes(layout.head_dim)
            self._blocks = _by_layer(memory, group, numbers, whole)
            return
        if self._packing == ROWS:
            inner = layout.num_vectors, layout.block_size, layout.heads_per_rank, size
            self._rows = _by_layer(memory, group, numbers, inner)
            return
        if self._packing == SCALES_LAST:
            pieces = _by_layer(memory, group, numbers, (layout.layer_bytes,))
            self._numbers, self._scales = _numbers_and_scales(pieces, layout)
            return
        self._pair, self._scale, dim = _pair(numbers), _scale_size(layout), _dim(layout)
        pair, inner = self._pair, (layout.heads_per_rank, layout.block_size // GROUP)
        whole = _by_layer(memory, group, numbers, (2, *inner, GROUP * size))
        self._keys = _split(whole[:, :, :, 0, ..., : GROUP * dim], *whole.shape[1:3], *inner, dim // pair, GROUP, pair)
        self._values = _split(
            whole[:, :, :, 1, ..., : GROUP * dim], *whole.shape[1:3], *inner, GROUP // pair, dim, pair
        )
        self._scales = _split(whole[..., GROUP * dim :], *whole.shape[1:4], *inner, GROUP, self._scale)

    def write(self, rank: int, block: int, layers: slice, heads: slice, slot: int, rows: Numbers) -> None:
        """rows: [layers, vectors, n, heads, row_size], for slots `slot` to `slot` + n. rank: counted from the first
        that the memory holds; layers: from the group's first. Touches no other slot, so several threads may write into
        one block. Of a pool whose blocks are rounded as a whole: all slots of a block, in float32; or
        [layers, vectors, 1, heads, bytes of a head's block] as it stores them."""
        if self._blocks is not None:
            blocks = rows[:, :, 0] if rows.dtype == np.uint8 else rounded(rows)
            self._blocks[rank, block, layers, :, heads] = blocks
            return
        slots = slice(slot, slot + rows.shape[2])
        if self._packing == ROWS:
            self._rows[rank, block, layers, :, slots, heads] = rows
            return
        if self._packing == SCALES_LAST:
            self._numbers[rank, block, layers, :, slots, heads] = rows[..., SCALE_BYTES:]
            self._scales[rank, block, layers, :, slots, heads] = rows[..., :SCALE_BYTES]
            return
        keys, values = self._keys[rank, block, layers, heads], self._values[rank, block, layers, heads]
        scales = self._scales[rank, block, layers, :, heads]
        for groups, inside, part in _groups(slot, rows.shape[2]):
            self._write_groups(keys[:, :, groups], values[:, :, groups], inside, rows[:, :, part, :, self._scale :])
            if self._scale:
                own = rows[:, :, part, :, : self._scale]
                own = own.reshape(*own.shape[:2], -1, inside.stop - inside.start, *own.shape[3:])
                scales[:, :, :, groups, inside] = own.transpose(0, 1, 4, 2, 3, 5)

    def _write_groups(self, keys: Numbers, values: Numbers, inside: slice, rows: Numbers) -> None:
        """Write the slots `inside` each of some groups. keys: [layers, heads, groups, dim / P, 16, P]; values: [layers,
        heads, groups, 16 / P, dim, P]; rows: [layers, 2, groups * slots, heads, dim]."""
        num_layers, _, _, num_heads, dim = rows.shape
        pair, num_slots = self._pair, inside.stop - inside.start
        grouped = rows.reshape(num_layers, 2, -1, num_slots, num_heads, dim)
        pairs = grouped[:, 0].reshape(num_layers, -1, num_slots, num_heads, dim // pair, pair)
        keys[..., inside, :] = pairs.transpose(0, 3, 1, 4, 2, 5)
        for place in range(pair):
            first = (place - inside.start) % pair  # of our slots, the first that is `place` of its pair
            slots = grouped[:, 1, :, first::pair]
            start = (inside.start + first) // pair
            values[..., start : start + slots.shape[2], :, place] = slots.transpose(0, 3, 1, 2, 4)


def _numbers_and_scales(pieces: Numbers, layout: KVLayout) -> tuple[Numbers, Numbers]:
    """pieces: [..., layer_bytes] uint8 of a "scales_last" pool. Returns views, [..., 2, slot, head, dim] and
    [..., 2, slot, head, SCALE_BYTES]."""
    outer, inner = pieces.shape[:-1], (layout.num_vectors, layout.block_size, layout.heads_per_rank, _dim(layout))
    vectors, slots, heads, _ = inner
    numbers, scales = np.split(pieces, [math.prod(inner)], axis=-1)
    by_head = _viewed(scales, *outer, vectors, heads, slots, SCALE_BYTES)
    return _viewed(numbers, *outer, *inner), by_head.swapaxes(-3, -2)


def _split(numbers: Numbers, *sizes: int) -> Numbers:
    """A view of the same numbers with its first axis and others of these sizes."""
    return _viewed(numbers, len(numbers), *sizes)


def _viewed(numbers: Numbers, *sizes: int) -> Numbers:
    """A view of the same numbers with axes of these sizes."""
    view = numbers.reshape(sizes)
    assert not view.size or np.may_share_memory(view, numbers)
    return view


def _dim(layout: KVLayout) -> int:
    return stored_size(layout.dtype, layout.head_dim)


def _scale_size(layout: KVLayout) -> int:
    """Number of STORAGE's elements that a vector's scale takes."""
    return SCALE_BYTES if is_scaled(layout.dtype) else 0


def _groups(slot: int, num: int) -> Iterator[tuple[slice, slice, slice]]:
    """(groups, slots inside each, which of the `num`): whole groups together, the ragged ends alone."""
    at, end = slot, slot + num
    while at < end:
        group, first = divmod(at, GROUP)
        step = min(GROUP - first, end - at)
        count = (end - at) // GROUP if first == 0 and end - at >= GROUP else 1
        yield slice(group, group + count), slice(first, first + step), slice(at - slot, at - slot + count * step)
        at += count * step


def _by_layer(memory: PoolMemory, group: LayerGroup, numbers: Numbers, inner: tuple[int, ...]) -> Numbers:
    """[rank, block, layer of the group, *inner], a view. numbers: of the ranks that the memory holds."""
    ranks, blocks, layers = len(memory.held_ranks), memory.num_blocks, len(group.layers)
    first, end = (num // numbers.itemsize for num in (group.start, group.start + group.num_bytes))
    if memory.layout.is_block_major:
        return numbers.reshape(ranks, blocks, -1)[:, :, first:end].reshape(ranks, blocks, layers, *inner)
    own = numbers.reshape(ranks, -1)[:, first * blocks : end * blocks]
    return own.reshape(ranks, layers, blocks, *inner).swapaxes(1, 2)


def _pair(numbers: Numbers) -> int:
    return 2 if numbers.itemsize == 2 else 1
