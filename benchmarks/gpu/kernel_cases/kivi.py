"""KV in 4 bits by channel (kivi): attention of decodes and of chunks, 32 query and 8 KV heads of 128, over blocks in
random order and a tail, and rounding of full blocks.

Bytes of attention: the pool's blocks before each row's own, 5 bits a number, own blocks at full width, queries and
outputs. Flops: two products for each query head and pair of tokens that see each other, 4 N D.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.kernels.attention.kivi_attention import kivi_attention_twin
from diptych.kernels.attention.kivi_kernels import kivi_attention_triton
from diptych.kernels.attention.paged_batch import NO_OPTIONS, PagedBatch
from diptych.kernels.kv.kivi import GROUP, block_bytes, round_blocks_triton, round_blocks_twin

from .common import DEVICE, HALF, Case, Random, sized

HEADS, KV_HEADS, DIM = sized((32, 8, 128), (4, 2, 32))


@dataclass(frozen=True)
class Inputs:
    q: Tensor  # [T, N, D]
    pool: Tensor  # [blocks, 2, K, 20 D] uint8
    tail: Tensor  # [tail blocks, 2, 32, K, D]
    batch: PagedBatch  # sequences of equal lengths, whose plans are made once: not part of what is timed
    slots: Tensor  # [T] int64


def make(seed: int, num_seqs: int, context: int, num_new: int) -> Inputs:
    random, width = Random(seed), -(-context // GROUP)
    first = (context - num_new) // GROUP
    num_own = width - first  # blocks of a sequence that new tokens are in
    pool = torch.zeros(num_seqs * width, 2, KV_HEADS, block_bytes(DIM), dtype=torch.uint8, device=DEVICE)
    blocks = random.order(num_seqs * width)
    for some in blocks.split(1024):
        wide = random.normal(len(some), 2, GROUP, KV_HEADS, DIM)
        pairs = torch.stack((torch.arange(len(some), device=DEVICE), some), dim=1)
        round_blocks_triton(wide, pool, pairs)
    tail = random.normal(num_seqs * num_own, 2, GROUP, KV_HEADS, DIM)
    own = random.order(num_seqs * num_own).view(num_seqs, num_own)
    position = torch.arange(context - num_new, context, device=DEVICE)
    slots = own[:, position // GROUP - first] * GROUP + position % GROUP
    batch = PagedBatch(
        blocks.int().view(num_seqs, width),
        torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE),
        torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * num_new,
        [context] * num_seqs,
        [num_new] * num_seqs,
        num_seqs if num_new == 1 else 0,
        GROUP,
    )
    made = Inputs(random.normal(num_seqs * num_new, HEADS, DIM), pool, tail, batch, slots.view(-1).contiguous())
    run(made)  # it plans
    return made


def run(x: Inputs) -> Tensor:
    return kivi_attention_triton(x.q, x.pool, x.tail, x.batch, x.slots, NO_OPTIONS)


def reference(x: Inputs, _: object) -> Tensor:
    return kivi_attention_twin(x.q, x.pool, x.tail, x.batch, x.slots, NO_OPTIONS)


def attention(num_seqs: int, context: int, num_new: int = 1) -> Case:
    history, own = context - num_new, -(-context // GROUP) - (context - num_new) // GROUP
    num_pairs = num_seqs * num_new * (history + (num_new + 1) / 2)
    kv_bytes = num_seqs * 2 * KV_HEADS * (context * block_bytes(DIM) / GROUP + own * GROUP * DIM * HALF.itemsize)
    return Case(
        "decode attention, kivi" if num_new == 1 else "prefill attention, kivi",
        f"{num_seqs} x {context}" + (f", {num_new} new" if num_new > 1 else ""),
        lambda seed: make(seed, num_seqs, context, num_new),
        run,
        reference,
        kv_bytes + 2 * HALF.itemsize * num_seqs * num_new * HEADS * DIM,
        4.0 * num_pairs * HEADS * DIM,
    )


@dataclass(frozen=True)
class Full:
    """Blocks of a tail, in order, and a pool that they are rounded into."""

    tail: Tensor  # [blocks, 2, 32, K, D]
    pool: Tensor  # [blocks, 2, K, 20 D] uint8
    pairs: Tensor  # [blocks, 2] int64


def full(seed: int, num_blocks: int, num_filled: int) -> Full:
    random = Random(seed)
    pairs = torch.full((num_blocks, 2), -1, device=DEVICE)
    some = random.order(num_blocks)[:num_filled]
    pairs[some] = torch.stack((some, random.order(num_blocks)[:num_filled]), dim=1)
    tail = random.normal(num_blocks, 2, GROUP, KV_HEADS, DIM)
    pool = torch.zeros(num_blocks, 2, KV_HEADS, block_bytes(DIM), dtype=torch.uint8, device=DEVICE)
    return Full(tail, pool, pairs)


def round_all(x: Full) -> Tensor:
    round_blocks_triton(x.tail, x.pool, x.pairs)
    return x.pool


def rounded(x: Full, _: object) -> Tensor:
    round_blocks_twin(x.tail, x.pool, x.pairs)
    return x.pool


def rounding(num_blocks: int, num_filled: int) -> Case:
    num_bytes = num_filled * 2 * KV_HEADS * (GROUP * DIM * HALF.itemsize + block_bytes(DIM)) + 16 * num_blocks
    shape = f"{num_filled} of {num_blocks} blocks"
    return Case("rounding, kivi", shape, lambda seed: full(seed, num_blocks, num_filled), round_all, rounded, num_bytes)


def cases() -> Iterator[Case]:
    yield attention(*sized((64, 4096), (2, 70)))
    yield attention(*sized((32, 8192), (2, 96)))
    yield attention(*sized((1, 65536), (1, 170)))
    yield attention(*sized((4, 4096, 4096), (1, 70, 70)))
    yield attention(*sized((1, 16384, 2048), (1, 90, 33)))
    yield rounding(*sized((256, 256), (4, 4)))  # of a prompt's step
    yield rounding(*sized((64, 2), (4, 1)))  # of a step of decodes
