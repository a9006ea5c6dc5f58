"""Plan that cuts the contexts of a step's decodes, so that every part of the device has its share (FlashDecoding).

Contexts are cut into splits of equal length, as many as fill the device. It is decided on the device, once a step for
all layers alike, and from the number of sequences alone follows how much is launched: a captured graph serves contexts
of any length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, next_power_of_2, tl
from ..common.tuning import ANY, Chip, Row, Tuned, chip_of
from ..kv.kv_scales import numbers_in

MAX_QUERIES = 16


def tile_rows(dim: int, element_size: int) -> int:
    """Number of query rows that read a tile of keys together, at most: of more the registers would spill. dim: of a
    head; element_size: bytes of a query's number."""
    if element_size > 2:
        return 16
    return 64 if dim <= 256 else 32


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    slots: int  # of a tile of keys; BLOCK_N
    num_warps: int
    num_stages: int
    programs_per_core: int  # number of programs per core for which splits are made


_WIDE = DecodeConfig(32, 4, 1, 2)
_WIDE_FLOAT32: list[Row[DecodeConfig]] = [((128, ANY), _WIDE), ((512, 4), DecodeConfig(16, 8, 1, 2))]  # else it spills
_TO_128: list[Row[DecodeConfig]] = [((128, 1), DecodeConfig(64, 4, 5, 4)), ((128, 2), DecodeConfig(64, 4, 3, 4))]
_BEYOND_256: list[Row[DecodeConfig]] = [((512, 2), DecodeConfig(32, 8, 2, 2)), *_WIDE_FLOAT32, ((ANY, ANY), _WIDE)]
# By head_dim and bytes of a stored number, or of a pair of 4-bit ones.
TUNED = Tuned[DecodeConfig](
    generic=[((128, 2), DecodeConfig(32, 4, 2, 4)), ((ANY, ANY), _WIDE)],
    interpreter=[((ANY, ANY), DecodeConfig(16, 4, 1, 2))],
    sm_80=[
        ((128, 2), DecodeConfig(64, 4, 3, 4)),
        ((256, 2), DecodeConfig(32, 4, 3, 2)),
        ((512, 2), DecodeConfig(16, 4, 2, 2)),
        *_WIDE_FLOAT32,
        ((ANY, ANY), _WIDE),
    ],
    sm_100=[*_TO_128, ((256, 2), DecodeConfig(32, 8, 3, 3)), *_BEYOND_256],  # of 4 warps several queries would spill
    cuda=[*_TO_128, ((256, 2), DecodeConfig(32, 4, 3, 3)), *_BEYOND_256],  # limited by registers
    hip=[
        ((128, 2), DecodeConfig(64, 4, 1, 8)),
        ((256, 2), DecodeConfig(32, 4, 1, 4)),
        ((ANY, ANY), DecodeConfig(16, 4, 1, 2)),
    ],
)
_LEAST_BLOCK = 256  # sequences; of fewer, one kernel serves all numbers
MIN_TILES = 4  # of a split: shorter ones cost more to merge than they save


@dataclass(frozen=True)
class Decodes:
    """S sequences of 1 to `max_queries` new tokens each, the last of their context_lens; their KV is in the cache.

    A sequence of no context (of a padded graph) has nothing to attend to: its rows become zeros.
    """

    block_tables: Tensor  # [S, blocks] int32, or [S, K, blocks]: each KV head's own choice of blocks
    context_lens: Tensor  # [S] int32
    query_starts: Tensor  # [S + 1] int32: sequence s owns query rows query_starts[s] to query_starts[s + 1]
    max_queries: int
    plans: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # a library's, for all layers

    def __post_init__(self) -> None:
        assert 1 <= self.max_queries <= MAX_QUERIES and len(self.query_starts) == len(self.context_lens) + 1
        assert self.query_starts.dtype == torch.int32 and self.query_starts.is_contiguous()


@dataclass(frozen=True)
class DecodePlan:
    """Places where the contexts of a step are cut. P programs at most for each KV head."""

    work: Tensor  # [P] int32: the sequence of each split, in order; -1: none
    starts: Tensor  # [S + 1] int32: the splits of sequence s are starts[s] to starts[s + 1]
    split: Tensor  # [1] int32: slots of a split, a multiple of `slots`
    slots: int
    window: int

    def parts(self, num_kv_heads: int, rows: int, dim: int) -> tuple[Tensor, Tensor]:
        """Allocate the inputs of merge_splits, not written yet: [P, K, rows, D] and [P, K, rows] float32."""
        size = (len(self.work), num_kv_heads, rows)
        sums = torch.empty(size, dtype=torch.float32, device=self.work.device)
        return torch.empty(*size, dim, dtype=torch.float32, device=self.work.device), sums


def decode_config(chip: Chip, cache: Tensor) -> DecodeConfig:
    return TUNED.of(chip, cache.shape[-1] * numbers_in(cache.dtype), cache.element_size())


def first_slots(context_lens: Tensor, num_queries: Tensor, window: int, slots: int) -> Tensor:
    """[S] int32: from where on any query of each sequence sees, down to a multiple of `slots`."""
    if not window:
        return torch.zeros_like(context_lens)
    return (context_lens - num_queries - window + 1).clamp(min=0) // slots * slots


def plan_decode_twin(decodes: Decodes, programs: int, capacity: int, slots: int, window: int = 0) -> DecodePlan:
    """programs: to be filled, for each KV head; capacity: P."""
    num_queries = decodes.query_starts.diff()
    tiles = -(-(decodes.context_lens - first_slots(decodes.context_lens, num_queries, window, slots)) // slots)
    split = max(MIN_TILES, -(-int(tiles.sum()) // programs))
    num_splits = -(-tiles // split)
    starts = torch.nn.functional.pad(num_splits.cumsum(0), (1, 0)).int()
    work = torch.full((capacity,), -1, dtype=torch.int32, device=starts.device)
    sequences = torch.arange(len(tiles), dtype=torch.int32, device=starts.device)
    work[: int(starts[-1])] = sequences.repeat_interleave(num_splits)
    return DecodePlan(work, starts, starts.new_tensor([split * slots]), slots, window)


def plan_decode_triton(decodes: Decodes, programs: int, capacity: int, slots: int, window: int = 0) -> DecodePlan:
    num_seqs = len(decodes.context_lens)
    device = decodes.context_lens.device
    work, starts, split = (
        torch.empty(n, dtype=torch.int32, device=device) for n in (capacity, num_seqs + 1, 1)
    )  # fmt: skip
    _plan_decode_kernel[(1,)](
        decodes.context_lens,
        decodes.query_starts,
        work,
        starts,
        split,
        num_seqs,
        capacity,
        programs,
        window,
        SLOTS=slots,
        LEAST=MIN_TILES,
        BLOCK=max(next_power_of_2(num_seqs + 1), _LEAST_BLOCK),
    )
    return DecodePlan(work, starts, split, slots, window)


def plan_decode(
    decodes: Decodes, num_kv_heads: int, config: DecodeConfig, window: int = 0, tiles_of_rows: int = 1
) -> DecodePlan:
    """Plan the layers with these KV heads, tiles of rows for each and window. Does not wait for the device."""
    chip = chip_of(decodes.context_lens.device)
    programs = -(-chip.num_cores * config.programs_per_core // (num_kv_heads * tiles_of_rows))
    run = kernel_for(decodes.context_lens, plan_decode_triton, plan_decode_twin)
    # Every sequence's last split may be short, all others are of the size that fills the device.
    return run(decodes, programs, len(decodes.context_lens) + programs, config.slots, window)


@jit
def _plan_decode_kernel(
    context_lens: tl.tensor,  # [S] int32
    query_starts: tl.tensor,  # [S + 1] int32
    work: tl.tensor,  # [capacity] int32
    starts: tl.tensor,  # [S + 1] int32
    split: tl.tensor,  # [1] int32
    num_seqs: int,
    capacity: int,
    programs: int,
    window: int,
    SLOTS: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (1,)."""
    s = tl.arange(0, BLOCK)
    length = tl.load(context_lens + s, mask=s < num_seqs, other=0)
    begin = tl.load(query_starts + s, mask=s < num_seqs, other=0)
    num_queries = tl.load(query_starts + s + 1, mask=s < num_seqs, other=0) - begin
    first = tl.where(window > 0, tl.maximum(length - num_queries - window + 1, 0) // SLOTS * SLOTS, 0)
    tiles = (length - first + SLOTS - 1) // SLOTS
    tiles_of_split = tl.maximum(tl.cdiv(tl.sum(tiles, 0), programs), LEAST)
    num_splits = (tiles + tiles_of_split - 1) // tiles_of_split
    start = tl.cumsum(num_splits, 0) - num_splits
    tl.store(starts + s, start, mask=s <= num_seqs)
    tl.store(split, tiles_of_split * SLOTS)
    for i in range(0, tl.max(num_splits, 0)):  # pyright: ignore[reportArgumentType]
        tl.store(work + start + i, s, mask=i < num_splits)
    num_used = tl.sum(num_splits, 0)
    for i in range(0, capacity, BLOCK):
        tl.store(work + i + s, -1, mask=(i + s >= num_used) & (i + s < capacity))
