"""Attention of prompts on Hopper, in Gluon: products run while the exponentials of the tile before are computed.

It has not run on a GPU.

As FlashAttention 3 does it (Shah et al. 2024, arXiv 2407.08608, algorithm 2): the scores of a tile and the product of
the weights before with their values are issued together, and only the scores are waited for. One warp brings keys and
values by TMA, a copy for each block and 64 numbers of a head; two groups of four warps have half of the rows of
queries each. Tiles of slots are walked from the last to the first, so that those which need masks come first.

Barriers: a stage of shared memory holds the keys of a tile and the values of the tile whose keys came before. `full`
says that the copies into it are there (their bytes are expected), `empty` that both groups have read it. With TURNS
the groups issue their products in turns, which `turn` says.

It imports Gluon, which is there from Triton 3.6 on: hopper_prompts.py imports it only where it is to be used.
"""

# What Gluon's types do not know: constants are numbers, and tuples are tuples.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportReturnType=false

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as multiply
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as wait_for

from .hopper_prompt_producer import item_of, look_up, produce, turns_of

# Names that differ between Triton 3.6 and later ones.
_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
_view: Any = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def _weigh(
    score: gl.tensor,
    highest: gl.tensor,
    total: gl.tensor,
    scale: gl.tensor,
    position: gl.tensor,
    first: gl.tensor,
    window: gl.tensor,
    IS_MASKED: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
) -> gl.tuple:
    """(weights, highest score and total with this tile, what the sums so far are worth)."""
    if IS_MASKED:
        BLOCK_N: gl.constexpr = score.shape[1]
        slot = (first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score.type.layout)))[None, :]
        seen = slot <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (slot > position[:, None] - window)
        score = gl.where(seen, score, float("-inf"))
    new_highest = gl.maximum(highest, gl.max(score, 1) * scale)
    base = new_highest
    if IS_MASKED:  # a row that has seen nothing yet has no highest score to measure from
        base = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    weight = gl.exp2(score * scale - base[:, None])
    decay = gl.exp2(highest - base)
    return weight, new_highest, total * decay + gl.sum(weight, 1), decay


@gluon.jit
def _computed(total: gl.tensor) -> gl.tensor:
    """`total`, not negative, computed by now: without an event, which never happens, the assembler moves what it comes
    from behind the next wait, where nothing else runs."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p pmevent 3; mov.b32 $0, $1; }",
        "=f,f",
        [total],
        gl.float32,
        False,
        1,
    )


@gluon.jit
def _walk(
    state: gl.tuple,
    start: gl.tensor,
    stop: gl.tensor,
    buffers: gl.tuple,
    scale: gl.tensor,
    position: gl.tensor,
    window: gl.tensor,
    IS_MASKED: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    ME: gl.constexpr,
    TURNS: gl.constexpr,
) -> gl.tuple:
    """Tiles [start, stop) of slots from the last on. state: sums, the weights of the tile before them, highest score,
    total, stages used so far, tiles walked so far. buffers: queries, keys, values, `full`, `empty`, `turn`."""
    query, keys, values, full, empty, turn = buffers
    sums, weight, highest, total, count, step = state
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = highest.type.layout.parent
    ROWS: gl.constexpr = query.shape[0]
    nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
    for back in range(stop - start):
        place = count % STAGES
        mbarrier.wait(full.index(place), count // STAGES & 1)
        if TURNS:
            mbarrier.wait(turn.index(ME), step & 1)
        pending = multiply(query, keys.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
        adding = multiply(weight, values.index(place), sums, is_async=True)
        if TURNS:
            mbarrier.arrive(turn.index(1 - ME), count=1)
        score = wait_for(1, deps=(pending,))
        first = (stop - 1 - back) * BLOCK_N
        new, highest, total, decay = _weigh(
            score, highest, total, scale, position, first, window, IS_MASKED, HAS_WINDOW
        )
        total = _computed(total)
        halves = gl.convert_layout(new.to(weight.dtype), weight.type.layout)
        sums, weight, halves = wait_for(0, deps=(adding, weight, halves))
        _barrier()
        mbarrier.arrive(empty.index(place), count=1)
        sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None]
        weight = halves
        count += 1
        step += 1
    return sums, weight, highest, total, count, step


@gluon.jit
def _first_weights(
    buffers: gl.tuple,
    count: gl.tensor,
    first: gl.tensor,
    scale: gl.tensor,
    position: gl.tensor,
    window: gl.tensor,
    HAS_WINDOW: gl.constexpr,
    SCORES: gl.constexpr,
) -> gl.tuple:
    """(weights of the last tile of slots, highest score, total): its scores alone, with nothing beside them."""
    query, keys, _, full, empty, _ = buffers
    STAGES: gl.constexpr = keys.shape[0]
    ROWS: gl.constexpr = query.shape[0]
    place = count % STAGES
    mbarrier.wait(full.index(place), count // STAGES & 1)
    BLOCK_N: gl.constexpr = keys.shape[1]
    nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
    pending = multiply(query, keys.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = wait_for(0, deps=(pending,))
    _barrier()
    mbarrier.arrive(empty.index(place), count=1)
    highest = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    weight, highest, total, _ = _weigh(score, highest, total, scale, position, first, window, True, HAS_WINDOW)
    return weight, highest, total


@gluon.jit
def _clear(
    values: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    count: gl.tensor,
    first: gl.tensor,
    context: gl.tensor,
    WIDE: gl.constexpr,
) -> None:
    """Zero the values of slots past the context: they may be NaN, which a weight of zero would keep."""
    STAGES: gl.constexpr = values.shape[0]
    place = count % STAGES
    mbarrier.wait(full.index(place), count // STAGES & 1)
    value = values.index(place).load(WIDE)
    BLOCK_N: gl.constexpr = values.shape[1]
    slot = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WIDE))
    values.index(place).store(gl.where((slot < context)[:, None], value, 0.0))
    fence_async_shared()
    _barrier()


@gluon.jit
def _finish(buffers: gl.tuple, state: gl.tuple) -> None:
    """Add the weighted values of the first tile of slots, and leave the results in the memory of the queries."""
    query, _, values, full, empty, _ = buffers
    sums, weight, _, total, count, _ = state
    STAGES: gl.constexpr = values.shape[0]
    SUMS: gl.constexpr = sums.type.layout
    place = count % STAGES
    mbarrier.wait(full.index(place), count // STAGES & 1)
    adding = multiply(weight, values.index(place), sums, is_async=True)
    sums, weight = wait_for(0, deps=(adding, weight))
    _barrier()
    mbarrier.arrive(empty.index(place), count=1)
    sums = sums / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    query.store(sums.to(weight.dtype))
    _barrier()


@gluon.jit
def _edges(
    first_token: gl.tensor,
    last_token: gl.tensor,
    history: gl.tensor,
    start: gl.tensor,
    last: gl.tensor,
    window: gl.tensor,
    BLOCK_N: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
) -> gl.tuple:
    """(whole, diagonal): every row sees tiles [whole, diagonal); rows see different parts of those before and after."""
    diagonal = gl.minimum((history + first_token + 1) // BLOCK_N, last)
    whole = start
    if HAS_WINDOW:
        edge = gl.maximum(history + last_token - window + 1, 0)
        whole = gl.minimum((edge + BLOCK_N - 1) // BLOCK_N, last)
        diagonal = gl.maximum(diagonal, whole)
    return whole, diagonal


@gluon.jit
def _consume(
    q: gl.tensor,
    out: gl.tensor,
    query: gl.shared_memory_descriptor,
    buffers: gl.tuple,
    places: gl.tuple,
    strides: gl.tuple,
    num_items: gl.tensor,
    scale: gl.tensor,
    window: gl.tensor,
    ME: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    TURNS: gl.constexpr,
) -> None:
    """Attend for the rows of group ME, 0 or 1. query: [rows, DIM], also for the results; buffers: as produce has
    them; strides: of q and of out, of a token and of a head."""
    keys, values, full, empty, turn = buffers
    ROWS: gl.constexpr = query.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_token_stride, q_head_stride, out_token_stride, out_head_stride = strides
    keys = _view(keys, q.dtype.element_ty, [STAGES, BLOCK_N, DIM], SHARED)
    values = _view(values, q.dtype.element_ty, [STAGES, BLOCK_N, DIM], SHARED)
    own = (query, keys, values, full, empty, turn)
    row = ME * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    score_row = ME * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    count = 0
    step = 0
    for nth in range(turns_of(num_items)):
        item = item_of(nth)
        _, query_start, first_token, last_token, history, context, start, last = look_up(
            item, places, window, KV_HEADS, TOKENS, BLOCK_N, HAS_WINDOW
        )
        token = first_token + row // GROUP
        token_row = (query_start + token).to(gl.int64)
        head = (item % KV_HEADS) * GROUP + row % GROUP
        is_row = ((row // GROUP < TOKENS) & (token <= last_token))[:, None]
        q_address = q + (token_row * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
        _barrier()  # the results before were read
        query.store(gl.load(q_address, mask=is_row, other=0.0))
        fence_async_shared()
        _barrier()
        position = history + gl.minimum(first_token + score_row // GROUP, last_token)
        new, highest, total = _first_weights(own, count, last * BLOCK_N, scale, position, window, HAS_WINDOW, SCORES)
        count += 1
        weight = gl.convert_layout(new.to(q.dtype.element_ty), WEIGHTS)
        if (last + 1) * BLOCK_N > context:
            _clear(values, full, count, last * BLOCK_N, context, WIDE)
        sums = gl.zeros((ROWS, DIM), gl.float32, SUMS)
        whole, diagonal = _edges(first_token, last_token, history, start, last, window, BLOCK_N, HAS_WINDOW)
        state = (sums, weight, highest, total, count, step)
        state = _walk(state, diagonal, last, own, scale, position, window, True, HAS_WINDOW, ME, TURNS)
        state = _walk(state, whole, diagonal, own, scale, position, window, False, HAS_WINDOW, ME, TURNS)
        if HAS_WINDOW:
            state = _walk(state, start, whole, own, scale, position, window, True, HAS_WINDOW, ME, TURNS)
        count, step = state[4] + 1, state[5]
        _finish(own, state)
        out_address = out + (token_row * out_token_stride + head * out_head_stride)[:, None] + d[None, :]
        gl.store(out_address, query.load(WIDE), mask=is_row)


@gluon.jit(do_not_specialize=["num_tiles", "table_stride", "window"])
def hopper_prompt_kernel(
    # Of the cache, [num_blocks, 2, BLOCK_SIZE, KV_HEADS, DIM] bfloat16, in boxes of [1, 1, a page, 1, 64].
    descriptor: tma.tensor_descriptor,
    q: gl.tensor,  # [T, N, DIM] bfloat16
    out: gl.tensor,  # [T, N, DIM] bfloat16
    tiles: gl.tensor,  # [num_tiles, 2] int32: sequence, first new token
    block_tables: gl.tensor,  # [S, max_blocks] int32
    context_lens: gl.tensor,  # [S] int32
    query_starts: gl.tensor,  # [S + 1] int32
    q_token_stride: int,
    q_head_stride: int,
    out_token_stride: int,
    out_head_stride: int,
    table_stride: int,
    num_tiles: int,
    scale: float,
    window: int,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,  # do the two groups issue their products in turns (FlashAttention 3, 3.1)?
):
    """Grid: (programs that are resident at once,): each takes every so many pairs of tile and KV head, back and forth.

    Row r of a tile is query head r % GROUP of its token r // GROUP.
    """
    PAGE: gl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    PIECES: gl.constexpr = STAGES * BLOCK_N * DIM // (PAGE * 64)
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 5)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    element: gl.constexpr = q.dtype.element_ty
    keys = gl.allocate_shared_memory(element, [PIECES, 1, 1, PAGE, 1, 64], BOX)
    values = gl.allocate_shared_memory(element, [PIECES, 1, 1, PAGE, 1, 64], BOX)
    query = gl.allocate_shared_memory(element, [2, BLOCK_M // 2, DIM], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    _barrier()
    if TURNS:
        mbarrier.arrive(turn.index(0), count=1)
    num_items = num_tiles * KV_HEADS
    strides = (q_token_stride, q_head_stride, out_token_stride, out_head_stride)
    places = (tiles, block_tables, context_lens, query_starts)
    buffers = (keys, values, full, empty, turn)
    gl.warp_specialize(
        [
            (_consume, (
                q, out, query.index(0), buffers, places, strides, num_items, scale, window,
                0, KV_HEADS, GROUP, TOKENS, BLOCK_N, DIM, STAGES, HAS_WINDOW, TURNS,
            )),
            (_consume, (
                q, out, query.index(1), buffers, places, strides, num_items, scale, window,
                1, KV_HEADS, GROUP, TOKENS, BLOCK_N, DIM, STAGES, HAS_WINDOW, TURNS,
            )),
            (produce, (
                descriptor, buffers, places, table_stride, num_items, window,
                KV_HEADS, TOKENS, BLOCK_SIZE, BLOCK_N, DIM, STAGES, HAS_WINDOW,
            )),
        ],
        [4, 1],  # warps beside the first group's: num_warps is 4
        [232, 40],  # their registers; the first group has what is left of MAX_REGISTERS for each
    )  # fmt: skip
