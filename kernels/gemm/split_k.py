"""Split-K without a second launch and without float atomics: the last to arrive adds all parts, in their order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.lang import jit, tl
from ..common.tuning import chip_of

MAX_SPLITS = 8
_PROGRAMS_PER_CORE = 4  # that hide each other's waits for memory; no split makes more of them
_MIN_BLOCKS = 4  # of K that a split has


@dataclass(frozen=True)
class SplitWorkspace:
    """Memory through which the programs of a split product share partial sums. Serves one stream at a time."""

    partial: Tensor  # float32: a tile's elements for each program
    counters: Tensor  # int32, one a tile, 0 between launches

    @classmethod
    def of(cls, device: torch.device, tile_elements: int) -> SplitWorkspace:
        """Large enough for every product on `device` whose tiles have at most so many elements."""
        programs = _PROGRAMS_PER_CORE * chip_of(device).num_cores
        return cls(
            torch.empty(programs * tile_elements, dtype=torch.float32, device=device),
            torch.zeros(programs, dtype=torch.int32, device=device),
        )


def num_splits(tiles: int, k_blocks: int, device: torch.device) -> int:
    """Count the programs that share a tile of one row of tiles: by the weight's shape and the chip, not by the rows."""
    programs, splits = _PROGRAMS_PER_CORE * chip_of(device).num_cores, 1
    while splits < MAX_SPLITS and 2 * splits * tiles <= programs and k_blocks >= 2 * splits * _MIN_BLOCKS:
        splits *= 2
    return splits


# By device and its cores, stream and elements of a tile. What streams run side by side is apart, and none is ever
# replaced: graphs keep its addresses.
_WORKSPACES: dict[tuple[torch.device, int, int, int], SplitWorkspace] = {}


def workspace_of(x: Tensor, tile_elements: int) -> SplitWorkspace:
    """Return that of the stream which is current on x's device."""
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    key = x.device, chip_of(x.device).num_cores, stream, tile_elements
    found = _WORKSPACES.get(key)
    if found is None:
        found = _WORKSPACES[key] = SplitWorkspace.of(x.device, tile_elements)
    return found


def workspace_for(splits: int, tiles: int, tile_elements: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """(partial, counters) for a launch; of x's device. Where there is one split, any tensor serves."""
    if splits == 1:
        return x, x
    workspace = workspace_of(x, tile_elements)
    assert workspace.partial.numel() >= tiles * splits * tile_elements and workspace.counters.numel() >= tiles
    return workspace.partial, workspace.counters


@jit
def sum_of_splits(
    acc: tl.tensor,  # [BLOCK_M, BLOCK_N] float32: this program's part of its tile
    partial: tl.tensor,  # [tiles, SPLITS, BLOCK_M * BLOCK_N] float32
    counters: tl.tensor,  # [tiles] int32, 0 before and after
    tile: tl.tensor,
    split: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns (the sum, float32 [BLOCK_M, BLOCK_N]; whether this program has it, and so is to write the tile)."""
    place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    parts = partial + tile.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_N + place
    tl.store(parts + split * BLOCK_M * BLOCK_N, acc)
    tl.debug_barrier()  # every thread has stored before one of them counts
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
    is_last = arrived == SPLITS - 1
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if is_last:
        for s in range(SPLITS):
            total += tl.load(parts + s * BLOCK_M * BLOCK_N, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return total, is_last
