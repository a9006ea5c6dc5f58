"""Maps a source's KV layout to ours: what to read, and how to convert it into our blocks. numpy, no torch, no I/O.

    direct   same dtype, block size, ranks and packing: runs of the source's pool go straight into ours, in either order
             of axes
    staged   else: the bytes of some blocks are read, in the wire's order, into a buffer; `convert` then writes them
             where they belong: blocks cut anew by token, heads by rank, numbers in our dtype. Into device memory the
             device converts (DeviceKV), by what is said here

The source's layout is the wire's. A staged part, of the source's distinct ranks, group by group of like layers:

    [rank][block][layer] or [rank][layer][block], as the source's axes stand, of [vector][slot][head][dim],
    or of the source's packing, where it comes in the source's dtype

Both sides' layers have the same sizes, so that their groups are the same layers. The layers of a model that drafts move
where both sides have the same one, and else only the layers before them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..common.errors import LayoutMismatch, TransportError
from .checksums import pool_checksums
from .kivi import head_block_bytes, widened
from .layout import ROWS, Copies, KVLayout, LayerGroup, Offsets, PoolMemory, Runs
from .layout_check import check_bridge
from .packing import Pool, unpacked
from .segment import CHECKSUM_BYTES, Read, Segment
from .wire import STORAGE, Numbers, checksum, on_the_wire, piece_bytes, stored, widen

PART_BYTES = 4 << 20  # read at once: large enough for the wire, small enough that reading and converting overlap
LARGEST_POOL = 1 << 62


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """Heads of one of our ranks, and where in the wire's ranks they are."""

    rank: int  # counted from the first that our memory holds
    heads: slice
    wire_rank: int  # counted from the first that is used
    wire_heads: slice


@dataclass(frozen=True, slots=True)
class _Span:
    """A run of tokens within one block of either side."""

    block: int  # id, ours
    slot: int
    wire_block: int  # of the part
    wire_slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GroupMapping:
    """A layer group as both sides hold it, and which heads go where."""

    index: int  # of the group in the layout
    source: LayerGroup
    ours: LayerGroup
    piece_bytes: int  # as they travel
    wire_ranks: range  # those of its distinct ranks that are used
    head_copies: list[HeadCopy]
    pool: Pool | None  # ours, in host memory

    @property
    def layers(self) -> range:
        return self.source.layers

    @property
    def is_alike(self) -> bool:
        """Return whether both sides pack it alike, in as many ranks, each of which has heads of its own."""
        ours, source = self.ours.uniform, self.source.uniform
        alike = (ours.packing, ours.tensor_parallel) == (source.packing, source.tensor_parallel)
        return alike and len(ours.distinct_ranks) == ours.tensor_parallel

    @property
    def layer_bytes(self) -> int:
        """Bytes that are sent of one layer of one block."""
        return len(self.source.uniform.distinct_ranks) * self.piece_bytes


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """The part of a segment that lies in one layer group."""

    mapping: GroupMapping
    layers: range  # counted from the group's first layer
    bytes: slice  # of all that travel
    used: slice  # of these, the wire's ranks that are used

    @property
    def own(self) -> slice:
        """Index of its layers in a tensor of the group."""
        return slice(self.layers.start, self.layers.stop)


class Bridge:
    def __init__(self, ours: PoolMemory, source: KVLayout, num_pool_blocks: int, asked: str = "") -> None:
        """`num_pool_blocks` is the source's; `asked`: the wire dtype that we asked for. Of `ours` the ranks that it
        holds are converted into. Raises LayoutMismatch, showing the two layouts side by side, for what cannot be
        bridged."""
        check_bridge(ours.layout, source)
        if not 0 < num_pool_blocks * source.block_bytes <= LARGEST_POOL:
            raise LayoutMismatch(f"the source reports a pool of {num_pool_blocks:,} blocks: {source}")
        self.source = source
        self.wire = on_the_wire(source.dtype, asked)
        self._ours = ours
        self.num_pool_blocks = num_pool_blocks
        layout = ours.layout
        self.num_layers = num_layers = layout.num_common_layers(source)  # that move, the first ones of both sides
        pairs = zip(source.layer_groups(0, num_layers), layout.layer_groups(0, num_layers), strict=True)
        self.mappings = [self._mapping(i, theirs, own) for i, (theirs, own) in enumerate(pairs)]
        self._is_direct = (
            self.wire == source.dtype == layout.dtype
            and (source.block_size, source.tensor_parallel) == (layout.block_size, layout.tensor_parallel)
            and all(of.is_alike for of in self.mappings)
        )

    @property
    def brings_draft(self) -> bool:
        """Return whether the layers of a model that drafts move, too."""
        return self.num_layers > self.source.num_target_layers

    def _mapping(self, index: int, source: LayerGroup, ours: LayerGroup) -> GroupMapping:
        pool = None if self._ours.region.view is None else Pool(self._ours, ours)
        used, copies = _held(_head_copies(source.uniform, ours.uniform), self._ours.held_ranks)
        return GroupMapping(index, source, ours, piece_bytes(source.uniform, self.wire), used, copies, pool)

    def num_bytes(self, segment: Segment) -> int:
        """Number of bytes that are sent of a segment."""
        return max(part.bytes.stop for part in self.slices_of(segment))

    def is_direct(self, read: Read) -> bool:
        return self._is_direct and read.first_token <= read.segment.first_block * self.source.block_size

    def direct(self, read: Read) -> Copies:
        """Copies from the source's pool into ours; runs adjacent on both sides are merged. Raises TransportError."""
        self._check_blocks(read.segment)
        segment, layout = read.segment, self._ours.layout
        theirs, layers = segment.block_ids, (segment.first_layer, segment.num_layers)
        blocks = _own_blocks(read)
        if self.source.axis_order == layout.axis_order:
            return Copies.of(self.source.runs(self.num_pool_blocks, theirs, *layers), self._ours.runs(blocks, *layers))
        pairs = list(zip(self.source.layer_groups(*layers), layout.layer_groups(*layers), strict=True))
        remote = [self._pieces(self.source.offsets(of, self.num_pool_blocks, theirs), of) for of, _ in pairs]
        local = [self._pieces(layout.offsets(of, self._ours.num_blocks, blocks), of) for _, of in pairs]
        return Copies.of(Runs.joined(remote), Runs.joined(local))

    def parts(self, segment: Segment, *, whole_blocks: bool) -> Iterator[Segment]:
        """Split a segment into parts of about PART_BYTES, or of one block; a block larger than that is cut by layers
        unless `whole_blocks`."""
        block_bytes = self.num_bytes(segment) // len(segment.block_ids)
        step = max(PART_BYTES // block_bytes, 1)
        layer_step = segment.num_layers
        if block_bytes > PART_BYTES and not whole_blocks:
            layer_step = max(PART_BYTES // max(of.layer_bytes for of in self.mappings), 1)
        for first in range(0, len(segment.block_ids), step):
            some = replace(
                segment,
                first_block=segment.first_block + first,
                block_ids=segment.block_ids[first : first + step],
                generations=segment.generations[first : first + step],
                checksum=segment.checksum[first * CHECKSUM_BYTES : (first + step) * CHECKSUM_BYTES],
            )
            for layer in range(0, segment.num_layers, layer_step):
                num_layers = min(layer_step, segment.num_layers - layer)
                yield replace(some, first_layer=segment.first_layer + layer, num_layers=num_layers)

    def staged(self, part: Segment, start: int) -> Copies:
        """Copies from the source's pool into a buffer, from byte `start` of it on. In a narrower dtype the source sends
        what is asked for by block: its place in the pool does not matter. Raises TransportError."""
        self._check_blocks(part)
        if self.wire != self.source.dtype:
            zero = np.zeros(1, dtype=np.int64)
            return Copies(zero, zero + start, zero + self.num_bytes(part))
        remote = self.source.runs(self.num_pool_blocks, part.block_ids, part.first_layer, part.num_layers)
        local = start + np.cumsum(remote.lengths) - remote.lengths
        return Copies.of(remote, Runs(local, remote.lengths))

    def convert(self, data: memoryview, part: Segment, table: Sequence[int], first_token: int) -> None:
        """Write a part's bytes into our pool, in host memory: its tokens from `first_token` on, as far as `table`
        reaches."""
        spans = list(_spans(part, self.source.block_size, self._ours.layout.block_size, table, first_token))
        for part_slice in self.used_slices_of(part):
            of = part_slice.mapping
            wire = self._of_part(data[part_slice.used], of, len(part.block_ids), len(part_slice.layers))
            assert of.pool is not None
            for span in spans:
                wire_slots = slice(span.wire_slot, span.wire_slot + span.num_tokens)
                for copy in of.head_copies:
                    rows = wire[copy.wire_rank, span.wire_block, :, :, wire_slots, copy.wire_heads]
                    of.pool.write(copy.rank, span.block, part_slice.own, copy.heads, span.slot, rows)

    def slices_of(self, segment: Segment) -> Iterator[GroupSlice]:
        """Split a segment by layer groups, in the wire's order."""
        first, end, start = segment.first_layer, segment.first_layer + segment.num_layers, 0
        for of in self.mappings:
            layers = range(max(first - of.layers.start, 0), min(end - of.layers.start, len(of.layers)))
            if layers:
                rank_bytes = len(segment.block_ids) * len(layers) * of.piece_bytes
                end_byte = start + len(of.source.uniform.distinct_ranks) * rank_bytes
                used = slice(start + of.wire_ranks.start * rank_bytes, start + of.wire_ranks.stop * rank_bytes)
                yield GroupSlice(of, layers, slice(start, end_byte), used)
                start = end_byte

    def used_slices_of(self, segment: Segment) -> Iterator[GroupSlice]:
        """Return the slices of a segment that the ranks which our memory holds have heads of."""
        return (of for of in self.slices_of(segment) if of.mapping.head_copies)

    def staged_checksums(self, data: memoryview, part: Segment) -> bytes:
        groups: list[Numbers] = []  # of each [rank, block, layer, bytes]
        for part_slice in self.slices_of(part):
            found, inner = np.frombuffer(data[part_slice.bytes], np.uint8), (part_slice.mapping.piece_bytes,)
            groups.append(self._in_axes(found, part_slice.mapping, len(part.block_ids), len(part_slice.layers), inner))
        return b"".join(
            checksum(np.ascontiguousarray(pieces[:, block]).data for pieces in groups)
            for block in range(len(part.block_ids))
        )

    def direct_checksums(self, read: Read) -> bytes:
        """Checksums of what our pool holds now."""
        segment, layout = read.segment, self._ours.layout
        return pool_checksums(self._ours, _own_blocks(read), segment.first_layer, segment.num_layers, layout.dtype)

    def _of_part(self, data: memoryview, of: GroupMapping, num_blocks: int, num_layers: int) -> Numbers:
        """[rank, block, layer, vector, slot, head, row_size] of our dtype, or as Pool.write takes them. data: of whole
        ranks, of layers of one group."""
        source, ours = of.source.uniform, self._ours.layout
        if source.has_tail:
            return self._of_whole_blocks(np.frombuffer(data, np.uint8), of, num_blocks, num_layers)
        if source.packing != ROWS and self.wire == source.dtype:
            data = unpacked(np.frombuffer(data, STORAGE[source.dtype]), source).data
        numbers = widen(data, self.wire, "float32" if ours.has_tail else ours.dtype, source.head_dim)
        inner = (source.num_vectors, source.block_size, source.heads_per_rank, numbers.shape[-1])
        return self._in_axes(numbers, of, num_blocks, num_layers, inner)

    def _of_whole_blocks(self, data: NDArray[np.uint8], of: GroupMapping, num_blocks: int, num_layers: int) -> Numbers:
        """Return what `_of_part` does, of a source whose blocks are rounded as a whole."""
        source, ours = of.source.uniform, self._ours.layout
        inner = source.num_vectors, source.heads_per_rank, head_block_bytes(source.head_dim)
        if ours.has_tail:
            return self._in_axes(data, of, num_blocks, num_layers, inner)[..., None, :, :]
        rows = widened(data.reshape(-1, *inner), source.head_dim)
        numbers = stored(rows.reshape(-1, source.head_dim), ours.dtype)
        inner = source.num_vectors, source.block_size, source.heads_per_rank, numbers.shape[-1]
        return self._in_axes(numbers, of, num_blocks, num_layers, inner)

    def _in_axes(
        self, staged: Numbers, of: GroupMapping, num_blocks: int, num_layers: int, inner: tuple[int, ...]
    ) -> Numbers:
        """[rank, block, layer, *inner], a view."""
        if of.source.uniform.is_block_major:
            return staged.reshape(-1, num_blocks, num_layers, *inner)
        return staged.reshape(-1, num_layers, num_blocks, *inner).swapaxes(1, 2)

    def _pieces(self, offsets: Offsets, of: LayerGroup) -> Runs:
        """Runs of these offsets in the wire's order. offsets: [ranks, blocks, layers]."""
        starts = (offsets if self.source.is_block_major else offsets.swapaxes(1, 2)).reshape(-1)
        return Runs(starts, np.full(len(starts), of.uniform.layer_bytes, dtype=np.int64))

    def _check_blocks(self, segment: Segment) -> None:
        if max(segment.block_ids) >= self.num_pool_blocks:
            raise TransportError("the source announced a block that it does not have")


def _own_blocks(read: Read) -> tuple[int, ...]:
    """Our blocks that a direct read fills."""
    blocks = read.table[read.segment.first_block :][: len(read.segment.block_ids)]
    assert len(blocks) == len(read.segment.block_ids), "the table is shorter than the offer"
    return blocks


def _head_copies(source: KVLayout, ours: KVLayout) -> Iterator[HeadCopy]:
    """Find where each of our ranks gets its heads, also those that another rank has too. Ranks are counted from the
    first of all."""
    per_wire_rank = source.heads_per_rank
    for rank in range(ours.tensor_parallel):
        head, end = ours.first_head(rank), ours.first_head(rank) + ours.heads_per_rank
        first = head
        while head < end:
            wire_rank, wire_head = divmod(head, per_wire_rank)
            num = min(end - head, per_wire_rank - wire_head)
            yield HeadCopy(rank, slice(head - first, head - first + num), wire_rank, slice(wire_head, wire_head + num))
            head += num


def _held(copies: Iterable[HeadCopy], held: range) -> tuple[range, list[HeadCopy]]:
    """Choose the copies into the ranks that our memory holds. Returns the wire's ranks that these use, and the copies,
    with ranks counted as HeadCopy says. None, of layers that other ranks share alone."""
    some = [copy for copy in copies if copy.rank in held]
    wire_ranks = [copy.wire_rank for copy in some] or [0]
    used = range(min(wire_ranks), max(wire_ranks) + 1 if some else 0)
    return used, [replace(copy, rank=copy.rank - held.start, wire_rank=copy.wire_rank - used.start) for copy in some]


def _spans(part: Segment, wire_size: int, own_size: int, table: Sequence[int], first_token: int) -> Iterator[_Span]:
    start = part.first_block * wire_size
    token = max(start, first_token)
    end = min(start + len(part.block_ids) * wire_size, len(table) * own_size)
    while token < end:
        position, slot = divmod(token, own_size)
        wire_block, wire_slot = divmod(token - start, wire_size)
        num_tokens = min(own_size - slot, wire_size - wire_slot, end - token)
        yield _Span(table[position], slot, wire_block, wire_slot, num_tokens)
        token += num_tokens
