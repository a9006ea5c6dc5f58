"""Ragged batches over a paged cache, and attention over them written out plainly."""

import torch

from diptych.kernels.attention.paged_batch import PagedBatch


def make_batch(
    context_lens: list[int], num_new: list[int], block_size: int, num_blocks: int, device: str = "cpu"
) -> PagedBatch:
    """Each sequence in its own scattered blocks; decodes must come first. Seeded."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    width = max(-(-n // block_size) for n in context_lens)
    tables = torch.zeros(len(context_lens), width, dtype=torch.int32)
    for row, length in zip(tables, context_lens, strict=True):
        for i in range(-(-length // block_size)):
            row[i] = order.pop()
    starts = torch.tensor([0, *num_new]).cumsum(0)
    return PagedBatch(
        block_tables=tables.to(device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        query_starts=starts.int().to(device),
        host_context_lens=context_lens,
        host_num_new=num_new,
        num_decodes=sum(n == 1 for n in num_new),
        block_size=block_size,
    )


def make_cache(batch: PagedBatch, num_blocks: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Make a layer of a two-layer cache (so that it is strided), NaN wherever no sequence has a token."""
    device = batch.block_tables.device
    cache = torch.full((num_blocks, 2, 2, batch.block_size, num_kv_heads, dim), torch.nan, dtype=dtype, device=device)
    layer = cache[:, 1]
    generator = torch.Generator().manual_seed(1)
    for row, length in zip(batch.block_tables.tolist(), batch.host_context_lens, strict=True):
        positions = torch.arange(length)
        kv = torch.randn(length, 2, num_kv_heads, dim, generator=generator)
        layer[torch.tensor(row)[positions // batch.block_size], :, positions % batch.block_size] = kv.to(cache)
    return layer


def plain_attention(q: torch.Tensor, cache: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
    """Compute the attention of one query row after another, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // cache.shape[3]
    t = 0
    for row, length, num in zip(batch.block_tables, batch.host_context_lens, batch.host_num_new, strict=True):
        slots = [(int(row[p // batch.block_size]), p % batch.block_size) for p in range(length)]
        kv = torch.stack([cache[block, :, slot] for block, slot in slots]).double().cpu()  # [length, 2, K, D]
        for position in range(length - num, length):
            for head in range(q.shape[1]):
                keys, values = kv[: position + 1, 0, head // group], kv[: position + 1, 1, head // group]
                scores = keys @ q[t, head].double().cpu() / q.shape[2] ** 0.5
                out[t, head] = scores.softmax(0) @ values
            t += 1
    return out
