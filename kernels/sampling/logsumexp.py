"""Log-probabilities of rows of logits: the logarithm of each row's sum of exponentials, and its largest logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..common.tuning import chip_of
from .packed_argmax import id_of, no_token, pack_score, score_of

_TILE = 4096
LARGEST_TOP = 32
LARGEST_VOCABULARY = 1 << 19  # one program holds the largest of all tiles
_NUM_WARPS = 8  # of every launch: they fix the order of sums
_PROGRAMS_PER_CORE = 4


def logsumexp_top_k(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [R, vocab] of floats without NaN, last axis contiguous; num_top <= LARGEST_TOP and <= vocab.

    Returns the log of the sum of each row's exponentials, [R] float32, and its `num_top` largest logits: their ids,
    [R, num_top] int64, and values, float32, in descending order, the lowest id first among equals. The log-probability
    of a token is its logit less the first. A row's results depend on that row alone.
    """
    return kernel_for(logits, logsumexp_top_k_triton, logsumexp_top_k_twin)(logits, num_top)


def logsumexp_top_k_twin(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.float()
    values, ids = wide.sort(dim=-1, descending=True, stable=True)
    return wide.logsumexp(dim=-1), ids[:, :num_top], values[:, :num_top]


def logsumexp_top_k_triton(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and logits.is_floating_point() and 0 < vocab_size <= LARGEST_VOCABULARY
    assert 0 <= num_top <= min(LARGEST_TOP, vocab_size)
    totals = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=logits.device)
    top_values = torch.empty(num_rows, num_top, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return totals, top_ids, top_values
    num_tiles = -(-vocab_size // _TILE)
    largest = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(largest)
    packed_scores = torch.empty(num_rows, num_tiles, num_top, dtype=torch.int64, device=logits.device)
    splits = min(num_tiles, -(-chip_of(logits.device).num_cores * _PROGRAMS_PER_CORE // num_rows))
    _totals_of_tiles[(num_rows, splits)](
        logits,
        largest,
        masses,
        packed_scores,
        logits.stride(0),
        vocab_size,
        num_tiles,
        num_top,
        TILE=_TILE,
        num_warps=_NUM_WARPS,
    )
    _totals_of_rows[(num_rows,)](
        largest,
        masses,
        packed_scores,
        totals,
        top_ids,
        top_values,
        num_tiles,
        num_top,
        TILES=next_power_of_2(num_tiles),
        TOPS=next_power_of_2(num_tiles * max(num_top, 1)),
        num_warps=_NUM_WARPS,
    )
    return totals, top_ids, top_values


@jit
def _totals_of_tiles(
    logits: tl.tensor,  # [R, vocab]
    largest: tl.tensor,  # [R, num_tiles] float32
    masses: tl.tensor,  # [R, num_tiles] float32: sums of exponentials, from the tile's largest
    packed_scores: tl.tensor,  # [R, num_tiles, num_top] int64: see packed_argmax.py
    row_stride: int,
    vocab_size: int,
    num_tiles: int,
    num_top: int,
    TILE: tl.constexpr,
):
    """Grid: (R, programs of a row)."""
    row = tl.program_id(0).to(tl.int64)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        i = tile * TILE + tl.arange(0, TILE)
        inside = i < vocab_size
        x = tl.load(logits + row * row_stride + i, mask=inside, other=float("-inf")).to(tl.float32)
        top = tl.max(x, axis=0)
        at = row * num_tiles + tile
        tl.store(largest + at, top)
        tl.store(masses + at, tl.sum(tl.exp(x - tl.maximum(top, -3.0e38)), axis=0))
        packed = tl.where(inside, pack_score(x, i.to(tl.int64)), no_token())
        for n in range(num_top):
            best = tl.max(packed, axis=0)
            tl.store(packed_scores + at * num_top + n, best)
            packed = tl.where(packed == best, no_token(), packed)


@jit
def _totals_of_rows(
    largest: tl.tensor,  # [R, num_tiles] float32
    masses: tl.tensor,  # [R, num_tiles] float32
    packed_scores: tl.tensor,  # [R, num_tiles, num_top] int64
    totals: tl.tensor,  # [R] float32
    top_ids: tl.tensor,  # [R, num_top] int64
    top_values: tl.tensor,  # [R, num_top] float32
    num_tiles: int,
    num_top: int,
    TILES: tl.constexpr,
    TOPS: tl.constexpr,
):
    """Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    tops = tl.load(largest + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    mass = tl.load(masses + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
    top = tl.maximum(tl.max(tops, axis=0), -3.0e38)
    tl.store(totals + row, top + tl.log(tl.sum(mass * tl.exp(tops - top), axis=0)))
    i = tl.arange(0, TOPS)
    packed = tl.load(packed_scores + row * num_tiles * num_top + i, mask=i < num_tiles * num_top, other=-(1 << 63))
    for n in range(num_top):
        best = tl.max(packed, axis=0)
        tl.store(top_ids + row * num_top + n, id_of(best))
        tl.store(top_values + row * num_top + n, score_of(best))
        packed = tl.where(packed == best, no_token(), packed)
