"""Layout of a worker's KV cache in memory, in a form that two workers can compare. Arithmetic only, no torch.

    pool   = tensor_parallel ranks, one after the other; a rank holds its share of the heads for every block
    rank   = [block][layer][vector][slot][head][dim]     block-major: a block of a rank is one run of bytes
          or [layer][block][vector][slot][head][dim]     layer-major: a layer of a rank is
    dim:     the numbers of a vector, with its scale where the dtype is a scaled one (kv/dtypes.py)
    packing: "rows" as above. Of the same size, by layer, block and rank (kv/packing.py): "dot", [k, v][head][...], for
             the compiled kernels; "scales_last", of a scaled dtype all numbers, then all scales, for GPUs

A slot holds `num_vectors` vectors of a head: a key and a value, or of latent attention one latent, of which every
query head is served; it counts as one head. Where there are more ranks than KV heads, neighbouring ranks hold the same
head; on the wire goes the first one's.

The last `num_draft_layers` hold the KV of a model that drafts (speculation); `draft_id` names it. Two workers move
those layers where both have the same, and only the target's where not. They may be packed otherwise than the target's,
and have keys and values beside its latents.
Where the first rank alone drafts, their heads are all in its part of the pool, and the other ranks' room for them is
not used.

Layers may differ in heads and dim. Each then has the bytes that it needs, at the place that the axes give it, and its
own distribution over ranks. Neighbouring layers of one shape are a *layer group*; its `uniform` layout describes it as
if all layers had this shape.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ...proto import kv_pb2
from .dtypes import SCALE_BYTES, is_rounded_by_block, is_scaled, stored_size, vector_bytes
from .pool_file import PoolFile
from .pool_pieces import PoolPieces

BLOCK_MAJOR = "block,layer,kv,slot,head,dim"
LAYER_MAJOR = "layer,block,kv,slot,head,dim"
AXIS_ORDERS = {"block": BLOCK_MAJOR, "layer": LAYER_MAJOR}  # as settings name them
ROWS, DOT, SCALES_LAST = PACKINGS = "rows", "dot", "scales_last"
GROUP = 16  # slots that "dot" keeps together, and elements of a vector
SCALES_LAST_SLOTS = 4  # a block's are a multiple: then numbers and scales of every layer begin at one of 16 bytes
KEY_AND_VALUE = 2  # vectors; a latent is 1
LARGEST = {
    "block_size": 1 << 16,
    "num_layers": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 16,
    "tensor_parallel": 1 << 12,
    "num_vectors": KEY_AND_VALUE,
}
Offsets = NDArray[np.int64]
Shape = tuple[int, int]  # of a layer: num_kv_heads of the model, head_dim


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of blocks of `block_size` tokens that hold `num_tokens`; the last one may not be full."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of a KV pool. Heads are divided evenly over ranks, or ranks over heads."""

    dtype: str  # of kv/dtypes.py
    block_size: int  # slots (tokens) a block
    num_layers: int  # that keep KV
    num_kv_heads: int  # of the model
    head_dim: int
    model_id: str  # fingerprint of the checkpoint
    axis_order: str = BLOCK_MAJOR
    tensor_parallel: int = 1
    packing: str = ROWS
    num_vectors: int = KEY_AND_VALUE  # a slot, layer and head
    layer_shapes: tuple[Shape, ...] = ()  # of each layer, where they are unlike: the first is (num_kv_heads, head_dim)
    num_draft_layers: int = 0  # of num_layers, the last ones
    draft_id: str = ""  # fingerprint of the model that drafts
    draft_packing: str = ""  # of its layers; empty: as the target's
    draft_tensor_parallel: int = 0  # ranks that its heads are divided over: 1, the first one; 0: all
    draft_num_vectors: int = 0  # of its layers, where they are unlike the target's in that; 0: as those

    @property
    def is_block_major(self) -> bool:
        return self.axis_order == BLOCK_MAJOR

    @property
    def has_tail(self) -> bool:
        """Return whether the last tokens of a sequence are in a KV tail, until their block is full."""
        return is_rounded_by_block(self.dtype)

    @property
    def token_multiple(self) -> int:
        """Number of tokens of whose multiples alone a sequence's KV can be taken over: its last ones may be in a KV
        tail, which no other worker reads or fills."""
        return self.block_size if self.has_tail else 1

    @property
    def can_be_dot(self) -> bool:
        """Return whether its sizes allow the "dot" packing."""
        shapes = self.layer_shapes[: self.num_target_layers] if self.draft_packing == ROWS else self.layer_shapes
        dims = {self.head_dim, *(dim for _, dim in shapes)}
        divides = self.block_size % GROUP == 0 and all(stored_size(self.dtype, dim) % GROUP == 0 for dim in dims)
        return divides and self._has_keys_and_values

    @property
    def can_be_scales_last(self) -> bool:
        """Return whether its dtype and sizes allow the "scales_last" packing."""
        dims = (self.head_dim, *(dim for _, dim in self.layer_shapes))
        sizes = {self.block_size % SCALES_LAST_SLOTS, *(vector_bytes(self.dtype, dim) % SCALE_BYTES for dim in dims)}
        return is_scaled(self.dtype) and sizes == {0} and self._has_keys_and_values

    @property
    def _has_keys_and_values(self) -> bool:
        return self.num_vectors == KEY_AND_VALUE == self.num_draft_vectors

    @property
    def num_draft_vectors(self) -> int:
        """Number of vectors of a slot, layer and head of the draft's layers."""
        return self.draft_num_vectors or self.num_vectors

    @property
    def num_target_layers(self) -> int:
        return self.num_layers - self.num_draft_layers

    def num_common_layers(self, peer: "KVLayout") -> int:
        """Number of leading layers whose KV can move between the two workers, where layout_check.py finds nothing."""
        num_target = self.num_target_layers
        own, other = ((of.num_draft_vectors, of.layer_shapes_from(num_target)) for of in (self, peer))
        return self.num_layers if self.draft_id == peer.draft_id and own == other else num_target

    def layer_shapes_from(self, first: int) -> list[Shape]:
        return [self.shape_of(layer) for layer in range(first, self.num_layers)]

    @property
    def heads_per_rank(self) -> int:
        """Number of KV heads of a rank, for layers of one shape; where they differ, ask a group's `uniform`."""
        assert not self.layer_shapes
        return max(self.num_kv_heads // self.tensor_parallel, 1)

    @property
    def distinct_ranks(self) -> range:
        """The ranks that together hold every head once; for layers of one shape."""
        assert not self.layer_shapes
        return range(0, self.tensor_parallel, max(self.tensor_parallel // self.num_kv_heads, 1))

    def first_head(self, rank: int) -> int:
        assert not self.layer_shapes
        return rank * self.num_kv_heads // self.tensor_parallel

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in one block of one rank; for layers of one shape."""
        return self.num_vectors * self.block_size * self.heads_per_rank * vector_bytes(self.dtype, self.head_dim)

    @property
    def rank_block_bytes(self) -> int:
        """Bytes of one block in one rank."""
        if self.layer_shapes or self.num_draft_layers:
            return sum(group.num_bytes for group in _layer_groups(self))
        return self.num_layers * self.layer_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all ranks."""
        return self.tensor_parallel * self.rank_block_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def shape_of(self, layer: int) -> Shape:
        return self.layer_shapes[layer] if self.layer_shapes else (self.num_kv_heads, self.head_dim)

    def layer_groups(self, first_layer: int, num_layers: int) -> "list[LayerGroup]":
        """Split these layers into groups, in order."""
        end = first_layer + num_layers
        if not (self.layer_shapes or self.num_draft_layers):
            return [LayerGroup(range(first_layer, end), first_layer * self.layer_bytes, self)]
        parts = (group.part(first_layer, end) for group in _layer_groups(self))
        return [part for part in parts if part.layers]

    def runs(self, num_pool_blocks: int, block_ids: Sequence[int], first_layer: int, num_layers: int) -> "Runs":
        """Find where these layers of these blocks lie in a pool of `num_pool_blocks`, in the order of the wire: rank by
        rank (the distinct ones), in each block by block and layer by layer, or layer by layer and block by block, as
        the pool's axes stand; so group by group. O(runs)."""
        groups = self.layer_groups(first_layer, num_layers)
        return Runs.joined([self.runs_of(group, num_pool_blocks, block_ids) for group in groups])

    def runs_of(self, group: "LayerGroup", num_pool_blocks: int, block_ids: Sequence[int]) -> "Runs":
        """Return the runs of one group of this layout, as `runs` does."""
        blocks, uniform = np.asarray(block_ids, dtype=np.int64), group.uniform
        ranks = np.asarray(uniform.distinct_ranks, dtype=np.int64) * (num_pool_blocks * self.rank_block_bytes)
        if self.is_block_major:
            starts, length = blocks * self.rank_block_bytes + group.start, group.num_bytes
        else:
            layers = np.arange(len(group.layers), dtype=np.int64)[:, None]
            places = (layers * num_pool_blocks + blocks) * uniform.layer_bytes
            starts, length = (group.start * num_pool_blocks + places).reshape(-1), uniform.layer_bytes
        offsets = (ranks[:, None] + starts).reshape(-1)
        return Runs(offsets, np.full(len(offsets), length, dtype=np.int64))

    def offsets(self, group: "LayerGroup", num_pool_blocks: int, block_ids: Sequence[int]) -> Offsets:
        """[distinct ranks, blocks, layers] int64: where each one's `layer_bytes` lie in a pool of `num_pool_blocks`."""
        blocks, size = np.asarray(block_ids, dtype=np.int64)[:, None], group.uniform.layer_bytes
        ranks = np.asarray(group.uniform.distinct_ranks, dtype=np.int64)[:, None, None]
        ranks = ranks * (num_pool_blocks * self.rank_block_bytes)
        layers = np.arange(len(group.layers), dtype=np.int64)
        if self.is_block_major:
            return ranks + group.start + blocks * self.rank_block_bytes + layers * size
        return ranks + group.start * num_pool_blocks + (layers * num_pool_blocks + blocks) * size

    def to_proto(self) -> kv_pb2.KVLayout:
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layer_shapes"}
        shapes = [kv_pb2.LayerShape(num_kv_heads=heads, head_dim=dim) for heads, dim in self.layer_shapes]
        return kv_pb2.KVLayout(**plain, layer_shapes=shapes)

    @classmethod
    def from_proto(cls, message: kv_pb2.KVLayout) -> "KVLayout":
        plain = {f.name: getattr(message, f.name) for f in fields(cls) if f.name != "layer_shapes"}
        received = message.layer_shapes[: LARGEST["num_layers"] + 1]  # the first ones are enough for an error
        shapes = tuple((shape.num_kv_heads, shape.head_dim) for shape in received)
        layout = cls(**plain, layer_shapes=shapes)
        return replace(layout, packing=layout.packing or ROWS, num_vectors=layout.num_vectors or KEY_AND_VALUE)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Neighbouring layers of one shape."""

    layers: range
    start: int  # bytes of the earlier layers in one block of one rank
    # The layout that would result if all layers had this shape, of the ranks that hold it, which are the pool's first.
    uniform: KVLayout

    @property
    def num_bytes(self) -> int:
        """Bytes of the group in one block of one rank."""
        return len(self.layers) * self.uniform.layer_bytes

    def part(self, first: int, end: int) -> "LayerGroup":
        """The part of the group from layer `first` to `end`."""
        layers = range(max(first, self.layers.start), min(end, self.layers.stop))
        skipped_bytes = (layers.start - self.layers.start) * self.uniform.layer_bytes
        return LayerGroup(layers, self.start + skipped_bytes, self.uniform)


@lru_cache(maxsize=64)
def _layer_groups(layout: KVLayout) -> tuple[LayerGroup, ...]:
    """All groups of a layout: of layers of one shape and one model."""
    found: list[LayerGroup] = []
    first = start = 0
    kinds = ((layer >= layout.num_target_layers, layout.shape_of(layer)) for layer in range(layout.num_layers))
    for (is_draft, (num_kv_heads, head_dim)), alike in groupby(kinds):
        packing, ranks, vectors = layout.packing, layout.tensor_parallel, layout.num_vectors
        if is_draft:
            packing, ranks = layout.draft_packing or packing, layout.draft_tensor_parallel or ranks
            vectors = layout.num_draft_vectors
        shape = replace(layout, num_kv_heads=num_kv_heads, head_dim=head_dim, num_vectors=vectors, layer_shapes=())
        uniform = replace(shape, packing=packing, tensor_parallel=ranks)
        found.append(LayerGroup(range(first, first + len(list(alike))), start, uniform))
        first, start = found[-1].layers.stop, start + found[-1].num_bytes
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of bytes in one region, in the order in which they are sent."""

    offsets: Offsets  # [n] int64, bytes from the region's start
    lengths: Offsets  # [n] int64, bytes

    @classmethod
    def joined(cls, parts: "Sequence[Runs]") -> "Runs":
        """Concatenate runs."""
        if len(parts) == 1:
            return parts[0]
        return cls(np.concatenate([part.offsets for part in parts]), np.concatenate([part.lengths for part in parts]))

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def merged(self) -> "Runs":
        """Runs of the same bytes; adjacent ones are merged."""
        starts = np.flatnonzero(np.diff(self.offsets, prepend=-1) != np.concatenate(([0], self.lengths[:-1])))
        return Runs(self.offsets[starts], np.add.reduceat(self.lengths, starts) if len(starts) else self.lengths)

    def cut(self, num_bytes: int) -> "Runs":
        """Runs of the same bytes, split at multiples of `num_bytes`."""
        ends = self.offsets + self.lengths
        pieces = -(-ends // num_bytes) - self.offsets // num_bytes  # that each lies in
        nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = (np.repeat(self.offsets // num_bytes, pieces) + nth) * num_bytes
        offsets = np.maximum(np.repeat(self.offsets, pieces), starts)
        return Runs(offsets, np.minimum(np.repeat(ends, pieces), starts + num_bytes) - offsets)


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Runs of a peer's region, and where in ours each goes."""

    remote: Offsets  # [n] int64, bytes from the start of the peer's pool
    local: Offsets  # [n] int64, bytes from the start of our region
    lengths: Offsets  # [n] int64, bytes

    @classmethod
    def of(cls, remote: Runs, local: Runs) -> "Copies":
        """Copies between runs of equal lengths; those adjacent on both sides are merged."""
        assert np.array_equal(remote.lengths, local.lengths)
        gaps = np.concatenate(([0], remote.lengths[:-1]))
        far, near = np.diff(remote.offsets, prepend=-1) != gaps, np.diff(local.offsets, prepend=-1) != gaps
        starts = np.flatnonzero(far | near)
        lengths = np.add.reduceat(remote.lengths, starts) if len(starts) else remote.lengths
        return cls(remote.offsets[starts], local.offsets[starts], lengths)

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def into(self) -> Runs:
        return Runs(self.local, self.lengths)


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that transports read or write: a KV pool, or a buffer beside it. Valid while its owner lives."""

    address: int
    num_bytes: int
    view: memoryview | None  # writable bytes; None for device memory
    device_id: int = 0
    is_fake: bool = False  # device memory that is the host's, of a device for tests
    pieces: PoolPieces | None = None  # of several devices' memory, that it consists of
    file: PoolFile | None = None  # that begins with it, for others to map read-only


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Memory of a KV pool, and how blocks lie in it."""

    layout: KVLayout
    num_blocks: int
    region: Region
    # Whose parts of the pool `region` has, one after the other; None: all of the layout's.
    ranks: range | None = field(default=None, kw_only=True)

    @property
    def held_ranks(self) -> range:
        """The ranks whose parts of the pool `region` has."""
        return range(self.layout.tensor_parallel) if self.ranks is None else self.ranks

    def read(self, runs: Runs) -> Iterator[memoryview | bytes]:
        """The bytes of these runs of `region`, in pieces."""
        assert self.region.view is not None
        for start, length in zip(runs.offsets.tolist(), runs.lengths.tolist(), strict=True):
            yield self.region.view[start : start + length]

    def runs(self, block_ids: Sequence[int], first_layer: int, num_layers: int) -> Runs:
        return self.layout.runs(self.num_blocks, block_ids, first_layer, num_layers)
