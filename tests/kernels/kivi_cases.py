"""Steps over KV of kernels/kv/kivi.py: what a pool and a tail hold of some sequences, and NaN wherever nothing is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from diptych.kernels.attention.paged_batch import AttentionOptions, PagedBatch
from diptych.kernels.kv.kivi import GROUP, block_bytes, round_blocks, widen_blocks

from ..support.paged import make_batch

NUM_BLOCKS, NUM_TAIL_BLOCKS = 90, 70


@dataclass(frozen=True)
class Step:
    """The step's sequences, and what kernels read of one layer."""

    batch: PagedBatch
    pool: Tensor  # [NUM_BLOCKS, 2, K, 20 D] uint8, a view of a wider pool
    tail: Tensor  # [NUM_TAIL_BLOCKS, 2, 32, K, D]
    tails: list[int]
    filled: list[tuple[int, int]]  # (tail block, pool block) of the blocks that the step fills
    kv: list[Tensor]  # of each sequence, [L, 2, K, D], as computed

    @property
    def slots(self) -> Tensor:
        """[T] int64: where in the tail each new token's KV is."""
        slots, tails = list[int](), iter(self.tails)
        for length, num_new in zip(self.batch.host_context_lens, self.batch.host_num_new, strict=True):
            for number in range((length - num_new) // GROUP, -(-length // GROUP)):
                start = next(tails) * GROUP
                positions = range(max(length - num_new, number * GROUP), min((number + 1) * GROUP, length))
                slots += [start + position % GROUP for position in positions]
        return torch.tensor(slots, device=self.tail.device)


def make_kv(lengths: list[int], num_kv_heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Of each sequence [L, 2, K, D], with channels of unlike sizes and means."""
    generator = torch.Generator().manual_seed(1)
    spread, mean = torch.rand(dim, generator=generator) * 2, torch.randn(dim, generator=generator) / 2
    return [
        (torch.randn(length, 2, num_kv_heads, dim, generator=generator) * spread + mean).to(dtype) for length in lengths
    ]


def make_step(batch: PagedBatch, kv: list[Tensor]) -> Step:
    """The pool has the full blocks of each sequence, the tail the blocks of its new tokens. Sequences that share a
    table must have the same KV."""
    num_kv_heads, dim = kv[0].shape[2:]
    pool = torch.full((NUM_BLOCKS, 2, 2, num_kv_heads, block_bytes(dim)), 0xFF, dtype=torch.uint8)[:, 1]
    tail = torch.full((NUM_TAIL_BLOCKS, 2, GROUP, num_kv_heads, dim), torch.nan, dtype=kv[0].dtype)
    free = torch.randperm(NUM_TAIL_BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    tails: list[int] = []
    filled: list[tuple[int, int]] = []
    places = zip(batch.block_tables.tolist(), batch.host_context_lens, batch.host_num_new, kv, strict=True)
    for table, length, num_new, of in places:
        full = torch.tensor([[number, table[number]] for number in range(length // GROUP)]).view(-1, 2).long()
        round_blocks(of[: len(full) * GROUP].unflatten(0, (-1, GROUP)).transpose(1, 2), pool, full)
        for number in range((length - num_new) // GROUP, -(-length // GROUP)):
            tails.append(free.pop())
            own = of[number * GROUP : min((number + 1) * GROUP, length)]
            tail[tails[-1], :, : len(own)] = own.transpose(0, 1)
            if len(own) == GROUP:
                filled.append((tails[-1], table[number]))
    return Step(batch, pool, tail, tails, filled, kv)


def step_of(lengths: list[int], num_new: list[int], num_kv_heads: int, dim: int, dtype: torch.dtype) -> Step:
    return make_step(make_batch(lengths, num_new, GROUP, NUM_BLOCKS), make_kv(lengths, num_kv_heads, dim, dtype))


def plain_attention(q: Tensor, step: Step, options: AttentionOptions) -> Tensor:
    """Compute the attention of one query row after another, in float64. q: [T, N, D]."""
    out, group, row = torch.empty(q.shape, dtype=torch.float64), q.shape[1] // step.pool.shape[2], 0
    for table, num_new, of in zip(step.batch.block_tables, step.batch.host_num_new, step.kv, strict=True):
        for position in range(len(of) - num_new, len(of)):
            own = position // GROUP
            widened = torch.stack(widen_blocks(step.pool, table[:own].long()), dim=1).double()
            kv = torch.cat((widened, of[own * GROUP : position + 1].double()))
            oldest = max(position + 1 - options.window, 0) if options.window else 0
            for head in range(q.shape[1]):
                keys, values = kv[oldest:, :, head // group].unbind(1)
                scores = keys @ q[row, head].double() * options.scale_of(q.shape[2])
                if options.softcap:
                    scores = (scores / options.softcap).tanh() * options.softcap
                if options.sinks is not None:
                    scores = torch.cat((scores, options.sinks[head : head + 1].double()))
                out[row, head] = scores.softmax(0)[: len(values)] @ values
            row += 1
    return out
