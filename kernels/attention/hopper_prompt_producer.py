"""The warp that brings keys and values to hopper_prompt_kernel.py, which describes its barriers; and a program's items.

An item is a pair of a tile of queries and a KV head.
"""

# What Gluon's types do not know: constants are numbers, and tuples are tuples.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportReturnType=false

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# A name that differs between Triton 3.6 and later ones.
_copy: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def turns_of(num_items: gl.tensor) -> gl.tensor:
    """Number of items of this program."""
    programs = gl.num_programs(0)
    turns = (num_items + programs - 1) // programs
    return turns - (item_of(turns - 1) >= num_items).to(gl.int32)


@gluon.jit
def item_of(turn: gl.tensor) -> gl.tensor:
    """Item of a turn: every so many, back and forth, so that programs get nearly equal work."""
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return turn * programs + place


@gluon.jit
def look_up(
    item: gl.tensor,
    places: gl.tuple,
    window: gl.tensor,
    KV_HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
) -> gl.tuple:
    """(sequence, first row of its queries, first new token, the last one of the tile, tokens before the new ones,
    context, first tile of slots, last one). places: tiles, block tables, context lengths, query starts."""
    tiles, _, context_lens, query_starts = places
    seq = gl.load(tiles + item // KV_HEADS * 2)
    first_token = gl.load(tiles + item // KV_HEADS * 2 + 1)
    query_start = gl.load(query_starts + seq)
    num_new = gl.load(query_starts + seq + 1) - query_start
    context = gl.load(context_lens + seq)
    history = context - num_new
    last_token = gl.minimum(first_token + TOKENS, num_new) - 1
    start = item * 0
    if HAS_WINDOW:
        start = gl.maximum(history + first_token - window + 1, 0) // BLOCK_N
    return seq, query_start, first_token, last_token, history, context, start, (history + last_token) // BLOCK_N


@gluon.jit
def _blocks(
    table: gl.tensor,
    first: gl.tensor,
    context: gl.tensor,
    PAGE: gl.constexpr,
    PAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> gl.tuple:
    """Blocks of a tile of slots; where it goes past the context, the last block of the context again."""
    blocks = ()
    for page in gl.static_range(PAGES):
        block = gl.load(table + gl.minimum(first + page * PAGE, context - 1) // BLOCK_SIZE)
        blocks = blocks + (block,)  # noqa: RUF005 (Triton knows no *)
    return blocks


@gluon.jit
def _bring(
    descriptor: tma.tensor_descriptor,
    blocks: gl.tuple,
    which: gl.constexpr,
    first: gl.tensor,
    kv_head: gl.tensor,
    stage: gl.tensor,
    full: gl.shared_memory_descriptor,
    pieces: gl.shared_memory_descriptor,
    PAGE: gl.constexpr,
    PAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
) -> None:
    """Begin to copy the keys (which: 0) or values (1) of the tile from slot `first` on into a stage."""
    place = first % BLOCK_SIZE if PAGE < BLOCK_SIZE else 0
    for part in gl.static_range(PARTS):
        for page in gl.static_range(PAGES):
            piece = pieces.index((stage * PARTS + part) * PAGES + page)
            _copy(descriptor, [blocks[page], which, place, kv_head, part * 64], full.index(stage), piece)


@gluon.jit
def produce(
    descriptor: tma.tensor_descriptor,
    buffers: gl.tuple,
    places: gl.tuple,
    table_stride: gl.tensor,
    num_items: gl.tensor,
    window: gl.tensor,
    KV_HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
) -> None:
    """Fill stage after stage. buffers: pieces of keys and of values, `full`, `empty`, `turn`."""
    keys, values, full, empty = buffers[0], buffers[1], buffers[2], buffers[3]
    PAGE: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    PAGES: gl.constexpr = BLOCK_N // PAGE
    PARTS: gl.constexpr = DIM // 64
    count = 0
    for turn in range(turns_of(num_items)):
        item = item_of(turn)
        kv_head = item % KV_HEADS
        seq, _, _, _, _, context, start, last = look_up(item, places, window, KV_HEADS, TOKENS, BLOCK_N, HAS_WINDOW)
        table = places[1] + seq.to(gl.int64) * table_stride
        num_tiles = last - start + 1
        blocks = _blocks(table, last * BLOCK_N, context, PAGE, PAGES, BLOCK_SIZE)
        before = blocks
        for step in range(num_tiles + 1):
            stage = count % STAGES
            first = (last - step) * BLOCK_N
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            has_both = (step > 0) & (step < num_tiles)
            mbarrier.expect(full.index(stage), 2 * BLOCK_N * DIM * 2, pred=has_both)
            mbarrier.expect(full.index(stage), BLOCK_N * DIM * 2, pred=has_both == 0)
            if step < num_tiles:
                _bring(descriptor, blocks, 0, first, kv_head, stage, full, keys, PAGE, PAGES, PARTS, BLOCK_SIZE)
            if step > 0:
                after = first + BLOCK_N
                _bring(descriptor, before, 1, after, kv_head, stage, full, values, PAGE, PAGES, PARTS, BLOCK_SIZE)
            before = blocks
            blocks = _blocks(table, gl.maximum(first - BLOCK_N, 0), context, PAGE, PAGES, BLOCK_SIZE)
            count += 1
