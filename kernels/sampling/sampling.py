"""Choice of a token for each row of logits: greedy, or temperature, min-p, top-k, top-p and Gumbel-max, unsorted.

A row is cut into tiles of TILE tokens, whose results are written down a tile each and put together in their order: so a
row's token depends on that row alone, however many programs share it. Four launches, the same for any batch:

    _best_of_tiles      the largest logit of each tile
    _masses_of_tiles    rows with top-k or top-p: how many tokens, and which mass, lie above each of a few edges
    _draw_or_collect    rows without them: the best of logits + noise of each tile. Rows with them: the tokens above the
                        highest edge that surely has all that are kept, written side by side
    _tokens_of_rows     rows with them: the last logit kept, by cutting the range of values at two pivots time and again
                        (as "Sorting-Free GPU Kernels for LLM Sampling" does, Xing et al. 2025, flashinfer.ai; without
                        its rejections, for here noise chooses); and the best of logits + noise among the kept. Others:
                        the best tile's
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..common.tuning import chip_of
from .gumbel import gumbel, gumbels, uniforms
from .packed_argmax import id_of, no_token, pack_score
from .threshold import find_threshold, sum_within

TILE = 4096
LARGEST_VOCABULARY = 1 << 19  # largest count that float32 holds exactly; one load reads all tiles of a row
_NUM_WARPS = 16  # of every launch: they fix the order of sums
_PROGRAMS_PER_CORE = 4
# Of scaled logits. What lies above one is a few times what lies above the one before it; above the last lies all.
_EDGES = (-0.75, -2.0, -4.0, -7.5, -13.0, -3.0e38)


@dataclass(frozen=True)
class Draws:
    """Parameters of the choice of each row's token, on the device."""

    temperature: Tensor  # [R] float32; 0: greedy
    log_min_p: Tensor  # [R] float32; -inf: off
    top_p: Tensor  # [R] float32; 1: off
    top_k: Tensor  # [R] int32; 0: off
    keys: Tensor  # [R] int64, of the noise (signed)

    def check(self, num_rows: int) -> None:
        floats, whole = (self.temperature, self.log_min_p, self.top_p), (self.top_k, self.keys)
        assert all(t.shape == (num_rows,) and t.is_contiguous() for t in (*floats, *whole))
        assert all(t.dtype == torch.float32 for t in floats)
        assert self.top_k.dtype == torch.int32 and self.keys.dtype == torch.int64


@dataclass(frozen=True)
class SamplingScratch:
    """Working memory for draws of at most `best.shape[0]` rows. One at a time uses it: a captured graph may
    keep it, and all graphs of a stream may share it."""

    best: Tensor  # [rows, tiles] int64: of logits, then of logits + noise
    largest: Tensor  # [rows, tiles] float32
    counts: Tensor  # [rows, edges, tiles] int32
    masses: Tensor  # [rows, edges, tiles] float32
    kept: Tensor  # [rows, vocab] float32
    kept_ids: Tensor  # [rows, vocab] int32

    @classmethod
    def of(cls, num_rows: int, vocab_size: int, device: torch.device) -> SamplingScratch:
        tiles = -(-vocab_size // TILE)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            empty(tiles, dtype=torch.int64),
            empty(tiles, dtype=torch.float32),
            empty(len(_EDGES), tiles, dtype=torch.int32),
            empty(len(_EDGES), tiles, dtype=torch.float32),
            empty(vocab_size, dtype=torch.float32),
            empty(vocab_size, dtype=torch.int32),
        )


def sample(
    logits: Tensor, draws: Draws, scratch: SamplingScratch | None = None, tokens: Tensor | None = None
) -> Tensor:
    """logits: [R, vocab] of floats, last axis contiguous; not changed. The token of each row, [R] int64, the lowest id
    among equals: what workers/sampling/choice.py chooses, but where the rounding of a sum of probabilities decides.

    tokens: [R] int64 contiguous, to be written and returned. With it and `scratch` nothing is allocated on a GPU, and
    nothing is read back in any case: a graph can hold it.
    """
    return kernel_for(logits, sample_triton, sample_twin)(logits, draws, scratch, tokens)


def sample_twin(
    logits: Tensor, draws: Draws, scratch: SamplingScratch | None = None, tokens: Tensor | None = None
) -> Tensor:
    """Needs no scratch."""
    draws.check(len(logits))
    is_greedy = draws.temperature == 0.0
    scaled = logits.float() - logits.float().amax(dim=-1, keepdim=True)
    scaled /= torch.where(is_greedy, 1.0, draws.temperature)[:, None]
    kept = scaled.masked_fill(scaled < draws.log_min_p[:, None], -torch.inf)
    descending = kept.sort(dim=-1, descending=True).values
    vocab_size = logits.shape[1]
    last = torch.where(draws.top_k > 0, draws.top_k, vocab_size).clamp_max(vocab_size) - 1
    threshold = descending.gather(1, last.long()[:, None])
    descending.masked_fill_(descending < threshold, -torch.inf)
    mass = descending.softmax(dim=-1).cumsum(dim=-1)
    in_nucleus = (mass[:, :-1] < draws.top_p[:, None]).sum(dim=-1, keepdim=True)
    nucleus_end = descending.gather(1, in_nucleus)
    threshold = torch.where(draws.top_p[:, None] < 1.0, threshold.maximum(nucleus_end), threshold)
    scores = kept.masked_fill_(kept < threshold, -torch.inf)
    scores += gumbel(draws.keys, vocab_size, logits.device)
    found = torch.where(is_greedy, logits.argmax(dim=-1), scores.argmax(dim=-1))
    return found if tokens is None else tokens.copy_(found)


def sample_triton(
    logits: Tensor, draws: Draws, scratch: SamplingScratch | None = None, tokens: Tensor | None = None
) -> Tensor:
    num_rows, vocab_size = logits.shape
    draws.check(num_rows)
    assert logits.stride(1) == 1 and logits.is_floating_point() and 0 < vocab_size <= LARGEST_VOCABULARY
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if tokens is None else tokens
    assert tokens.shape == (num_rows,) and tokens.dtype == torch.int64 and tokens.is_contiguous()
    scratch = SamplingScratch.of(num_rows, vocab_size, logits.device) if scratch is None else scratch
    assert scratch.kept.shape[0] >= num_rows and scratch.kept.shape[1] == vocab_size
    if not num_rows:
        return tokens
    num_tiles = scratch.best.shape[1]
    settings = (draws.temperature, draws.log_min_p, draws.top_p, draws.top_k)
    sizes = (logits.stride(0), vocab_size, num_tiles)
    constants = {"TILE": TILE, "TILES": next_power_of_2(num_tiles), "EDGES": _EDGES, "NUM_EDGES": len(_EDGES)}
    splits = min(num_tiles, -(-chip_of(logits.device).num_cores * _PROGRAMS_PER_CORE // num_rows))
    grid = (num_rows, splits)
    largest, counted = scratch.largest, (scratch.counts, scratch.masses)
    _best_of_tiles[grid](logits, scratch.best, largest, *sizes, TILE=TILE, num_warps=_NUM_WARPS)
    _masses_of_tiles[grid](logits, *settings, largest, *counted, *sizes, **constants, num_warps=_NUM_WARPS)
    found = (*counted, scratch.best, scratch.kept, scratch.kept_ids)
    _draw_or_collect[grid](logits, *settings, draws.keys, largest, *found, *sizes, **constants, num_warps=_NUM_WARPS)
    _tokens_of_rows[(num_rows,)](
        *settings, draws.keys, *found, tokens, vocab_size, num_tiles, **constants, num_warps=_NUM_WARPS
    )
    return tokens


@jit
def _scaled(x: tl.tensor, largest: tl.tensor, temperature: tl.tensor):
    """Logits from their largest, 0, downwards. Rounded as the twin is."""
    return tl.div_rn(x.to(tl.float32) - largest, temperature)


@jit
def _is_limited(temperature: tl.tensor, top_p: tl.tensor, top_k: tl.tensor, vocab_size: int):
    """Return whether a row is drawn from a top-k or a nucleus."""
    return (temperature > 0.0) & ((top_p < 1.0) | ((top_k > 0) & (top_k < vocab_size)))


@jit
def _best_of_tiles(
    logits: tl.tensor,  # [R, vocab]
    best: tl.tensor,  # [R, num_tiles] int64: see packed_argmax.py
    largest: tl.tensor,  # [R, num_tiles] float32
    row_stride: int,
    vocab_size: int,
    num_tiles: int,
    TILE: tl.constexpr,
):
    """Grid: (R, programs of a row)."""
    row = tl.program_id(0).to(tl.int64)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        i = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * row_stride + i, mask=i < vocab_size, other=float("-inf")).to(tl.float32)
        is_number = (i < vocab_size) & (x >= float("-inf"))
        x = tl.where(is_number, x, float("-inf"))
        packed = tl.where(is_number, pack_score(x, i.to(tl.int64)), no_token())
        tl.store(best + row * num_tiles + tile, tl.max(packed, axis=0))
        tl.store(largest + row * num_tiles + tile, tl.max(x, axis=0))


@jit
def _largest_of(largest: tl.tensor, row: tl.tensor, num_tiles: int, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(largest + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf")), axis=0)


@jit
def _masses_of_tiles(
    logits: tl.tensor,  # [R, vocab]
    temperatures: tl.tensor,  # [R] float32
    log_min_ps: tl.tensor,  # [R] float32
    top_ps: tl.tensor,  # [R] float32
    top_ks: tl.tensor,  # [R] int32
    largest: tl.tensor,  # [R, num_tiles] float32
    counts: tl.tensor,  # [R, edges, num_tiles] int32: tokens at or above each edge and min-p
    masses: tl.tensor,  # [R, edges, num_tiles] float32: the sums of their exponentials
    row_stride: int,
    vocab_size: int,
    num_tiles: int,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    EDGES: tl.constexpr,
    NUM_EDGES: tl.constexpr,
):
    """Grid: (R, programs of a row)."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if _is_limited(temperature, tl.load(top_ps + row), tl.load(top_ks + row), vocab_size):
        top = _largest_of(largest, row, num_tiles, TILES)
        log_min_p = tl.load(log_min_ps + row)
        for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
            i = tile * TILE + tl.arange(0, TILE)
            x = tl.load(logits + row * row_stride + i, mask=i < vocab_size, other=float("-inf"))
            scaled = _scaled(x, top, temperature)
            weight = tl.exp(scaled)
            for e in tl.static_range(NUM_EDGES):  # pyright: ignore[reportGeneralTypeIssues]
                above = (scaled >= log_min_p) & (scaled >= EDGES[e])
                at = (row * NUM_EDGES + e) * num_tiles + tile
                tl.store(counts + at, tl.sum(above.to(tl.int32), axis=0))
                tl.store(masses + at, tl.sum(tl.where(above, weight, 0.0), axis=0))


@jit
def _safe_edge(
    counts: tl.tensor,
    masses: tl.tensor,
    row: tl.tensor,
    top_p: tl.tensor,
    top_k: tl.tensor,
    vocab_size: int,
    num_tiles: int,
    TILES: tl.constexpr,
    EDGES: tl.constexpr,
    NUM_EDGES: tl.constexpr,
):
    """(index of the highest edge that has all that top-k and top-p keep above it, the edge, the mass of the row). With
    both, all that top-k keeps: top-p is a share of its mass."""
    tile = tl.arange(0, TILES)
    at = row * NUM_EDGES * num_tiles + tile
    inside = tile < num_tiles
    total = tl.sum(tl.load(masses + at + (NUM_EDGES - 1) * num_tiles, mask=inside, other=0.0), axis=0)
    index = row * 0 + NUM_EDGES - 1
    edge = total * 0.0 + EDGES[NUM_EDGES - 1]
    for e in tl.static_range(NUM_EDGES - 2, -1, -1):  # pyright: ignore[reportGeneralTypeIssues]
        count = tl.sum(tl.load(counts + at + e * num_tiles, mask=inside, other=0), axis=0)
        mass = tl.sum(tl.load(masses + at + e * num_tiles, mask=inside, other=0.0), axis=0)
        # Sums are rounded: an edge that has the mass by a hair is not trusted.
        has_nucleus = (top_p < 1.0) & (mass >= top_p * total * 1.0001)
        is_safe = tl.where((top_k > 0) & (top_k < vocab_size), count >= top_k, has_nucleus)
        index = tl.where(is_safe, e, index)
        edge = tl.where(is_safe, EDGES[e], edge)
    return index, edge, total


@jit
def _draw_or_collect(
    logits: tl.tensor,  # [R, vocab]
    temperatures: tl.tensor,  # [R] float32
    log_min_ps: tl.tensor,  # [R] float32
    top_ps: tl.tensor,  # [R] float32
    top_ks: tl.tensor,  # [R] int32
    keys: tl.tensor,  # [R] int64
    largest: tl.tensor,  # [R, num_tiles] float32
    counts: tl.tensor,  # [R, edges, num_tiles] int32
    masses: tl.tensor,  # [R, edges, num_tiles] float32
    best: tl.tensor,  # [R, num_tiles] int64: for rows that are drawn from all tokens, rewritten
    kept: tl.tensor,  # [R, vocab] float32: scaled logits of the tokens above the edge, in the order of their ids
    kept_ids: tl.tensor,  # [R, vocab] int32
    row_stride: int,
    vocab_size: int,
    num_tiles: int,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    EDGES: tl.constexpr,
    NUM_EDGES: tl.constexpr,
):
    """Grid: (R, programs of a row)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, log_min_p = tl.load(temperatures + row), tl.load(log_min_ps + row)
    top_p, top_k, key = tl.load(top_ps + row), tl.load(top_ks + row), tl.load(keys + row)
    if temperature > 0.0:
        top = _largest_of(largest, row, num_tiles, TILES)
        is_limited = _is_limited(temperature, top_p, top_k, vocab_size)
        lowest = log_min_p
        before = tl.zeros((TILES,), tl.int32)
        if is_limited:
            index, edge, _ = _safe_edge(
                counts, masses, row, top_p, top_k, vocab_size, num_tiles, TILES, EDGES, NUM_EDGES
            )
            lowest = tl.maximum(log_min_p, edge)
            each = tl.arange(0, TILES)
            at = (row * NUM_EDGES + index) * num_tiles + each
            count = tl.load(counts + at, mask=each < num_tiles, other=0)
            before = tl.cumsum(count, axis=0) - count
        highest = float("-inf")
        for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
            i = tile * TILE + tl.arange(0, TILE)
            x = tl.load(logits + row * row_stride + i, mask=i < vocab_size, other=float("-inf"))
            scaled = _scaled(x, top, temperature)
            held = (i < vocab_size) & (scaled >= lowest)
            if is_limited:
                first = tl.sum(tl.where(tl.arange(0, TILES) == tile, before, 0), axis=0)
                place = row * vocab_size + first + tl.cumsum(held.to(tl.int32), axis=0) - 1
                tl.store(kept + place, scaled, mask=held)
                tl.store(kept_ids + place, i, mask=held)
            else:
                packed, highest = _best_drawn(scaled, i, held, key, highest)
                tl.store(best + row * num_tiles + tile, packed)


@jit
def _best_drawn(
    scaled: tl.tensor,  # [TILE] float32
    ids: tl.tensor,  # [TILE] int32
    held: tl.tensor,  # [TILE]
    key: tl.tensor,
    highest: tl.tensor,  # float32: a score that another tile has
):
    """(packed best of logit + noise, the highest score so far). A tile that cannot win is left out.

    Noise is -log(-log1p(-u)) <= -log(u), which takes no float64.
    """
    uniform = uniforms(key, ids.to(tl.int64))
    bound = tl.where(held, scaled - tl.log(uniform), float("-inf"))
    packed = no_token()
    if tl.max(bound, axis=0) > highest - 0.01:
        score = scaled + gumbels(uniform)
        packed = tl.max(tl.where(held, pack_score(score, ids.to(tl.int64)), no_token()), axis=0)
        highest = tl.maximum(highest, tl.max(tl.where(held, score, float("-inf")), axis=0))
    return packed, highest


@jit
def _tokens_of_rows(
    temperatures: tl.tensor,  # [R] float32
    log_min_ps: tl.tensor,  # [R] float32
    top_ps: tl.tensor,  # [R] float32
    top_ks: tl.tensor,  # [R] int32
    keys: tl.tensor,  # [R] int64
    counts: tl.tensor,  # [R, edges, num_tiles] int32
    masses: tl.tensor,  # [R, edges, num_tiles] float32
    best: tl.tensor,  # [R, num_tiles] int64
    kept: tl.tensor,  # [R, vocab] float32
    kept_ids: tl.tensor,  # [R, vocab] int32
    tokens: tl.tensor,  # [R] int64
    vocab_size: int,
    num_tiles: int,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    EDGES: tl.constexpr,
    NUM_EDGES: tl.constexpr,
):
    """Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
    each = tl.arange(0, TILES)
    inside = each < num_tiles
    if _is_limited(tl.load(temperatures + row), top_p, top_k, vocab_size):
        index, _, total = _safe_edge(counts, masses, row, top_p, top_k, vocab_size, num_tiles, TILES, EDGES, NUM_EDGES)
        at = (row * NUM_EDGES + index) * num_tiles + each
        num_kept = tl.sum(tl.load(counts + at, mask=inside, other=0), axis=0)
        values = kept + row * vocab_size
        last = 0x7F7FFFFF  # bits of the largest float32: none is cut off
        if (top_k > 0) & (top_k < num_kept):
            last = find_threshold(values, num_kept, top_k.to(tl.float32), last, True, TILE)
        if top_p < 1.0:
            if (top_k > 0) & (top_k < vocab_size):
                total, _ = sum_within(values, num_kept, last, last, False, TILE)
            last = find_threshold(values, num_kept, top_p * total, last, False, TILE)
        key = tl.load(keys + row)
        highest = float("-inf")
        winner = no_token()
        for start in range(0, num_kept, TILE):  # pyright: ignore[reportArgumentType]
            i = start + tl.arange(0, TILE)
            scaled = tl.load(values + i, mask=i < num_kept, other=float("-inf"))
            ids = tl.load(kept_ids + row * vocab_size + i, mask=i < num_kept, other=0)
            held = (i < num_kept) & (tl.abs(scaled).to(tl.int32, bitcast=True) <= last)
            packed, highest = _best_drawn(scaled, ids, held, key, highest)
            winner = tl.maximum(winner, packed)
    else:
        winner = tl.max(tl.load(best + row * num_tiles + each, mask=inside, other=-(1 << 63)), axis=0)
    tl.store(tokens + row, id_of(winner))
