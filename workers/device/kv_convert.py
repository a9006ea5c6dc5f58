"""A staged part of a segment into a pool of another layout, on a device: what kv/bridge.py does in host memory.

    staged bytes ──view, unpack──> parts [rank, block, layer, V, slot, head, dim] ──dequantise──> rows ──move_kv──> pool

Vectors of a scaled dtype that is the pool's, too, are not dequantised: their numbers and scales are moved as they are.
Blocks cut anew by token, heads by rank, numbers into our dtype are all kv_move.py's, one launch for each run of
heads that two ranks have in common, of each group of layers that are alike. V: vectors of a slot and head, see
kv/layout.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.kv.kv_move import KVSlots, move_kv
from ...kernels.kv.kv_scales import KVParts, dequantise, parts_of_pieces
from ..kv.bridge import Bridge
from ..kv.dtypes import KIVI, SCALE_BYTES, is_scaled, stored_size, vector_bytes
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
    holds, block, layer, V, slot, head, dim] of any strides but the last; table: [n] int64, `place.blocks` on the
    device. Only enqueues."""
    theirs = torch.arange(len(part.block_ids), device=data.device)
    first = part.first_block * bridge.source.block_size
    for part_slice in bridge.used_slices_of(part):
        of, wire = part_slice.mapping, data[part_slice.used]
        pool, layers = pools[of.index], part_slice.own
        rows = rows_of(wire, of.source.uniform, bridge.wire, len(part.block_ids), len(part_slice.layers))
        if rows.scales is not None and rows.numbers.dtype != pool.numbers.dtype:
            rows = KVParts(dequantise(rows.numbers, rows.scales), None)
        for copy in of.head_copies:
            numbers, scales = _heads_of(rows, copy.wire_rank, slice(None), copy.wire_heads)
            source = KVSlots(numbers, theirs, first, scales)
            numbers, scales = _heads_of(pool, copy.rank, layers, copy.heads)
            target = KVSlots(numbers, table, place.start, scales)
            move_kv(source, target, place.first_token, place.num_tokens)


def _heads_of(parts: KVParts, rank: int, layers: slice, heads: slice) -> KVParts:
    """parts: [rank, block, layer, V, slot, head, dim]. Returns [block, layer, V, slot, head, dim], a view."""
    scales = None if parts.scales is None else parts.scales[rank, :, layers, ..., heads]
    return KVParts(parts.numbers[rank, :, layers, ..., heads, :], scales)


def rows_of(data: Tensor, source: KVLayout, wire: str, num_blocks: int, num_layers: int) -> KVParts:
    """data: of whole ranks. Returns [rank, block, layer, V, slot, head, dim] of the wire's dtype, and the scales where
    that has some."""
    numbers, scales = _parts_on_the_wire(data.view(STORED[wire]), source, wire)

    def in_axes(part: Tensor) -> Tensor:
        """part: [piece, ...]"""
        if source.is_block_major:
            return part.unflatten(0, (-1, num_blocks, num_layers))
        return part.unflatten(0, (-1, num_layers, num_blocks)).transpose(1, 2)

    return KVParts(in_axes(numbers), None if scales is None else in_axes(scales))


def _parts_on_the_wire(numbers: Tensor, source: KVLayout, wire: str) -> KVParts:
    """numbers: whole pieces. [piece, V, slot, head, dim], and scales [piece, V, slot, head]."""
    size = stored_size(wire, source.head_dim)
    shape = source.num_vectors, source.block_size, source.heads_per_rank, size
    packing = source.packing if wire == source.dtype else ROWS
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
