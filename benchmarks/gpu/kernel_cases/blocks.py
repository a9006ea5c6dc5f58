"""Blocks of KV copied, gathered, scattered, and moved between layouts, dtypes and ranks, as the hand-off does it.

32 layers of 8 heads of 128: a block of 16 tokens is 2 MiB. Bytes: what is read and what is written, once each.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.kernels.kv.block_copy import copy_blocks_triton
from diptych.kernels.kv.kv_move import KVSlots, move_kv_triton, move_kv_twin

from .common import DEVICE, HALF, MOVES, Case, Random, sized

LAYERS, HEADS, DIM = sized((32, 8, 128), (3, 2, 16))
BLOCK_SIZE = 16
BLOCK_BYTES = LAYERS * 2 * BLOCK_SIZE * HEADS * DIM * HALF.itemsize


@dataclass(frozen=True)
class Blocks:
    pool: Tensor  # [blocks, layers, 2, block_size, heads, D]
    buffer: Tensor  # [n, ...]
    read: Tensor  # [n] int64: blocks of the first half
    written: Tensor  # [n] int64: blocks of the second half


def make_blocks(seed: int, num: int, is_layer_major: bool) -> Blocks:
    random = Random(seed)
    shape = (2, BLOCK_SIZE, HEADS, DIM)
    pool = (
        random.normal(LAYERS, 4 * num, *shape).transpose(0, 1)
        if is_layer_major
        else random.normal(4 * num, LAYERS, *shape)
    )
    buffer = random.normal(num, LAYERS, *shape)
    return Blocks(pool, buffer, random.order(2 * num)[:num], 2 * num + random.order(2 * num)[:num])


def copy(x: Blocks) -> Tensor:
    copy_blocks_triton(x.pool, x.pool, x.read, x.written)
    return x.pool[2 * len(x.read) :]


def copy_by_torch(x: Blocks) -> Tensor:
    x.pool[x.written] = x.pool[x.read]
    return x.pool[2 * len(x.read) :]


def gather(x: Blocks) -> Tensor:
    copy_blocks_triton(x.pool, x.buffer, x.read, None)
    return x.buffer


def gather_by_torch(x: Blocks) -> Tensor:
    return torch.index_select(x.pool, 0, x.read, out=x.buffer) if x.pool.is_contiguous() else x.pool[x.read]


def scatter(x: Blocks) -> Tensor:
    copy_blocks_triton(x.buffer, x.pool, None, x.written)
    return x.pool[2 * len(x.read) :]


def scatter_by_torch(x: Blocks) -> Tensor:
    x.pool.index_copy_(0, x.written, x.buffer)
    return x.pool[2 * len(x.read) :]


def block_cases(num: int) -> Iterator[Case]:
    for is_layer_major in (False, True):
        order = ", layer-major" if is_layer_major else ""
        for name, run, by_torch in (
            ("copy", copy, copy_by_torch),
            ("gather", gather, gather_by_torch),
            ("scatter", scatter, scatter_by_torch),
        ):
            yield Case(
                f"blocks: {name}",
                f"{num} of {BLOCK_BYTES >> 10} KiB{order}",
                lambda seed, is_layer_major=is_layer_major: make_blocks(seed, num, is_layer_major),
                run,
                lambda x, _, by_torch=by_torch: by_torch(x),
                2 * num * BLOCK_BYTES,
                tolerance=0.0,
                peers={"torch": by_torch},
                goals=MOVES,
            )


@dataclass(frozen=True)
class Move:
    source: KVSlots
    target: KVSlots
    num_tokens: int

    def by_triton(self) -> tuple[Tensor, ...]:
        move_kv_triton(self.source, self.target, 0, self.num_tokens)
        return self._written()

    def by_twin(self) -> tuple[Tensor, ...]:
        move_kv_twin(self.source, self.target, 0, self.num_tokens)
        return self._written()

    def _written(self) -> tuple[Tensor, ...]:
        scales = self.target.scales
        return (self.target.numbers,) if scales is None else (self.target.numbers, scales)


def make_move(seed: int, num_tokens: int, stored: torch.dtype, block_size: int, heads: slice) -> Move:
    """Some heads of a pool, into a pool of those alone of another block size and dtype."""
    random = Random(seed)
    num_source, num_target = -(-num_tokens // BLOCK_SIZE), -(-num_tokens // block_size)
    source = random.normal(num_source, LAYERS, 2, BLOCK_SIZE, HEADS, DIM)[:, :, :, :, heads]
    num_heads = source.shape[4]
    numbers = torch.zeros(num_target, LAYERS, 2, block_size, num_heads, DIM, dtype=stored, device=DEVICE)
    scales = torch.zeros(num_target, LAYERS, 2, num_heads, block_size, device=DEVICE).transpose(3, 4)
    has_scales = stored == torch.int8
    return Move(
        KVSlots(source, random.order(num_source)),
        KVSlots(numbers, random.order(num_target), scales=scales if has_scales else None),
        num_tokens,
    )


def move_case(name: str, num_tokens: int, stored: torch.dtype, block_size: int, heads: slice) -> Case:
    num_heads = len(range(*heads.indices(HEADS)))
    vectors = LAYERS * 2 * num_tokens * num_heads
    written = DIM * stored.itemsize + (4 if stored == torch.int8 else 0)
    return Case(
        f"KV move: {name}",
        f"{num_tokens} tokens",
        lambda seed: make_move(seed, num_tokens, stored, block_size, heads),
        Move.by_triton,
        lambda x, _: x.by_twin(),
        vectors * (DIM * HALF.itemsize + written),
        tolerance=1e-3,  # of codes that round to their neighbours
        peers={"twin": Move.by_twin},
        goals=MOVES,
    )


def cases() -> Iterator[Case]:
    yield from block_cases(sized(64, 3))
    half = slice(HEADS // 2, HEADS)
    yield move_case("half the heads, blocks of 64", sized(2048, 37), HALF, 64, half)
    yield move_case("blocks of 64", sized(1024, 37), HALF, 64, slice(0, HEADS))
    yield move_case("to int8", sized(1024, 37), torch.int8, BLOCK_SIZE, slice(0, HEADS))
