"""The compiled choice of blocks: bounds of keys, scores, attention to the chosen, against QUEST written out plainly."""

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.decode_attention import decode_attention_twin
from diptych.kernels.attention.decode_plan import Decodes, plan_decode_twin
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from diptych.kernels.attention.quest import score_blocks_twin, summarise_twin
from diptych.kernels.attention.quest_choice import choose_blocks as choose_twin
from diptych.kernels.cpu.attention import (
    AttentionLimits,
    AttentionScratch,
    Heads,
    SparseStruct,
    pack,
    paged_attention,
    plan_attention,
)
from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.cpu.sparse import SparseMemory, choose_blocks, padded_dim

from ...support.paged import make_batch, make_cache

NUM_BLOCKS = 90
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SHAPES = [(3, 1, 16), (6, 2, 80), (4, 4, 64)]
SINKS = torch.linspace(-1, 2, 6)


def queries(num_rows: int, num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of a wider tensor, large, so that attention is not flat."""
    generator = torch.Generator().manual_seed(7)
    return (2 * torch.randn(num_rows, num_heads + 3, dim, generator=generator)).to(dtype)[:, 1:-2]


def no_bounds(cache: Tensor) -> Tensor:
    """NaN, but for what pads them."""
    num_blocks, _, _, num_kv_heads, dim = cache.shape
    made = torch.zeros(num_blocks, num_kv_heads, 2, padded_dim(dim, cache.dtype), dtype=cache.dtype)
    made[..., :dim] = torch.nan
    return made


def plain_bounds(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Of the blocks of one sequence, [blocks, K, 2, D]."""
    block_size = cache.shape[2]
    found: list[Tensor] = []
    for start in range(0, length, block_size):
        keys = cache[int(table[start // block_size]), 0, : min(block_size, length - start)]
        found.append(torch.stack((keys.amin(0), keys.amax(0)), dim=1))
    return torch.stack(found)


def plain_choice(q: Tensor, bounds: Tensor, num_chosen: int) -> list[list[int]]:
    """Places of the blocks that each KV head attends to, as the paper says it. q: [N, D], bounds: [blocks, K, 2, D]."""
    num_blocks, num_kv_heads = bounds.shape[:2]
    found: list[list[int]] = []
    for head, grouped in enumerate(q.double().view(num_kv_heads, -1, q.shape[1])):
        low, high = bounds[:, head, 0].double(), bounds[:, head, 1].double()
        scores = torch.stack([torch.maximum(query * low, query * high).sum(1) for query in grouped]).amax(0)
        order = sorted(range(1, num_blocks - 2), key=lambda i: -float(scores[i]))
        found.append(sorted([0, *order[: num_chosen - 3], num_blocks - 2, num_blocks - 1]))
    return found


def attend(
    team: Team,
    q: Tensor,
    packed: Tensor,
    batch: PagedBatch,
    sparse: SparseStruct | None,
    options: AttentionOptions = NO_OPTIONS,
) -> Tensor:
    heads = Heads.of(q.shape[1], packed.shape[2], q.shape[2], options)
    limits = AttentionLimits(len(batch.host_num_new), len(q), max(batch.host_context_lens))
    scratch = AttentionScratch.of(team, q.dtype, heads, limits)
    plan_attention(team, q.dtype, heads, batch, scratch, sparse)
    return paged_attention(team, q, packed, batch, heads, scratch, sparse)


def memory_of(q: Tensor, num_kv_heads: int, num_chosen: int, block_size: int) -> SparseMemory:
    return SparseMemory(Heads.of(q.shape[1], num_kv_heads, q.shape[2]), num_chosen, block_size, q.dtype)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_quest_as_written(team: Team, dtype: torch.dtype, shape: tuple[int, int, int], block_size: int) -> None:
    """Beside sparse decodes, one that attends to all and a chunk."""
    num_heads, num_kv_heads, dim = shape
    lengths, num_new = [block_size * 7 + 3, block_size * 3, block_size * 9, block_size * 6 - 5], [1, 1, 1, 9]
    batch = make_batch(lengths, num_new, block_size, NUM_BLOCKS)
    cache = make_cache(batch, NUM_BLOCKS, num_kv_heads, dim, dtype)
    q, packed, bounds = queries(sum(num_new), num_heads, dim, dtype), pack(cache), no_bounds(cache)
    memory = memory_of(q, num_kv_heads, 5, block_size)
    sparse = choose_blocks(team, q, packed, bounds, batch, memory, [0, -1, 0, -1])

    full = attend(team, q, packed, batch, None)
    found = attend(team, q, packed, batch, sparse)
    assert torch.equal(found[1], full[1]) and torch.equal(found[3:], full[3:])
    for s in (0, 2):
        table = batch.block_tables[s]
        expected = plain_bounds(cache, table, lengths[s])
        blocks = table[: len(expected)].long()
        assert torch.equal(bounds[blocks][..., :dim], expected) and not bounds[blocks][..., dim:].any()
        places = plain_choice(q[s], expected, 5)
        assert memory.chosen[s].tolist() == [[int(table[i]) for i in own] for own in places]
        tables, length = memory.chosen[s : s + 1], torch.tensor([lengths[s] - (len(expected) - 5) * block_size]).int()
        decodes = Decodes(tables, length, torch.tensor([0, 1], dtype=torch.int32), 1)
        attended = decode_attention_twin(q[s : s + 1], cache, decodes, plan_decode_twin(decodes, 1, 1, 64))
        torch.testing.assert_close(found[s], attended[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_is_its_twin_with_sinks_and_a_cap(team: Team, dtype: torch.dtype) -> None:
    options = AttentionOptions(softcap=3.0, sinks=SINKS)
    batch = make_batch([800, 333], [1, 1], 16, NUM_BLOCKS)
    cache = make_cache(batch, NUM_BLOCKS, 2, 32, dtype)
    q, packed, bounds = queries(2, 6, 32, dtype), pack(cache), no_bounds(cache)
    memory = memory_of(q, 2, 19, 16)
    sparse = choose_blocks(team, q, packed, bounds, batch, memory, [0, 0])
    summaries = torch.full((NUM_BLOCKS, 2, 2, 32), torch.nan, dtype=dtype)
    for table, length in zip(batch.block_tables, batch.host_context_lens, strict=True):
        filled = (length - torch.arange(0, length, 16)).clamp(max=16)
        summarise_twin(cache, summaries, table[: len(filled)].long(), filled)
    num_blocks = -(-batch.context_lens // 16)
    scores = score_blocks_twin(q, summaries, batch.block_tables, num_blocks)
    chosen = choose_twin(scores, batch.block_tables, batch.context_lens, 19, 16)
    assert torch.equal(memory.chosen[:2], chosen.block_tables)
    expected = decode_attention_twin(q, cache, chosen, plan_decode_twin(chosen, 1, 2, 64), options)
    found = attend(team, q, packed, batch, sparse, options)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_of_equal_scores_the_earliest_blocks_are_chosen(team: Team, dtype: torch.dtype) -> None:
    batch = make_batch([30 * 16], [1], 16, NUM_BLOCKS)
    cache = make_cache(batch, NUM_BLOCKS, 1, 16, dtype)
    cache[:, 0] = 1.0
    table = batch.block_tables[0].tolist()
    cache[table[20], 0] = 2.0
    q = torch.ones(1, 1, 16, dtype=dtype)
    memory = memory_of(q, 1, 6, 16)
    choose_blocks(team, q, pack(cache), no_bounds(cache), batch, memory, [0])
    assert memory.chosen[0, 0].tolist() == [table[i] for i in (0, 1, 2, 20, 28, 29)]


@pytest.mark.parametrize("covered", [1, 16, 31, 32, 100, 118])
def test_bounds_are_extended_from_what_they_cover(team: Team, dtype: torch.dtype, covered: int) -> None:
    """Slots that they cover are not read again."""
    batch = make_batch([119], [1], 32, NUM_BLOCKS)
    cache = make_cache(batch, NUM_BLOCKS, 2, 48, dtype)
    q, bounds, table = queries(1, 2, 48, dtype), no_bounds(cache), batch.block_tables[0].long()
    expected = plain_bounds(cache, table, 119)
    before = plain_bounds(cache, table, covered)
    bounds[table[: len(before)], ..., :48] = before
    spoilt = cache.clone()
    for position in range(covered):
        spoilt[table[position // 32], 0, position % 32] = torch.nan
    memory = memory_of(q, 2, 4, 32)
    choose_blocks(team, q, pack(spoilt), bounds, batch, memory, [covered])
    assert torch.equal(bounds[table[:4]][..., :48], expected)


def test_scores_that_are_not_numbers_leave_a_whole_choice(team: Team, dtype: torch.dtype) -> None:
    batch = make_batch([400], [1], 16, NUM_BLOCKS)
    cache = make_cache(batch, NUM_BLOCKS, 1, 16, dtype)
    q = queries(1, 2, 16, dtype).clone()
    q[0, :, 3] = torch.nan
    memory = memory_of(q, 1, 9, 16)
    choose_blocks(team, q, pack(cache), no_bounds(cache), batch, memory, [0])
    chosen = memory.chosen[0, 0].tolist()
    assert len(set(chosen)) == 9 and set(chosen) <= set(batch.block_tables[0].tolist())


def test_a_rows_bits_are_its_own(built: Library, dtype: torch.dtype) -> None:
    """Alone or beside others, by one thread or three."""
    alone, crowd = Team(built, 1), Team(built, 3)
    batch = make_batch([500, 60, 431], [1, 1, 1], 16, NUM_BLOCKS)
    cache = make_cache(batch, NUM_BLOCKS, 2, 64, dtype)
    q, packed = queries(3, 6, 64, dtype), pack(cache)
    sparse = choose_blocks(crowd, q, packed, no_bounds(cache), batch, memory := memory_of(q, 2, 18, 16), [0, -1, 0])
    together = attend(crowd, q, packed, batch, sparse)
    for s, bounded in ((0, 0), (2, 0)):
        own = PagedBatch(
            batch.block_tables[s : s + 1],
            batch.context_lens[s : s + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            [batch.host_context_lens[s]],
            [1],
            1,
            16,
        )
        single = memory_of(q, 2, 18, 16)
        sparse = choose_blocks(alone, q[s : s + 1], packed, no_bounds(cache), own, single, [bounded])
        assert torch.equal(single.chosen[0], memory.chosen[s])
        assert torch.equal(attend(alone, q[s : s + 1], packed, own, sparse)[0], together[s])
    alone.close()
    crowd.close()
