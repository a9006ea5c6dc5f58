"""Brings the (token, expert) pairs of a step together by expert: a counting sort whose order is always the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..common.tuning import ANY, Tuned, chip_of

# Pairs up to which a program has so many; beyond the last it has MANY: fewer counts for each program to read.
CHUNKS = {32: 32, 4096: 128}
MANY = 1024
# By bins, a power of two: with fewer warps registers would spill.
_WARPS = Tuned[int](generic=[((ANY,), 8)], sm_90=[((128,), 4), ((ANY,), 8)], hip=[((ANY,), 4)])


@dataclass(frozen=True)
class ExpertOrder:
    """P pairs, pair p of token p // top_k, sorted by expert and within one by p; and the tiles of rows that they make.

    Pairs of experts that are not here (of another rank, or -1 for a row that is padding) come last, in no tile.
    Sizes of tensors depend on P, the number of experts and block_m alone: a graph may be captured over them.
    """

    pairs: Tensor  # [P] int32: the pair at each place
    starts: Tensor  # [num_experts + 1] int32: expert e has the places starts[e] to starts[e + 1]
    tile_experts: Tensor  # [max tiles] int32: the expert of a tile, counted from the first here
    tile_starts: Tensor  # [max tiles] int32: its first place
    num_tiles: Tensor  # [1] int32: how many there are; what follows is not written
    top_k: int
    block_m: int  # rows of a tile, which ends early where its expert does

    @property
    def max_tiles(self) -> int:
        return self.tile_experts.shape[0]


def moe_sort(experts: Tensor, num_experts: int, block_m: int, first_expert: int = 0) -> ExpertOrder:
    """experts: [T, top_k] int32 contiguous; those from first_expert on, num_experts of them, are here."""
    return kernel_for(experts, moe_sort_triton, moe_sort_twin)(experts, num_experts, block_m, first_expert)


def moe_sort_twin(experts: Tensor, num_experts: int, block_m: int, first_expert: int = 0) -> ExpertOrder:
    local = experts.view(-1) - first_expert
    bins = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    counts = torch.bincount(bins, minlength=num_experts + 1)[:num_experts]
    ends = counts.cumsum(0)
    tile_experts = torch.arange(num_experts, device=experts.device).repeat_interleave(-(-counts // block_m))
    first_tiles = (-(-counts // block_m)).cumsum(0) - -(-counts // block_m)
    within = torch.arange(tile_experts.numel(), device=experts.device) - first_tiles[tile_experts]
    order = _empty(experts, num_experts, block_m)
    order.pairs.copy_(bins.argsort(stable=True))
    order.starts.copy_(torch.cat((ends.new_zeros(1), ends)))
    order.tile_experts[: tile_experts.numel()] = tile_experts.int()
    order.tile_starts[: tile_experts.numel()] = ((ends - counts)[tile_experts] + within * block_m).int()
    order.num_tiles.fill_(tile_experts.numel())
    return order


def moe_sort_triton(experts: Tensor, num_experts: int, block_m: int, first_expert: int = 0) -> ExpertOrder:
    assert experts.dtype == torch.int32 and experts.is_contiguous()
    order = _empty(experts, num_experts, block_m)
    num_pairs = experts.numel()
    chunk = next((size for most, size in CHUNKS.items() if num_pairs <= most), MANY)
    num_chunks = max(-(-num_pairs // chunk), 1)
    block_e = next_power_of_2(num_experts + 1)
    num_warps = _WARPS.of(chip_of(experts.device), block_e)
    sizes = {"num_experts": num_experts, "CHUNK": chunk, "BLOCK_E": block_e, "num_warps": num_warps}
    counts = order.starts  # not read by a program that is alone
    if num_chunks > 1:
        counts = torch.empty(num_chunks, num_experts + 1, dtype=torch.int32, device=experts.device)
        _count_experts_kernel[(num_chunks,)](experts, counts, num_pairs, first_expert, **sizes)
    _place_pairs_kernel[(num_chunks,)](
        experts,
        counts,
        order.pairs,
        order.starts,
        order.tile_experts,
        order.tile_starts,
        order.num_tiles,
        num_pairs,
        first_expert,
        num_chunks,
        BLOCK_M=block_m,
        IS_ALONE=num_chunks == 1,
        **sizes,
    )
    return order


def sort_counts() -> list[int]:
    """Return a number of pairs for each way in which the kernels are compiled for them."""
    alone = (size + 1 for size in CHUNKS.values())
    return [1, *(most + 1 for most in CHUNKS), *alone]


def _empty(experts: Tensor, num_experts: int, block_m: int) -> ExpertOrder:
    num_pairs = experts.numel()
    # Each expert that has pairs has one tile that may be short, and there are no more tiles than pairs.
    max_tiles = min(num_pairs, num_pairs // block_m + num_experts)

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=experts.device)

    return ExpertOrder(
        empty(num_pairs),
        empty(num_experts + 1),
        empty(max_tiles),
        empty(max_tiles),
        empty(1),
        experts.shape[1],
        block_m,
    )


@jit
def _bins_of(experts: tl.tensor, pair: tl.tensor, num_pairs: int, first_expert: int, num_experts: int):
    """The bin of each pair: its expert counted from the first here, num_experts where that is elsewhere."""
    local = tl.load(experts + pair, mask=pair < num_pairs, other=-1) - first_expert
    return tl.where((local >= 0) & (local < num_experts), local, num_experts)


@jit
def _counts_of(
    experts: tl.tensor,
    chunk: tl.tensor,
    e: tl.tensor,  # [BLOCK_E]
    num_pairs: int,
    first_expert: int,
    num_experts: int,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """[BLOCK_E] int32: pairs of each bin in a chunk."""
    found = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, CHUNK, 32):
        pair = chunk * CHUNK + start + tl.arange(0, 32)
        its_bin = _bins_of(experts, pair, num_pairs, first_expert, num_experts)
        found += tl.sum(((its_bin[:, None] == e[None, :]) & (pair < num_pairs)[:, None]).to(tl.int32), axis=0)
    return found


@jit
def _count_experts_kernel(
    experts: tl.tensor,  # [num_pairs] int32
    counts: tl.tensor,  # [chunks, num_experts + 1] int32
    num_pairs: int,
    first_expert: int,
    num_experts: int,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid: (chunks,). How many pairs of each bin a chunk has."""
    chunk = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    found = _counts_of(experts, chunk, e, num_pairs, first_expert, num_experts, CHUNK, BLOCK_E)
    tl.store(counts + chunk.to(tl.int64) * (num_experts + 1) + e, found, mask=e <= num_experts)


@jit
def _place_pairs_kernel(
    experts: tl.tensor,  # [num_pairs] int32
    counts: tl.tensor,  # [num_chunks, num_experts + 1] int32
    pairs: tl.tensor,  # [num_pairs] int32
    starts: tl.tensor,  # [num_experts + 1] int32
    tile_experts: tl.tensor,  # [max tiles] int32
    tile_starts: tl.tensor,  # [max tiles] int32
    num_tiles: tl.tensor,  # [1] int32
    num_pairs: int,
    first_expert: int,
    num_chunks: int,
    num_experts: int,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IS_ALONE: tl.constexpr,  # num_chunks == 1: the program counts for itself, and `counts` is not read
):
    """Grid: (num_chunks,). A pair's place: where its bin starts, its pairs in chunks before, its pairs before it here.

    Every program adds up the counts of all chunks for itself: no program waits for another.
    """
    chunk = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    real = e <= num_experts
    before = tl.zeros((BLOCK_E,), tl.int32)
    total = tl.zeros((BLOCK_E,), tl.int32)
    if IS_ALONE:
        total = _counts_of(experts, chunk, e, num_pairs, first_expert, num_experts, CHUNK, BLOCK_E)
    else:
        for start in range(0, num_chunks, 8):
            c = start + tl.arange(0, 8)
            at = counts + c.to(tl.int64)[:, None] * (num_experts + 1) + e[None, :]
            some = tl.load(at, mask=(c < num_chunks)[:, None] & real[None, :], other=0)
            total += tl.sum(some, axis=0)
            before += tl.sum(tl.where((c < chunk)[:, None], some, 0), axis=0)
    bin_start = tl.cumsum(total, axis=0) - total
    base = bin_start + before
    for first in range(0, CHUNK, 32):
        pair = chunk * CHUNK + first + tl.arange(0, 32)
        its_bin = _bins_of(experts, pair, num_pairs, first_expert, num_experts)
        is_its = (its_bin[:, None] == e[None, :]) & (pair < num_pairs)[:, None]
        earlier = tl.cumsum(is_its.to(tl.int32), axis=0) - is_its.to(tl.int32)
        place = tl.sum(tl.where(is_its, base[None, :] + earlier, 0), axis=1)
        tl.store(pairs + place, pair, mask=pair < num_pairs)
        base += tl.sum(is_its.to(tl.int32), axis=0)
    if chunk == 0:
        tl.store(starts + e, bin_start, mask=real)
        tiles = tl.where(e < num_experts, (total + BLOCK_M - 1) // BLOCK_M, 0)
        first_tile = tl.cumsum(tiles, axis=0) - tiles
        tl.store(num_tiles, tl.sum(tiles))
        for i in range(0, tl.max(tiles)):  # pyright: ignore[reportArgumentType]
            tl.store(tile_experts + first_tile + i, e, mask=i < tiles)
            tl.store(tile_starts + first_tile + i, bin_start + i * BLOCK_M, mask=i < tiles)
