"""KV in 4 bits by channel: rounding of full blocks, and attention over the pool and the tail."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.kivi_attention import kivi_attention_twin
from diptych.kernels.attention.kivi_kernels import chunk_tiles, kivi_attention_triton
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions
from diptych.kernels.kv.kivi import GROUP, block_bytes, round_blocks_triton, round_blocks_twin

from ...support.paged import make_batch
from ..kivi_cases import Step, step_of
from .common import DEVICE, DOT_DTYPES, FOLLOWING, Launch, assert_near, following, meta, normal

I64 = torch.int64


def all_options(num_heads: int, device: str) -> AttentionOptions:
    sinks = torch.linspace(-1, 1, num_heads).to(device)
    return AttentionOptions(scale=0.3, softcap=5.0, window=39, sinks=sinks)


def launch_rounding(dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> None:
    pool = meta(256, 3, 2, 8, block_bytes(dim), dtype=torch.uint8)[:, 1]
    round_blocks_triton(meta(64, 2, GROUP, 8, dim, dtype=dtype), pool, meta(64, 2, dtype=I64))


def launch(
    num_new: list[int],
    dim: int = 128,
    max_queries: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    options: AttentionOptions = NO_OPTIONS,
) -> None:
    """Of sequences with so many new tokens; where max_queries is not 1, all of them decode."""
    batch = make_batch([n + 600 for n in num_new], num_new, GROUP, 256, "meta")
    batch = replace(batch, max_queries=max_queries, num_decodes=len(num_new) if max_queries > 1 else batch.num_decodes)
    num_tokens = sum(num_new)
    pool = meta(256, 3, 2, 8, block_bytes(dim), dtype=torch.uint8)[:, 1]
    tail, slots = meta(64, 2, GROUP, 8, dim, dtype=dtype), meta(num_tokens, dtype=I64)
    kivi_attention_triton(meta(num_tokens, 32, dim, dtype=dtype), pool, tail, batch, slots, options)


FLOAT32 = torch.float32
LAUNCHES = [
    Launch("rounding d 128", launch_rounding),
    Launch("rounding d 96, fp32", lambda: launch_rounding(96, FLOAT32), is_gated=False),
    Launch("rounding d 256", lambda: launch_rounding(256), is_gated=False),
    Launch("rounding d 128, follows", following(launch_rounding), FOLLOWING, gated_targets=("sm_90",)),
    Launch("decodes d 128", lambda: launch([1, 1])),
    Launch("decodes d 128, follows", following(lambda: launch([1, 1])), FOLLOWING, gated_targets=("sm_90",)),
    Launch("decodes d 128, 9 queries", lambda: launch([9, 9], max_queries=9), is_gated=False),
    Launch(
        "decodes d 64, 16 queries, all options",
        lambda: launch([16, 16], 64, 16, options=all_options(32, "meta")),
        is_gated=False,
    ),
    Launch("decodes d 96", lambda: launch([1, 1], 96), is_gated=False),
    Launch("decodes d 256", lambda: launch([1, 1], 256), is_gated=False),
    Launch("decodes d 128, fp32", lambda: launch([1, 1], dtype=FLOAT32), is_gated=False),
    Launch("decodes d 256, fp32", lambda: launch([1, 1], 256, dtype=FLOAT32), spilled_bytes=1840, is_gated=False),
    Launch("chunks d 128", lambda: launch([200, 100])),
    Launch("chunks d 64, all options", lambda: launch([200, 100], 64, options=all_options(32, "meta")), is_gated=False),
    Launch("chunks d 96", lambda: launch([200, 100], 96), is_gated=False),
    Launch("chunks d 256", lambda: launch([200, 100], 256), spilled_bytes=16, is_gated=False),
    Launch("chunks d 128, fp32", lambda: launch([200, 100], dtype=FLOAT32), is_gated=False),
    Launch("chunks d 256, fp32", lambda: launch([200, 100], 256, dtype=FLOAT32), spilled_bytes=840, is_gated=False),
]


def numbers_of(num: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[num, 2, 32, K, D], with channels of unlike sizes and means, and groups that have no range."""
    x = normal(num, 2, GROUP, num_kv_heads, dim, dtype=FLOAT32)
    sizes = 10.0 ** normal(num_kv_heads, dim, dtype=FLOAT32, seed=1).mul(2).round()
    x = x * sizes + sizes / 3
    x[0, :, :, 0, :32] = -0.0
    x[0, :, :, 0, 3] = 1e-34
    x[1, :, :, 0] = -1.5
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "dim"), [(1, 32), (3, 64), (2, 96), (1, 128)])
def test_blocks_are_rounded_bit_for_bit(num_kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Into one layer of three; a pair below 0 is none. What is no number makes none of its group, with the same
    bits."""
    tail = numbers_of(5, num_kv_heads, dim, dtype)
    tail[3, :, 5, 0, 1], tail[3, :, 6, 0, 9], tail[3, :, 7, 0, 30] = torch.nan, torch.inf, -torch.inf
    pairs = torch.tensor([[3, 2], [-1, -1], [0, 6], [1, 5], [2, 0], [-1, 3]], device=DEVICE)
    pools = [torch.full((7, 3, 2, num_kv_heads, block_bytes(dim)), 0xAB, dtype=torch.uint8) for _ in range(2)]
    pools = [pool.to(DEVICE) for pool in pools]
    round_blocks_twin(tail, pools[0][:, 1], pairs)
    round_blocks_triton(tail, pools[1][:, 1], pairs)
    assert torch.equal(*pools) and bool((pools[1][3] == 0xAB).all())


def on_device(step: Step) -> Step:
    batch = step.batch
    moved = replace(
        batch,
        block_tables=batch.block_tables.to(DEVICE),
        context_lens=batch.context_lens.to(DEVICE),
        query_starts=batch.query_starts.to(DEVICE),
    )
    return replace(step, batch=moved, pool=step.pool.to(DEVICE), tail=step.tail.to(DEVICE))


def check(
    lengths: list[int],
    num_new: list[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype = FLOAT32,
    options: AttentionOptions = NO_OPTIONS,
) -> None:
    num_heads, num_kv_heads, dim = heads
    step = on_device(step_of(lengths, num_new, num_kv_heads, dim, dtype))
    q = normal(sum(num_new), num_heads + 3, dim, dtype=dtype)[:, 1 : num_heads + 1]
    args = step.pool, step.tail, step.batch, step.slots, options
    assert_near(kivi_attention_triton(q, *args), kivi_attention_twin(q, *args))


BATCHES: list[tuple[list[int], list[int]]] = [
    ([1], [1]),
    ([33, 64, 310, 32], [1, 1, 1, 1]),
    ([70, 40, 5, 130], [1, 7, 5, 100]),
    ([97, 300], [34, 45]),
]


@pytest.mark.parametrize(("lengths", "num_new"), BATCHES)
@pytest.mark.parametrize("heads", [(4, 4, 32), (6, 2, 96), (8, 1, 64), (20, 1, 32)])
def test_attention(lengths: list[int], num_new: list[int], heads: tuple[int, int, int]) -> None:
    check(lengths, num_new, heads)


@pytest.mark.parametrize(("lengths", "num_new"), BATCHES[1:3])
@pytest.mark.parametrize("dim", [32, 96, 128, 256])
def test_attention_of_half_the_width(lengths: list[int], num_new: list[int], dim: int) -> None:
    check(lengths, num_new, (4, 2, dim), DOT_DTYPES[1])


@pytest.mark.parametrize("window", [1, 32, 39, 400])
def test_window(window: int) -> None:
    for lengths, num_new in BATCHES[1:3]:
        check(lengths, num_new, (4, 2, 32), options=AttentionOptions(window=window))


@pytest.mark.parametrize(("lengths", "num_new"), BATCHES)
def test_all_options_at_once(lengths: list[int], num_new: list[int]) -> None:
    check(lengths, num_new, (6, 2, 32), options=all_options(6, DEVICE))


@pytest.mark.parametrize("window", [0, 39])
def test_pieces_of_drafts(window: int) -> None:
    """As graphs of steps with drafts have them: of one block each, sequences of no tokens between, and idle rows."""
    step = on_device(step_of([200, 96, 98, 3], [3, 2, 2, 2], 2, 32, FLOAT32))
    contexts, starts = [200, 0, 0, 96, 0, 98, 0, 3, 0, 0], [0, 3, 3, 3, 5, 5, 7, 7, 9, 9, 10]
    tables = step.batch.block_tables[torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3, 0], device=DEVICE)]
    numbers = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (contexts, starts)]
    graph = replace(
        step.batch,
        block_tables=tables,
        context_lens=numbers[0],
        query_starts=numbers[1],
        host_context_lens=[],
        host_num_new=[1] * 10,
        num_decodes=10,
        max_queries=3,
    )
    q, options = normal(10, 4, 32, dtype=FLOAT32), AttentionOptions(window=window)
    slots = torch.cat((step.slots, step.slots.new_tensor([-1])))
    expected = kivi_attention_twin(q[:9], step.pool, step.tail, step.batch, step.slots, options)
    for run in (kivi_attention_triton, kivi_attention_twin):
        out = run(q, step.pool, step.tail, graph, slots, options)
        assert not out[9].any()
        assert_near(out[:9], expected)


@pytest.mark.parametrize("tokens", [1, 5, 32, 64])
def test_tiles_are_of_one_block(tokens: int) -> None:
    tiles = chunk_tiles([70, 40, 5, 130], [1, 7, 5, 100], 1, tokens, 0)
    for s, num_new, length in ((1, 7, 40), (2, 5, 5), (3, 100, 130)):
        firsts = sorted(first for of, first in tiles if of == s)
        assert firsts[0] == 0
        for first, end in zip(firsts, [*firsts[1:], num_new], strict=True):
            places = [length - num_new + token for token in (first, end - 1)]
            assert end - first <= tokens and len({place // GROUP for place in places}) == 1
