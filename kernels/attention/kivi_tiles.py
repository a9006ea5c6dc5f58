"""Shared code of the attention kernels over KV that kv/kivi.py keeps: a tile of query rows, which are of one block of
tokens, over the blocks before it in the pool, and over their own in the tail.

Queries meet keys in two parts, their even and their odd numbers, because a byte of the pool has one of each; values
come in two parts likewise: of each 32 numbers the first 16, and the others. Codes are widened to what was stored, in
float32, and rounded once to the dtype that matrix units multiply.
"""

from __future__ import annotations

from ..common.lang import jit, tl
from .attention_tiles import soft_capped
from .stored_bytes import apart


@jit
def _number_columns(BLOCK_D: tl.constexpr):
    """Numbers of a vector that the columns of the first part of values have, [BLOCK_D / 2] int32; those of the other
    part are 16 further."""
    column = tl.arange(0, BLOCK_D // 2)
    return column // 16 * 32 + column % 16


@jit
def load_queries(
    q: tl.tensor,
    row: tl.tensor,  # [M] int64, of q
    head: tl.tensor,  # [M]
    is_row: tl.tensor,
    q_token_stride: int,
    q_head_stride: int,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Two parts of these queries, their even and their odd numbers, [M, BLOCK_D / 2]."""
    d = tl.arange(0, BLOCK_D)
    address = q + (row * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
    return apart(tl.load(address, mask=is_row[:, None] & (d < DIM)[None, :], other=0.0), 2)


@jit
def store_values(
    target: tl.tensor, values: tl.tuple, total: tl.tensor, is_row: tl.tensor, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """target: [M, 1] pointers to rows; values: two parts, [M, BLOCK_D / 2] float32, divided by `total` [M]."""
    column = _number_columns(BLOCK_D)
    inside = is_row[:, None] & (column < DIM)[None, :]
    tl.store(target + column[None, :], values[0] / total[:, None], mask=inside)  # pyright: ignore[reportArgumentType]
    tl.store(target + 16 + column[None, :], values[1] / total[:, None], mask=inside)  # pyright: ignore[reportArgumentType]


@jit
def _loaded(address: tl.tensor, inside: tl.tensor, IS_WHOLE: tl.constexpr):
    """Load from these addresses; zeros where not `inside`. IS_WHOLE: all are."""
    return tl.load(address) if IS_WHOLE else tl.load(address, mask=inside, other=0)


@jit
def _floats(bits: tl.tensor):
    return bits.to(tl.float32, bitcast=True)


@jit
def _widened(codes: tl.tensor, scale: tl.tensor, least: tl.tensor):
    """codes: int32, 0 to 15; scale, least: float32. A code beside 2^23 is the bits of a float32, without an instruction
    that converts."""
    return (_floats(codes | 0x4B000000) - 8388608.0) * scale + least


@jit
def _scores_of_keys(
    query: tl.tuple,  # two parts, [M, BLOCK_D / 2]
    keys: tl.tensor,  # pointer to a head's bytes of a block
    slot: tl.tensor,  # [S], in the block
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """[M, S] float32."""
    pair = tl.arange(0, BLOCK_D // 2)
    inside = pair < DIM // 2
    place = pair[:, None] * 16 + (slot // 16 * (8 * DIM) + slot % 16)[None, :]
    codes = _loaded(keys + place, inside[:, None], DIM == BLOCK_D).to(tl.int32)
    # Two bfloat16 in a word: of an even number, and of the odd one after it.
    words = (keys + 16 * DIM).to(tl.pointer_type(tl.int32)) + pair
    scales = _loaded(words, inside, DIM == BLOCK_D)
    leasts = _loaded(words + DIM // 2, inside, DIM == BLOCK_D)
    even = _widened(codes & 15, _floats(scales << 16)[:, None], _floats(leasts << 16)[:, None])
    odd = _widened(codes >> 4, _floats(scales & -65536)[:, None], _floats(leasts & -65536)[:, None])
    score = tl.dot(query[0], even.to(query[0].dtype), input_precision="ieee")  # pyright: ignore[reportArgumentType]
    return tl.dot(query[1], odd.to(query[0].dtype), score, input_precision="ieee")  # pyright: ignore[reportArgumentType]


@jit
def _values(values: tl.tensor, slot: tl.tensor, query: tl.tensor, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Values of slots as `_scores_of_keys` has them, in two parts, [S, BLOCK_D / 2], of the query's dtype."""
    group = tl.arange(0, BLOCK_D // 32)[None, :]
    inside = group < DIM // 32
    place = (slot[:, None] * (DIM // 2) + group * 16)[:, :, None] + tl.arange(0, 16)[None, None, :]
    codes = _loaded(values + place, inside[:, :, None], DIM == BLOCK_D).to(tl.int32)
    halves = (values + 16 * DIM).to(tl.pointer_type(tl.bfloat16)) + group * 32 + slot[:, None]
    scale = _loaded(halves, inside, DIM == BLOCK_D).to(tl.float32)[:, :, None]
    least = _loaded(halves + DIM, inside, DIM == BLOCK_D).to(tl.float32)[:, :, None]
    first, second = _widened(codes & 15, scale, least).to(query.dtype), _widened(codes >> 4, scale, least)
    return _by_slot(first), _by_slot(second.to(query.dtype))


@jit
def _by_slot(values: tl.tensor):
    """values: [S, BLOCK_D / 32, 16]. Returns [S, BLOCK_D / 2]."""
    return tl.reshape(values, (values.shape[0], values.shape[1] * 16))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]


@jit
def _attended(
    acc: tl.tuple,  # two parts, [M, BLOCK_D / 2] float32: values so far, weighed
    total: tl.tensor,  # [M] float32: weights so far
    highest: tl.tensor,  # [M] float32: the highest score so far, to base 2
    score: tl.tensor,  # [M, S] float32, -inf of what a row does not see
    first: tl.tensor,  # [S, BLOCK_D / 2], parts of the values
    second: tl.tensor,
    factor: float,  # that makes scores those to base 2
):
    """acc, total and highest with these slots (FlashAttention-2, algorithm 1)."""
    new_highest = tl.maximum(highest, tl.max(score, 1) * factor)  # pyright: ignore[reportOperatorIssue]
    # A row that has seen nothing yet has no highest score to measure from.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weight = tl.exp2(score * factor - base[:, None])
    decay = tl.exp2(highest - base)
    total = total * decay + tl.sum(weight, 1)
    weight = weight.to(first.dtype)
    acc = (  # pyright: ignore[reportAssignmentType]
        tl.dot(weight, first, acc[0] * decay[:, None], input_precision="ieee"),  # pyright: ignore[reportArgumentType]
        tl.dot(weight, second, acc[1] * decay[:, None], input_precision="ieee"),  # pyright: ignore[reportArgumentType]
    )
    return acc, total, new_highest


@jit
def walk_blocks(
    acc: tl.tuple,  # see _attended
    total: tl.tensor,
    highest: tl.tensor,
    query: tl.tuple,  # two parts, [M, BLOCK_D / 2]: the even numbers, and the odd ones
    position: tl.tensor,  # [M] int32: each row's place in its sequence
    begin: int,  # blocks [begin, end) of the sequence are walked: every row sees them whole, but for a window
    end: int,
    table: tl.tensor,  # the sequence's blocks
    pool: tl.tensor,  # at the KV head
    pool_block_stride: int,
    pool_kv_stride: int,
    scale: float,  # of scores, times log2(e) unless they are capped
    softcap: float,
    window: int,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS: tl.constexpr,  # of a tile of keys: 16 or 32
):
    """The pool's blocks before the rows' own."""
    PARTS: tl.constexpr = 32 // SLOTS  # of a block
    for number in range(begin * PARTS, end * PARTS):  # pyright: ignore[reportArgumentType]
        keys = pool + tl.load(table + number // PARTS).to(tl.int64) * pool_block_stride
        place = number % PARTS * SLOTS + tl.arange(0, SLOTS)  # pyright: ignore[reportOperatorIssue]
        score = _scores_of_keys(query, keys, place, DIM, BLOCK_D)
        if HAS_SOFTCAP:
            score = soft_capped(score * scale, softcap)
        if HAS_WINDOW:
            slot = number * SLOTS + tl.arange(0, SLOTS)
            score = tl.where(slot[None, :] > position[:, None] - window, score, float("-inf"))
        first, second = _values(keys + pool_kv_stride, place, query[0], DIM, BLOCK_D)  # pyright: ignore[reportArgumentType]
        factor = 1.4426950408889634 if HAS_SOFTCAP else scale
        acc, total, highest = _attended(acc, total, highest, score, first, second, factor)
    return acc, total, highest


@jit
def attend_to_own(
    acc: tl.tuple,  # see walk_blocks
    total: tl.tensor,
    highest: tl.tensor,
    query: tl.tuple,
    position: tl.tensor,
    start: int,  # the first slot of the rows' own block
    stop: int,  # slots from here on are not seen, and may hold anything
    own: tl.tensor,  # pointer to that block of the tail, at the KV head
    tail_kv_stride: int,
    tail_slot_stride: int,
    scale: float,
    softcap: float,
    window: int,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The rows' own block, in the tail."""
    place = tl.arange(0, 32)
    slot = start + place
    used, d, column = slot < stop, tl.arange(0, BLOCK_D), _number_columns(BLOCK_D)
    rows = own + (place * tail_slot_stride)[:, None]
    keys = tl.load(rows + d[None, :], mask=used[:, None] & (d < DIM)[None, :], other=0.0)
    even, odd = apart(keys, 2)
    score = tl.dot(query[0], tl.trans(even), input_precision="ieee")  # pyright: ignore[reportArgumentType]
    score = tl.dot(query[1], tl.trans(odd), score, input_precision="ieee")  # pyright: ignore[reportArgumentType]
    if HAS_SOFTCAP:
        score = soft_capped(score * scale, softcap)
    seen = used[None, :] & (slot[None, :] <= position[:, None])
    if HAS_WINDOW:
        seen &= slot[None, :] > position[:, None] - window
    score = tl.where(seen, score, float("-inf"))
    inside = used[:, None] & (column < DIM)[None, :]
    at = rows + tail_kv_stride + column[None, :]
    first, second = tl.load(at, mask=inside, other=0.0), tl.load(at + 16, mask=inside, other=0.0)
    factor = 1.4426950408889634 if HAS_SOFTCAP else scale
    return _attended(acc, total, highest, score, first, second, factor)
