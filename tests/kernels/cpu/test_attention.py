"""The compiled attention against the torch twins, and its bits against themselves in other company."""

from functools import cache

import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.paged_attention import paged_attention_twin
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from diptych.kernels.cpu.attention import (
    AttentionLimits,
    AttentionScratch,
    HeadNorms,
    Heads,
    Places,
    pack,
    paged_attention,
    plan_attention,
    rope_kv_write,
    unpack,
)
from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.elementwise.rms_norm import rms_norm_twin
from diptych.kernels.kv.rope_kv_write import rope_kv_write_twin

from ...support.paged import make_batch, make_cache

BATCHES = [
    ([1], [1]),
    ([7], [7]),
    ([600], [1]),
    ([300, 16, 33, 257], [1, 1, 1, 1]),
    ([33, 5, 20, 530], [1, 1, 7, 130]),
    ([260, 300], [260, 9]),
]
SHAPES = [(4, 4, 16), (6, 2, 48), (5, 1, 80), (9, 3, 64), (4, 1, 256)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


SINKS = torch.linspace(-3, 3, 6)
OPTIONS = [
    AttentionOptions(scale=0.3),
    AttentionOptions(softcap=2.0),
    AttentionOptions(window=1),
    AttentionOptions(window=37, sinks=SINKS),
    AttentionOptions(scale=0.2, softcap=1.5, window=290, sinks=SINKS),
]


def attend(team: Team, q: Tensor, packed: Tensor, batch: PagedBatch, options: AttentionOptions = NO_OPTIONS) -> Tensor:
    heads = Heads.of(q.shape[1], packed.shape[2], q.shape[2], options)
    limits = AttentionLimits(len(batch.host_num_new), q.shape[0], max(batch.host_context_lens))
    scratch = AttentionScratch.of(team, q.dtype, heads, limits)
    plan_attention(team, q.dtype, heads, batch, scratch)
    outs = [paged_attention(team, q, packed, batch, heads, scratch) for _ in range(2)]  # a plan serves every layer
    assert torch.equal(*outs)
    return outs[0]


@cache
def case(
    number: int, block_size: int, shape: tuple[int, int, int], dtype: torch.dtype, option: int = -1
) -> tuple[PagedBatch, Tensor, Tensor, Tensor]:
    """(batch, packed cache, queries: rows of a wider tensor, the twin's result)."""
    num_heads, num_kv_heads, dim = shape
    context_lens, num_new = BATCHES[number]
    batch = make_batch(context_lens, num_new, block_size, num_blocks=80)
    rows = make_cache(batch, 80, num_kv_heads, dim, dtype)
    generator = torch.Generator().manual_seed(number)
    q = torch.randn(sum(num_new), num_heads + 3, dim, generator=generator).to(dtype)[:, 1:-2] * (
        2 if option >= 0 else 1
    )
    options = OPTIONS[option] if option >= 0 else NO_OPTIONS
    return batch, pack(rows), q, paged_attention_twin(q, rows, batch, options)


@pytest.mark.parametrize("shape", SHAPES)
def test_is_its_twin(team: Team, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    for number in range(len(BATCHES)):
        for block_size in (16, 48):
            batch, packed, q, expected = case(number, block_size, shape, dtype)
            out = attend(team, q, packed, batch)
            torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_options_are_its_twins(team: Team, dtype: torch.dtype) -> None:
    for option, options in enumerate(OPTIONS):
        for number in range(len(BATCHES)):
            batch, packed, q, expected = case(number, 16, (6, 2, 32), dtype, option)
            out = attend(team, q, packed, batch, options)
            torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("options", [NO_OPTIONS, AttentionOptions(window=270, softcap=3.0, sinks=SINKS)])
def test_a_rows_bits_are_its_own(built: Library, dtype: torch.dtype, options: AttentionOptions) -> None:
    """Decodes, chunks of any size and offset, other sequences beside them, one thread or three: equal results."""
    length, dim = 530, 64
    alone, crowd = Team(built, 1), Team(built, 3)
    whole = make_batch([length], [length], 16, num_blocks=80)
    packed = pack(make_cache(whole, 80, 2, dim, dtype))
    q = torch.randn(length, 6, dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = attend(alone, q, packed, whole, options)
    table = whole.block_tables

    def batch_of(chunks: list[tuple[int, int]]) -> tuple[PagedBatch, Tensor]:
        """Chunks (end, size) of one sequence, each as a separate sequence."""
        ends, sizes = [end for end, _ in chunks], [size for _, size in chunks]
        starts = torch.tensor([0, *sizes]).cumsum(0).int()
        rows = torch.cat([torch.arange(end - size, end) for end, size in chunks])
        tables = table.expand(len(chunks), -1).contiguous()
        num_decodes = sizes.count(1)
        return PagedBatch(tables, torch.tensor(ends, dtype=torch.int32), starts, ends, sizes, num_decodes, 16), rows

    decodes = [(end, 1) for end in (1, 2, 16, 17, 255, 256, 257, 270, 271, 511, 512, 513, 530)]
    chunks = [(5, 5), (100, 37), (257, 2), (300, 120), (512, 33), (530, 18), (530, 263)]
    for team in (alone, crowd):
        for some in (decodes, chunks, decodes[::-1] + chunks, decodes[-1:], decodes[-3:-1], chunks[-1:]):
            batch, rows = batch_of(some)
            assert torch.equal(attend(team, q[rows], packed, batch, options), expected[rows])
    alone.close()
    crowd.close()


def rotated_part(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x: [T, N, D]; the first R numbers of each head rotated by cos_sin [T, R], in float32."""
    first, second, rest = x.float().split((half := cos_sin.shape[1] // 2, half, x.shape[2] - 2 * half), dim=2)
    cos, sin = cos_sin[:, None].chunk(2, dim=2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=2).to(x.dtype)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [*SHAPES, (3, 1, 32)])
@pytest.mark.parametrize("norms_of", [None, "heads", "rows"])
def test_rotates_and_stores_as_its_twin(
    team: Team, dtype: torch.dtype, num_heads: int, num_kv_heads: int, dim: int, norms_of: str | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens, block_size, width = 29, 32, (num_heads + 2 * num_kv_heads) * dim
    wide = torch.randn(num_tokens, width + 5, generator=generator).to(dtype)
    num_rotated = {None: dim, "heads": dim // 4 * 2, "rows": 0}[norms_of]
    angles = torch.rand(num_tokens, num_rotated // 2, generator=generator) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randperm(num_tokens, generator=generator)
    table = torch.full_like(cos_sin, torch.nan).index_copy_(0, positions, cos_sin)
    slots = torch.cat((torch.arange(3, 20) + 64, torch.tensor([1, 33, 120]), torch.arange(137, 146)))
    rows = torch.full((5, 2, block_size, num_kv_heads, dim), torch.nan, dtype=dtype)
    packed = torch.full((5, 3, 2, num_kv_heads, 2, 16 * dim), torch.nan, dtype=dtype)

    q, k, v = wide[:, :width].view(num_tokens, -1, dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    norms = None
    if norms_of:
        q_weight, k_weight = (
            torch.randn(dim if norms_of == "heads" else x[0].numel(), generator=generator).to(dtype) for x in (q, k)
        )
        norms = HeadNorms(q_weight.float(), k_weight.float(), 1e-6)
        q, k = (
            rms_norm_twin(x.reshape(-1, len(weight)), weight, norms.eps).view(x.shape)
            for x, weight in ((q, q_weight), (k, k_weight))
        )
    places = Places(positions, slots)
    whole = torch.cat((torch.ones(num_tokens, dim // 2), torch.zeros(num_tokens, dim // 2)), dim=1)
    expected = (
        rope_kv_write_twin(rotated_part(q, cos_sin), rotated_part(k, cos_sin), v, whole, rows, slots)
        if num_rotated < dim
        else rope_kv_write_twin(q, k, v, cos_sin, rows, slots)
    )
    qkv = wide.clone()
    rope_kv_write(team, qkv[:, :width], Heads.of(num_heads, num_kv_heads, dim), table, places, packed[:, 1], norms)

    close = TOLERANCE[dtype]
    torch.testing.assert_close(qkv[:, : num_heads * dim].view(expected.shape), expected, rtol=close, atol=close)
    beside = (num_heads + (num_kv_heads if norms else 0)) * dim
    assert torch.equal(qkv[:, beside:], wide[:, beside:]), "what is not normed or rotated is not touched"
    torch.testing.assert_close(unpack(packed[:, 1]), rows, rtol=close, atol=close, equal_nan=True)
    assert torch.equal(unpack(packed[:, 1])[:, 1].nan_to_num(9.0), rows[:, 1].nan_to_num(9.0))
    assert packed[:, [0, 2]].isnan().all()


@pytest.mark.parametrize(("block_size", "dim"), [(16, 16), (48, 80)])
def test_packing_is_where_the_words_say(dtype: torch.dtype, block_size: int, dim: int) -> None:
    rows = torch.randn(3, 2, block_size, 2, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, pair = pack(rows), 4 // dtype.itemsize
    assert torch.equal(unpack(packed), rows)
    for block, slot, head, d in [(0, 0, 0, 0), (2, 13, 1, 5), (1, block_size - 1, 1, dim - 1), (1, 7, 0, 8)]:
        group, s = divmod(slot, 16)
        key = packed[block, 0, head, group, (d // pair * 16 + s) * pair + d % pair]
        value = packed[block, 1, head, group, (s // pair * dim + d) * pair + s % pair]
        assert torch.equal(torch.stack((key, value)), rows[block, :, slot, head, d])
