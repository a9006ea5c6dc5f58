"""The compiled kernels of 4-bit KV with a tail, against the torch twins, and their bits in other company."""

from functools import cache

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.kivi_attention import kivi_attention as twin
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from diptych.kernels.cpu.attention import (
    AttentionLimits,
    AttentionScratch,
    Heads,
    KiviLayer,
    Places,
    Tails,
    kivi_attention,
    pack,
    plan_attention,
    rope_kv_write,
    round_blocks,
    unpack,
)
from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.kv.kivi import GROUP, SMALLEST, block_bytes
from diptych.kernels.kv.kivi import round_blocks as round_blocks_twin

from ..kivi_cases import NUM_BLOCKS, NUM_TAIL_BLOCKS, Step, make_kv, make_step, step_of
from .test_attention import OPTIONS, TOLERANCE

BATCHES = [
    ([1], [1]),
    ([32], [1]),
    ([600], [1]),
    ([300, 16, 33, 257], [1, 1, 1, 1]),
    ([33, 5, 20, 530], [1, 1, 7, 130]),
    ([260, 300], [260, 9]),
    ([1, 64, 400], [1, 33, 3]),
]
SHAPES = [(4, 4, 32), (9, 3, 64), (6, 2, 96), (8, 1, 128), (15, 1, 32)]


def attend(team: Team, q: Tensor, step: Step, options: AttentionOptions = NO_OPTIONS) -> Tensor:
    heads = Heads.of(q.shape[1], step.pool.shape[2], q.shape[2], options)
    batch, layer, tails = step.batch, KiviLayer(step.pool, pack(step.tail)), Tails.of(step.batch, step.tails)
    limits = AttentionLimits(len(batch.host_num_new), q.shape[0], max(batch.host_context_lens))
    scratch = AttentionScratch.of(team, q.dtype, heads, limits)
    plan_attention(team, q.dtype, heads, batch, scratch, tails=tails)
    outs = [kivi_attention(team, q, layer, batch, tails, heads, scratch) for _ in range(2)]  # a plan serves every layer
    assert torch.equal(*outs)
    return outs[0]


def queries(num: int, num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of a wider tensor."""
    return torch.randn(num, num_heads + 3, dim, generator=torch.Generator().manual_seed(num)).to(dtype)[:, 1:-2]


@cache
def case(
    number: int, shape: tuple[int, int, int], dtype: torch.dtype, options: AttentionOptions
) -> tuple[Step, Tensor, Tensor]:
    """(step, queries, the twin's result)."""
    num_heads, num_kv_heads, dim = shape
    step = step_of(*BATCHES[number], num_kv_heads, dim, dtype)
    q = queries(sum(BATCHES[number][1]), num_heads, dim, dtype)
    return step, q, twin(q, step.pool, step.tail, step.batch, step.slots, options)


@pytest.mark.parametrize("shape", SHAPES)
def test_is_its_twin(team: Team, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    for number in range(len(BATCHES)):
        step, q, expected = case(number, shape, dtype, NO_OPTIONS)
        torch.testing.assert_close(attend(team, q, step), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_options_are_its_twins(team: Team, dtype: torch.dtype) -> None:
    for options in OPTIONS:
        for number in range(len(BATCHES)):
            step, q, expected = case(number, (6, 2, 32), dtype, options)
            found = attend(team, q, step, options)
            torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def chunks_of(whole: PagedBatch, kv: Tensor, chunks: list[tuple[int, int]]) -> tuple[Step, Tensor]:
    """Chunks (end, size) of one sequence, each as a separate sequence; and which rows of its queries they are."""
    ends, sizes = [end for end, _ in chunks], [size for _, size in chunks]
    starts = torch.tensor([0, *sizes]).cumsum(0).int()
    rows = torch.cat([torch.arange(end - size, end) for end, size in chunks])
    tables = whole.block_tables.expand(len(chunks), -1).contiguous()
    lens = torch.tensor(ends, dtype=torch.int32)
    batch = PagedBatch(tables, lens, starts, ends, sizes, sizes.count(1), GROUP)
    return make_step(batch, [kv[:end] for end in ends]), rows


@pytest.mark.parametrize("options", [NO_OPTIONS, AttentionOptions(window=270, softcap=3.0, sinks=torch.ones(6))])
def test_a_rows_bits_are_its_own(built: Library, dtype: torch.dtype, options: AttentionOptions) -> None:
    """Decodes, chunks of any size and offset, other sequences beside them, one thread or three: equal results."""
    length, dim = 580, 64
    alone, crowd = Team(built, 1), Team(built, 3)
    whole = step_of([length], [length], 2, dim, dtype)
    q = torch.randn(length, 6, dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = attend(alone, q, whole, options)
    decodes = [(end, 1) for end in (1, 2, 16, 32, 33, 255, 256, 257, 270, 288, 289, 511, 512, 513, 545, 580)]
    chunks = [(5, 5), (100, 37), (257, 2), (300, 120), (512, 33), (530, 18), (580, 263)]
    for team in (alone, crowd):
        for some in (decodes, chunks, decodes[::-1] + chunks, decodes[-1:], decodes[-3:-1], chunks[-1:]):
            step, rows = chunks_of(whole.batch, whole.kv[0], some)
            assert torch.equal(attend(team, q[rows], step, options), expected[rows])
    alone.close()
    crowd.close()


def test_what_a_window_has_left_behind_is_not_read(pair: Team, dtype: torch.dtype) -> None:
    options = AttentionOptions(window=40)
    step = step_of([600, 333, 200], [1, 1, 30], 2, 64, dtype)
    q = queries(32, 4, 64, dtype)
    expected = attend(pair, q, step, options)
    assert expected.isfinite().all()
    for table, length, num_new in zip(step.batch.block_tables, (600, 333, 200), (1, 1, 30), strict=True):
        step.pool[table[: (length - num_new + 1 - 40) // GROUP].long()] = 0xFF
    assert torch.equal(attend(pair, q, step, options), expected)


def tail_of(num: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows [num, 2, 32, K, D], with groups of unlike sizes, some of one number, of zeros, and of what is none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 2, GROUP, num_kv_heads, dim, generator=generator)
    sizes = 10.0 ** torch.randint(-4, 5, (num, 2, 1, num_kv_heads, dim), generator=generator)
    x = x * sizes + sizes * torch.randint(-1, 2, sizes.shape, generator=generator)
    x[0, 0, :, 0, 0:4] = torch.tensor([0.0, -0.0, 1.7, SMALLEST / 4])
    x[0, 1, 0, 0], x[0, 1, 1, 0], x[0, 1, 2, 0] = -0.3, SMALLEST / 4, -0.0
    x[0, 0, ::2, 0, 4] = x[0, 1, 3, 0, ::2] = -0.0
    x[1, :, 3, 0, 7], x[1, :, 4, -1, 9], x[1, :, 5, -1, 11] = torch.nan, torch.inf, -torch.inf
    x[1, :, 6, 0, 13], x[1, :, 7, 0, 13] = 3e38, -3e38
    return x.to(dtype)


@pytest.mark.parametrize(("num_kv_heads", "dim"), [(1, 32), (3, 64), (2, 96), (1, 128)])
def test_blocks_are_rounded_as_the_twin_rounds_them(
    team: Team, dtype: torch.dtype, num_kv_heads: int, dim: int
) -> None:
    """Bit for bit. No other block or layer is touched."""
    tail = tail_of(6, num_kv_heads, dim, dtype)
    pairs = torch.tensor([[3, 2], [0, 6], [4, 5], [1, 0]])
    pools = [torch.full((7, 3, 2, num_kv_heads, block_bytes(dim)), 0xFF, dtype=torch.uint8) for _ in range(2)]
    wide = torch.full((6, 2, 2, num_kv_heads, 2, 16 * dim), torch.nan, dtype=dtype)
    wide[:, 1] = pack(tail)
    round_blocks(team, KiviLayer(pools[0][:, 1], wide[:, 1]), pairs)
    round_blocks_twin(tail, pools[1][:, 1], pairs)
    assert torch.equal(*pools)
    round_blocks(team, KiviLayer(pools[0][:, 1], wide[:, 1]), pairs[:0])
    assert torch.equal(*pools)


def test_a_step_of_writing_rounding_and_attention(team: Team, dtype: torch.dtype) -> None:
    """Rows are written to the tail as they are to a cache at full width, then its full blocks are rounded."""
    num_heads, num_kv_heads, dim = 4, 2, 64
    lengths, num_new = [64, 70, 40], [1, 30, 40]
    step = step_of(lengths, num_new, num_kv_heads, dim, dtype)
    q = queries(sum(num_new), num_heads, dim, dtype)
    expected = attend(team, q, step)
    layer = KiviLayer(step.pool.clone(), pack(step.tail))
    slots: list[int] = []
    news: list[Tensor] = []
    tails = iter(step.tails)
    for length, num, kv in zip(lengths, num_new, make_kv(lengths, num_kv_heads, dim, dtype), strict=True):
        start = length - num
        own = {number: next(tails) for number in range(start // GROUP, (length - 1) // GROUP + 1)}
        slots += [own[position // GROUP] * GROUP + position % GROUP for position in range(start, length)]
        news.append(kv[start:])
    rows = unpack(layer.tail)
    rows[torch.tensor(slots) // GROUP, :, torch.tensor(slots) % GROUP] = torch.nan
    layer = KiviLayer(layer.pool, pack(rows))
    filled = torch.tensor(step.filled)
    assert len(filled) == 3
    layer.pool[filled[:, 1]] = 0xFF
    new = torch.cat(news)
    qkv = torch.cat((q, new[:, 0], new[:, 1]), dim=1).flatten(1)
    heads = Heads.of(num_heads, num_kv_heads, dim)
    places = Places(torch.zeros(len(slots), dtype=torch.int64), torch.tensor(slots))
    rope_kv_write(team, qkv, heads, torch.empty(1, 0), places, layer.tail)
    round_blocks(team, layer, filled)
    assert torch.equal(layer.pool, step.pool)
    assert torch.equal(unpack(layer.tail).view(torch.uint8), step.tail.view(torch.uint8))
    made = Step(step.batch, layer.pool, unpack(layer.tail), step.tails, step.filled, step.kv)
    assert torch.equal(attend(team, q, made), expected)
    assert len(layer.tail) == NUM_TAIL_BLOCKS and len(layer.pool) == NUM_BLOCKS
