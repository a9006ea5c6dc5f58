"""A staged part of a segment into a pool of another layout, on a device: what kv/bridge.py does in host memory.

    staged bytes ──view, unpack──> parts [rank, block, layer, V, slot, head, dim] ──dequantise──> rows ──move_kv──> pool

Vectors of a scaled dtype that is the pool's, too, are not dequantised: their numbers and scales are moved as they are.
Blocks cut anew by token, heads by rank, numbers into our dtype are all kv_move.py's, one launch for each run of
heads that two ranks have in common, of each group of layers that are alike. V: vectors of a slot and head, see
kv/layout.py. Blocks that are rounded as a whole (kv/kivi.py) are moved as they come, or by what rounds them in a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.kv.kivi import round_blocks, widen_blocks
from ...kernels.kv.kv_move import KVSlots, move_kv
from ...kernels.kv.kv_scales import KVParts, dequantise, parts_of_pieces
from ..kv.bridge import Bridge, GroupSlice
from ..kv.dtypes import GROUP as BLOCK
from ..kv.dtypes import KIVI, SCALE_BYTES, is_scaled, stored_size, vector_bytes
from ..kv.kivi import head_block_bytes
from ..kv.layout import DOT, GROUP, ROWS, SCALES_LAST, KVLayout
from ..kv.segment import Segment
from ..models.checkpoint.weights import DTYPES

_SCALED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8, KIVI: torch.uint8}
STORED: dict[str, torch.dtype] = {**DTYPES, **_SCALED}  # of a cache's tensors


@dataclass(frozen=True, slots=True)
class Placing:
    """Tokens of a part that are written, and their places."""

    first_token: int
    num_tokens: int
    blocks: Sequence[int]  # ids, ours
    start: int  # first token of the first of them


def place_of(part: Segment, wire_size: int, own_size: int, table: Sequence[int], first_token: int) -> Placing | None:
    """Its tokens from `first_token` on, as far as `table` reaches; None where there are none. Sizes: slots a block."""
    start = part.first_block * wire_size
    first = max(start, first_token)
    end = min(start + len(part.block_ids) * wire_size, len(table) * own_size)
    if first >= end:
        return None
    block = first // own_size
    return Placing(first, end - first, table[block : -(-end // own_size)], block * own_size)


def write_part(
    bridge: Bridge, part: Segment, data: Tensor, pools: Sequence[KVParts], place: Placing, table: Tensor
) -> None:
    """data: [bytes] uint8, as kv/bridge.py says; pools: of each group of layers that are alike, [rank that our memory
    holds, block, layer, V, slot, head, dim] of any strides but the last, or of blocks that are rounded as a whole
    [..., V, head, bytes]; table: [n] int64, `place.blocks` on the device. Only enqueues."""
    theirs = torch.arange(len(part.block_ids), device=data.device)
    first = part.first_block * bridge.source.block_size
    for part_slice in bridge.used_slices_of(part):
        of, wire = part_slice.mapping, data[part_slice.used]
        pool, layers = pools[of.index], part_slice.own
        if of.ours.uniform.has_tail:
            _write_whole_blocks(bridge, part, part_slice, wire, pool.numbers, place.first_token, table)
            continue
        rows = rows_of(wire, of.source.uniform, bridge.wire, len(part.block_ids), len(part_slice.layers))
        if rows.scales is not None and rows.numbers.dtype != pool.numbers.dtype:
            rows = KVParts(dequantise(rows.numbers, rows.scales), None)
        for copy in of.head_copies:
            numbers, scales = _heads_of(rows, copy.wire_rank, slice(None), copy.wire_heads)
            source = KVSlots(numbers, theirs, first, scales)
            numbers, scales = _heads_of(pool, copy.rank, layers, copy.heads)
            target = KVSlots(numbers, table, place.start, scales)
            move_kv(source, target, place.first_token, place.num_tokens)


def _write_whole_blocks(
    bridge: Bridge, part: Segment, of: GroupSlice, wire: Tensor, pool: Tensor, first_token: int, table: Tensor
) -> None:
    """Write the blocks from `first_token` on into a pool that rounds them as a whole: as they come where the source
    does, too; else rounded now. wire: the bytes that are used; pool: [rank, block, layer, V, head, bytes]."""
    mapping, source, sizes = of.mapping, of.mapping.source.uniform, (len(part.block_ids), len(of.layers))
    first = (first_token - part.first_block * source.block_size) // BLOCK
    if source.has_tail:
        blocks = _in_axes(_whole_blocks(wire, source), source, *sizes)
        for copy in mapping.head_copies:
            own = pool[copy.rank, :, of.own, :, copy.heads]
            own[table] = blocks[copy.wire_rank, first : first + len(table), :, :, copy.wire_heads]
        return
    numbers, scales = rows_of(wire, source, bridge.wire, *sizes)
    numbers = numbers if scales is None else dequantise(numbers, scales)
    pairs = torch.stack((torch.arange(first, first + len(table), device=table.device), table), dim=1)
    for copy in mapping.head_copies:
        # [layer, block, V, slot, head, dim], blocks cut anew
        rows = numbers[copy.wire_rank, ..., copy.wire_heads, :].unflatten(3, (-1, BLOCK))
        rows = rows.permute(1, 0, 3, 2, 4, 5, 6).flatten(1, 2)
        for layer, own in zip(rows, pool[copy.rank, :, of.own, :, copy.heads].unbind(1), strict=True):
            round_blocks(layer, own, pairs)


def _whole_blocks(data: Tensor, source: KVLayout) -> Tensor:
    """data: bytes of whole pieces of a source whose blocks are rounded as a whole. Returns [piece, V, head, bytes]."""
    return data.view(-1, source.num_vectors, source.heads_per_rank, head_block_bytes(source.head_dim))


def _heads_of(parts: KVParts, rank: int, layers: slice, heads: slice) -> KVParts:
    """parts: [rank, block, layer, V, slot, head, dim]. Returns [block, layer, V, slot, head, dim], a view."""
    scales = None if parts.scales is None else parts.scales[rank, :, layers, ..., heads]
    return KVParts(parts.numbers[rank, :, layers, ..., heads, :], scales)


def rows_of(data: Tensor, source: KVLayout, wire: str, num_blocks: int, num_layers: int) -> KVParts:
    """data: of whole ranks. Returns [rank, block, layer, V, slot, head, dim] of the wire's dtype, and the scales where
    that has some; float32 where blocks were rounded as a whole."""
    numbers, scales = _parts_on_the_wire(data.view(STORED[wire]), source, wire)
    sizes = num_blocks, num_layers
    return KVParts(_in_axes(numbers, source, *sizes), None if scales is None else _in_axes(scales, source, *sizes))


def _in_axes(part: Tensor, source: KVLayout, num_blocks: int, num_layers: int) -> Tensor:
    """part: [piece, ...], of whole ranks. Returns [rank, block, layer, ...], a view."""
    if source.is_block_major:
        return part.unflatten(0, (-1, num_blocks, num_layers))
    return part.unflatten(0, (-1, num_layers, num_blocks)).transpose(1, 2)


def _parts_on_the_wire(numbers: Tensor, source: KVLayout, wire: str) -> KVParts:
    """numbers: whole pieces. [piece, V, slot, head, dim], and scales [piece, V, slot, head]."""
    size = stored_size(wire, source.head_dim)
    shape = source.num_vectors, source.block_size, source.heads_per_rank, size
    packing = source.packing if wire == source.dtype else ROWS
    if source.has_tail:
        blocks = _whole_blocks(numbers, source)
        both = torch.stack(widen_blocks(blocks, torch.arange(len(blocks), device=blocks.device)), dim=1)
        return KVParts(both.unflatten(0, (-1, BLOCK)).transpose(1, 2), None)
    if packing == DOT:
        return _unpacked(numbers, source)
    if packing == SCALES_LAST:
        return parts_of_pieces(numbers.view(-1, source.layer_bytes), shape)
    if not is_scaled(wire):
        return KVParts(numbers.view(-1, *shape), None)
    vectors = numbers.view(-1, SCALE_BYTES + size)
    scales = vectors[:, :SCALE_BYTES].contiguous().view(torch.bfloat16)  # of an odd dim every other is at an odd byte
    return KVParts(vectors[:, SCALE_BYTES:].unflatten(0, (-1, *shape[:3])), scales.view(-1, *shape[:3]))


def _unpacked(numbers: Tensor, source: KVLayout) -> KVParts:
    """Whole pieces of a "dot" pool -> [piece, 2, slot, head, dim], and the scales of a scaled dtype; see
    kv/packing.py."""
    pair, dim = 2 if numbers.element_size() == 2 else 1, stored_size(source.dtype, source.head_dim)
    heads, groups = source.heads_per_rank, source.block_size // GROUP
    size = vector_bytes(source.dtype, source.head_dim) // numbers.element_size()
    both = numbers.view(-1, 2, heads, groups, GROUP * size)
    # [piece, head, group, dim / P, 16, P] and [piece, head, group, 16 / P, dim, P]
    keys = both[:, 0, ..., : GROUP * dim].unflatten(-1, (dim // pair, GROUP, pair))
    values = both[:, 1, ..., : GROUP * dim].unflatten(-1, (GROUP // pair, dim, pair))
    shape = len(both), source.block_size, heads, dim
    rows = torch.stack(
        (keys.permute(0, 2, 4, 1, 3, 5).reshape(shape), values.permute(0, 2, 3, 5, 1, 4).reshape(shape)), dim=1
    )
    if not is_scaled(source.dtype):
        return KVParts(rows, None)
    scales = both[..., GROUP * dim :].view(torch.bfloat16)  # [piece, 2, head, group, 16]
    return KVParts(rows, scales.permute(0, 1, 3, 4, 2).reshape(rows.shape[:-1]))
