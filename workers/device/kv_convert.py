"""A staged part of a segment into a pool of another layout, on a device: what kv/bridge.py does in host memory.

    staged bytes ──view, unpack, dequantise──> rows [rank, block, layer, V, slot, head, dim] ──move_kv──> pool

Blocks cut anew by token, heads by rank, numbers into our dtype are all kv_move.py's, one launch for each run of
heads that two ranks have in common, of each group of layers that are alike. V: vectors of a slot and head, see
kv/layout.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.kv.kv_move import KVSlots, move_kv
from ..kv.bridge import Bridge
from ..kv.dtypes import SCALE_BYTES, is_scaled, vector_bytes
from ..kv.layout import GROUP, ROWS, KVLayout
from ..kv.segment import Segment
from ..models.checkpoint.weights import DTYPES


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
    bridge: Bridge, part: Segment, data: Tensor, pools: Sequence[Tensor], place: Placing, table: Tensor
) -> None:
    """data: [bytes] uint8, as kv/bridge.py says; pools: of each group of layers that are alike, [rank, block, layer,
    V, slot, head, dim] of any strides but the last three; table: [n] int64, `place.blocks` on the device. Only
    enqueues."""
    theirs = torch.arange(len(part.block_ids), device=data.device)
    first = part.first_block * bridge.source.block_size
    for part_slice in bridge.slices_of(part):
        of, wire = part_slice.mapping, data[part_slice.bytes]
        rows = rows_of(wire, of.source.uniform, bridge.wire, len(part.block_ids), len(part_slice.layers))
        for copy in of.head_copies:
            source = KVSlots(rows[copy.wire_rank, ..., copy.wire_heads, :], theirs, first)
            target = KVSlots(pools[of.index][copy.rank, :, part_slice.own, ..., copy.heads, :], table, place.start)
            move_kv(source, target, place.first_token, place.num_tokens)


def rows_of(data: Tensor, source: KVLayout, wire: str, num_blocks: int, num_layers: int) -> Tensor:
    """[distinct rank, block, layer, V, slot, head, dim] of the wire's dtype, or float32 where that is a scaled one."""
    num_ranks = len(source.distinct_ranks)
    inner = source.num_vectors, source.block_size, source.heads_per_rank, source.head_dim
    numbers = data if is_scaled(wire) else data.view(DTYPES[wire])
    if source.packing != ROWS and wire == source.dtype:
        numbers = _unpacked(numbers, source)
    rows = _dequantised(numbers, wire, source.head_dim) if is_scaled(wire) else numbers
    if source.is_block_major:
        return rows.reshape(num_ranks, num_blocks, num_layers, *inner)
    return rows.reshape(num_ranks, num_layers, num_blocks, *inner).transpose(1, 2)


def _dequantised(data: Tensor, wire: str, head_dim: int) -> Tensor:
    """Vectors of a scaled dtype (kv/dtypes.py), uint8 -> [vectors, head_dim] float32."""
    vectors = data.view(-1, SCALE_BYTES + head_dim)
    scales = vectors[:, :SCALE_BYTES].contiguous().view(torch.bfloat16)
    stored = vectors[:, SCALE_BYTES:].contiguous()
    return stored.view(torch.int8 if wire == "int8" else torch.float8_e4m3fn).float() * scales


def _unpacked(numbers: Tensor, source: KVLayout) -> Tensor:
    """Whole pieces of a "dot" pool -> [piece, 2, slot, head, dim], with the bytes of their scales before those of a
    scaled dtype; see kv/packing.py."""
    pair, dim, heads = 2 if numbers.element_size() == 2 else 1, source.head_dim, source.heads_per_rank
    groups, size = source.block_size // GROUP, vector_bytes(source.dtype, dim) // numbers.element_size()
    both = numbers.view(-1, 2, heads, groups, GROUP * size)
    # [piece, head, group, dim / P, 16, P] and [piece, head, group, 16 / P, dim, P]
    keys = both[:, 0, ..., : GROUP * dim].unflatten(-1, (dim // pair, GROUP, pair))
    values = both[:, 1, ..., : GROUP * dim].unflatten(-1, (GROUP // pair, dim, pair))
    shape = len(both), source.block_size, heads, dim
    rows = torch.stack(
        (keys.permute(0, 2, 4, 1, 3, 5).reshape(shape), values.permute(0, 2, 3, 5, 1, 4).reshape(shape)), dim=1
    )
    if not is_scaled(source.dtype):
        return rows
    scales = both[..., GROUP * dim :].unflatten(-1, (GROUP, SCALE_BYTES)).permute(0, 1, 3, 4, 2, 5)
    return torch.cat((scales.reshape(*rows.shape[:-1], SCALE_BYTES), rows), dim=-1)
