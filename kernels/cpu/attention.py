"""The compiled twins of paged_attention.py and rope_kv_write.py, over a cache that is packed for the dot product.

    rows   [num_blocks, 2, block_size, K, D]                                     as the torch twins and Triton have it
    dot    [num_blocks, 2, K, block_size / 16, 16 * D], within a group of 16 slots:
           K as [D / P, 16, P], V as [16 / P, D, P]; P = 2 for bfloat16, else 1

A cache of 8-bit numbers (kv/kv_scales.py) has D + 2 in the place of D: in rows the bytes of a vector's scale are before
its numbers, in dot those of a group's 16 scales are after the group's numbers. One of 4-bit numbers has D / 2 + 2.

A block of kv/kivi.py's format is as that file has it; its tail is packed as a cache of the dtype that is computed in,
in blocks of 32 tokens.

A row's result has the same bits in whatever batch, chunk or number of threads it is computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.paged_attention import NO_OPTIONS, AttentionOptions, PagedBatch
from ..kv import kivi
from ..kv.kv_scales import SCALE_BYTES, numbers_in
from .library import DTYPES, Team
from .limits import LARGEST_HEAD_DIM

GROUP = 16  # slots
FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.uint8: 3}  # KVFormat of scaled.h, of scaled numbers
KIVI_FORMAT = 4
_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class Cache(ctypes.Structure):
    """The cache of one layer of a pool. Holds addresses: valid while the tensor lives."""

    _fields_ = [
        ("base", _P),
        *((name, _L) for name in ("block_stride", "block_size", "num_kv_heads", "head_dim", "format")),
        ("tail", _P),
    ]

    @classmethod
    def of(cls, cache: Tensor) -> Cache:
        """cache: [num_blocks, 2, K, block_size / 16, 16 * D], or of 8-bit numbers 16 * (D + 2), of 4-bit ones
        16 * (D / 2 + 2); a block contiguous."""
        assert is_packed(cache)
        _, _, num_kv_heads, num_groups, size = cache.shape
        stride, head_dim = cache.stride(0) * cache.element_size(), _head_dim(cache, size // GROUP)
        return cls(cache.data_ptr(), stride, num_groups * GROUP, num_kv_heads, head_dim, FORMATS.get(cache.dtype, 0))

    @classmethod
    def of_kivi(cls, pool: Tensor, tail: Cache) -> Cache:
        """pool: [num_blocks, 2, K, 20 D] uint8, a block contiguous. Valid while it and `tail` live."""
        assert pool.dtype == torch.uint8 and pool[0].is_contiguous() and tail.format == 0
        assert pool.shape[1:] == (2, tail.num_kv_heads, kivi.block_bytes(tail.head_dim))
        assert tail.block_size == kivi.GROUP
        sizes = kivi.GROUP, tail.num_kv_heads, tail.head_dim
        return cls(pool.data_ptr(), pool.stride(0), *sizes, KIVI_FORMAT, ctypes.addressof(tail))


class Heads(ctypes.Structure):
    _fields_ = [
        ("num_heads", _L),
        ("num_kv_heads", _L),
        ("head_dim", _L),
        ("scale", _F),
        ("softcap", _F),
        ("window", _L),
        ("sinks", _P),
    ]

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int, options: AttentionOptions = NO_OPTIONS) -> Heads:
        """Valid while `options.sinks` lives."""
        assert num_heads % num_kv_heads == 0 and head_dim % GROUP == 0 and head_dim <= LARGEST_HEAD_DIM
        scale, sinks = options.scale_of(head_dim), options.sinks
        assert scale > 0.0 and options.softcap >= 0.0 and options.window >= 0
        assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
        address = None if sinks is None else sinks.data_ptr()
        return cls(num_heads, num_kv_heads, head_dim, scale, options.softcap, options.window, address)


class SparseStruct(ctypes.Structure):
    """attention.h's struct Sparse."""

    _fields_ = [
        ("num_seqs", _L),
        ("num_chosen", _L),
        ("block_size", _L),
        ("bounded", _P),
        ("chosen", _P),
        ("queries", _P),
        ("scores", _P),
        ("score_stride", _L),
    ]


class Sequences(ctypes.Structure):
    _fields_ = [
        ("num_seqs", _L),
        ("table_stride", _L),
        ("block_tables", _P),
        ("context_lens", _P),
        ("query_starts", _P),
        *((name, _P) for name in ("sparse", "tails", "tail_starts")),
    ]

    @classmethod
    def of(cls, batch: PagedBatch, sparse: SparseStruct | None = None, tails: Tails | None = None) -> Sequences:
        """Valid while the batch, `sparse` and `tails` live."""
        tables, lens, starts = batch.block_tables, batch.context_lens, batch.query_starts
        assert tables.dtype == lens.dtype == starts.dtype == torch.int32
        assert tables.stride(1) == 1 and lens.is_contiguous() and starts.is_contiguous()
        addresses = tables.data_ptr(), lens.data_ptr(), starts.data_ptr()
        made = cls(len(lens), tables.stride(0), *addresses, sparse and ctypes.addressof(sparse))
        if tails is not None:
            made.tails, made.tail_starts = tails.blocks.data_ptr(), tails.starts.data_ptr()
        return made


@dataclass(frozen=True, slots=True)
class Tails:
    """Blocks of the tail that the new tokens of a batch's sequences are in."""

    blocks: Tensor  # int32, those of each sequence in order
    starts: Tensor  # [S] int32: where each sequence's begin

    @classmethod
    def of(cls, batch: PagedBatch, tails: Sequence[int]) -> Tails:
        starts = [0]
        for length, num_new in zip(batch.host_context_lens, batch.host_num_new, strict=True):
            starts.append(starts[-1] + (length - 1) // kivi.GROUP - (length - num_new) // kivi.GROUP + 1)
        assert len(tails) == starts[-1] and batch.block_size == kivi.GROUP
        return cls(torch.tensor(tails, dtype=torch.int32), torch.tensor(starts[:-1], dtype=torch.int32))


class AttentionLimits(ctypes.Structure):
    """The largest batch that a scratch is made for: sequences, rows of queries, tokens of one context."""

    _fields_ = [("num_seqs", _L), ("num_rows", _L), ("context_len", _L)]


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Memory that the threads of a team keep between pieces of their work, and the plan of a step."""

    limits: AttentionLimits
    memory: Tensor  # uint8
    address: int

    @classmethod
    def of(cls, team: Team, dtype: torch.dtype, heads: Heads, limits: AttentionLimits) -> AttentionScratch:
        num_bytes = _L()
        kernel = team.library.kernel("paged_attention_scratch", _I, _P, _P, _P)
        kernel(team.address, DTYPES[dtype], ctypes.byref(heads), ctypes.byref(limits), ctypes.byref(num_bytes))
        memory = torch.zeros(num_bytes.value + 64, dtype=torch.uint8)
        return cls(limits, memory, -(-memory.data_ptr() // 64) * 64)


def is_packed(cache: Tensor) -> bool:
    """Return whether a layer's tensor is of the "dot" packing, as Cache.of takes it."""
    return cache.dim() == 5 and cache.shape[4] // GROUP % GROUP == _scale_size(cache) and cache[0].is_contiguous()


def pack(cache: Tensor) -> Tensor:
    """rows -> dot, a new tensor: [num_blocks, 2, block_size, K, D] -> [num_blocks, 2, K, block_size / 16, 16 * D]."""
    num_blocks, _, block_size, num_kv_heads, size = cache.shape
    scale = _scale_size(cache)
    dim, pair, groups = size - scale, _pair(cache), block_size // GROUP
    assert block_size % GROUP == 0 and dim % GROUP == 0
    whole = cache.view(num_blocks, 2, groups, GROUP, num_kv_heads, size)
    rows = whole[..., scale:]
    keys = rows[:, 0].unflatten(4, (dim // pair, pair)).permute(0, 3, 1, 4, 2, 5)
    values = rows[:, 1].unflatten(2, (GROUP // pair, pair)).permute(0, 4, 1, 2, 5, 3)
    numbers = torch.stack([x.reshape(num_blocks, num_kv_heads, groups, GROUP * dim) for x in (keys, values)], dim=1)
    if not scale:
        return numbers
    scales = whole[..., :scale].permute(0, 1, 4, 2, 3, 5).reshape(*numbers.shape[:-1], GROUP * scale)
    return torch.cat((numbers, scales), dim=-1)


def unpack(cache: Tensor) -> Tensor:
    """dot -> rows, a new tensor."""
    num_blocks, _, num_kv_heads, groups, size = cache.shape
    scale = _scale_size(cache)
    pair, dim = _pair(cache), size // GROUP - scale
    numbers = cache[..., : GROUP * dim]
    keys = numbers[:, 0].unflatten(3, (dim // pair, GROUP, pair)).permute(0, 2, 4, 1, 3, 5)
    values = numbers[:, 1].unflatten(3, (GROUP // pair, dim, pair)).permute(0, 2, 3, 5, 1, 4)
    shape = num_blocks, groups * GROUP, num_kv_heads, dim
    rows = torch.stack([part.reshape(shape) for part in (keys, values)], dim=1)
    if not scale:
        return rows
    scales = cache[..., GROUP * dim :].unflatten(4, (GROUP, scale)).permute(0, 1, 3, 4, 2, 5)
    return torch.cat((scales.reshape(*rows.shape[:-1], scale), rows), dim=-1)


def _pair(cache: Tensor) -> int:
    return 2 if cache.element_size() == 2 else 1


def _head_dim(cache: Tensor, size: int) -> int:
    """Numbers of a vector of `size` elements, its scale included."""
    return (size - _scale_size(cache)) * numbers_in(cache.dtype)


def _scale_size(cache: Tensor) -> int:
    """Elements that a vector's scale takes."""
    return SCALE_BYTES if cache.dtype in FORMATS else 0


def _fits(cache: Tensor, dtype: torch.dtype) -> bool:
    """Return whether what computes in `dtype` can read and write it."""
    return cache.dtype == dtype or cache.dtype in FORMATS


class Rope(ctypes.Structure):
    _fields_ = [("table", _P), ("num_rotated", _L)]

    @classmethod
    def of(cls, table: Tensor, heads: Heads) -> Rope:
        """table: [positions, R] float32, cosines first, of the first R numbers of each head. Valid while it lives."""
        num_rotated = table.shape[1]
        assert num_rotated % 2 == 0 and num_rotated <= heads.head_dim
        assert table.is_contiguous() and table.dtype == torch.float32
        return cls(table.data_ptr(), num_rotated)


class HeadNormsStruct(ctypes.Structure):
    """attention.h's struct HeadNorms."""

    _fields_ = [("q", _P), ("k", _P), ("eps", _F), ("is_whole", _I)]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each query and key head before they are rotated, or of all those of a row at once."""

    q: Tensor  # float32: [D], or [N * D]
    k: Tensor  # float32: [D], or [K * D]
    eps: float

    def struct(self, heads: Heads) -> HeadNormsStruct:
        is_whole = self.q.numel() != heads.head_dim
        for weight, num_heads in ((self.q, heads.num_heads), (self.k, heads.num_kv_heads)):
            assert weight.shape == (heads.head_dim * (num_heads if is_whole else 1),) and weight.dtype == torch.float32
        return HeadNormsStruct(self.q.data_ptr(), self.k.data_ptr(), self.eps, is_whole)


@dataclass(frozen=True, slots=True)
class Places:
    """Cache places of the T tokens of a step."""

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + offset; the slots of one sequence in order


def rope_kv_write(
    team: Team, qkv: Tensor, heads: Heads, rope: Tensor, places: Places, cache: Tensor, norms: HeadNorms | None = None
) -> None:
    """Norm queries and keys, rotate the queries, in place; store the rotated keys, and the values, in one layer of the
    cache.

    qkv: [T, (N + 2 K) * D], rows contiguous: queries, keys, values. rope: [positions, R] float32, cosines first, of
    the first R numbers of each head. cache: packed, of qkv's dtype or of scaled numbers.
    """
    to = Cache.of(cache)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    assert qkv.shape[1] == width and qkv.stride(1) == 1 and _fits(cache, qkv.dtype)
    assert (to.num_kv_heads, to.head_dim) == (heads.num_kv_heads, heads.head_dim)
    for numbers in (places.positions, places.slots):
        assert numbers.shape == (len(qkv),) and numbers.is_contiguous() and numbers.dtype == torch.int64
    kernel = team.library.kernel("rope_kv_write", _I, _P, _L, _L, _P, _P, _P, _P, _P, _P)
    kernel(
        team.address,
        DTYPES[qkv.dtype],
        qkv.data_ptr(),
        qkv.stride(0),
        len(qkv),
        ctypes.byref(heads),
        ctypes.byref(norms.struct(heads) if norms else HeadNormsStruct()),
        ctypes.byref(Rope.of(rope, heads)),
        places.positions.data_ptr(),
        places.slots.data_ptr(),
        ctypes.byref(to),
    )


@dataclass(frozen=True, slots=True)
class KiviLayer:
    """A layer's KV in 4 bits, and where it waits for the rest of its block."""

    pool: Tensor  # [num_blocks, 2, K, 20 D] uint8, a block contiguous
    tail: Tensor  # [num_tail_blocks, 2, K, 2, 16 D], packed, a block contiguous


def round_blocks(team: Team, layer: KiviLayer, pairs: Tensor) -> None:
    """Compute what kv/kivi.py's round_blocks does. pairs: [n, 2] int64 contiguous: a block of the tail, one of the
    pool."""
    assert pairs.shape[1:] == (2,) and pairs.dtype == torch.int64 and pairs.is_contiguous()
    tail = Cache.of(layer.tail)
    pool = Cache.of_kivi(layer.pool, tail)
    kernel = team.library.kernel("round_blocks", _I, _P, _P, _L)
    kernel(team.address, DTYPES[layer.tail.dtype], ctypes.byref(pool), pairs.data_ptr(), len(pairs))


def plan_attention(
    team: Team,
    dtype: torch.dtype,
    heads: Heads,
    batch: PagedBatch,
    scratch: AttentionScratch,
    sparse: SparseStruct | None = None,
    tails: Tails | None = None,
) -> None:
    """Divide a step's work for the team. Once for all layers; where their windows differ, with the widest."""
    limits = scratch.limits
    assert len(batch.host_num_new) <= limits.num_seqs and sum(batch.host_num_new) <= limits.num_rows
    sequences = Sequences.of(batch, sparse, tails)
    kernel = team.library.kernel("plan_attention", _I, _P, _P, _P, _P)
    references: list[Any] = [ctypes.byref(part) for part in (heads, sequences, limits)]
    kernel(team.address, DTYPES[dtype], *references, scratch.address)


def paged_attention(
    team: Team,
    q: Tensor,
    cache: Tensor,
    batch: PagedBatch,
    heads: Heads,
    scratch: AttentionScratch,
    sparse: SparseStruct | None = None,
) -> Tensor:
    """Compute what paged_attention.paged_attention does, by the plan in `scratch`. sparse: see sparse.py.

    q: [T, N, D], a row contiguous; cache: packed, of q's dtype or of 8-bit numbers. Returns [T, N, D] contiguous.
    """
    assert q.shape[1:] == (heads.num_heads, heads.head_dim) and q[:1].is_contiguous() and _fits(cache, q.dtype)
    return _attend(team, q, Cache.of(cache), Sequences.of(batch, sparse), heads, scratch, batch.block_size)


def kivi_attention(
    team: Team,
    q: Tensor,
    layer: KiviLayer,
    batch: PagedBatch,
    tails: Tails,
    heads: Heads,
    scratch: AttentionScratch,
) -> Tensor:
    """Compute what attention/kivi_attention.py does, by the plan in `scratch`, which was made with the same tails.

    q: [T, N, D], a row contiguous. Returns [T, N, D] contiguous.
    """
    assert q.shape[1:] == (heads.num_heads, heads.head_dim) and q[:1].is_contiguous() and layer.tail.dtype == q.dtype
    tail = Cache.of(layer.tail)
    source, sequences = Cache.of_kivi(layer.pool, tail), Sequences.of(batch, tails=tails)
    return _attend(team, q, source, sequences, heads, scratch, batch.block_size)


def _attend(
    team: Team,
    q: Tensor,
    source: Cache,
    sequences: Sequences,
    heads: Heads,
    scratch: AttentionScratch,
    block_size: int,
) -> Tensor:
    assert (source.num_kv_heads, source.head_dim) == (heads.num_kv_heads, heads.head_dim)
    assert source.block_size == block_size
    out = torch.empty(q.shape, dtype=q.dtype)
    kernel = team.library.kernel("paged_attention", _I, _P, _L, _P, _L, _P, _P, _P, _P)
    kernel(
        team.address,
        DTYPES[q.dtype],
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        ctypes.byref(heads),
        ctypes.byref(sequences),
        ctypes.byref(source),
        scratch.address,
    )
    return out
