"""The compiled attention over a cache of 8-bit or 4-bit numbers, against the torch twins, numpy and its own bits."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from diptych.kernels.attention.paged_attention import paged_attention_twin
from diptych.kernels.attention.paged_batch import NO_OPTIONS, AttentionOptions, PagedBatch
from diptych.kernels.cpu.attention import Heads, Places, pack, rope_kv_write, unpack
from diptych.kernels.cpu.library import Library, Team
from diptych.kernels.kv.kv_scales import (
    LARGEST,
    SCALE_BYTES,
    TINY,
    dequantise,
    hadamard,
    numbers_in,
    parts_of,
    quantise,
)
from diptych.workers.kv.scaled import dequantised, quantised

from ...support.paged import make_batch, make_cache
from .test_attention import BATCHES, OPTIONS, SHAPES, TOLERANCE, attend

NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}
ROUNDING = {torch.int8: 1 / 127, torch.float8_e4m3fn: 2**-4}  # of the largest number of a vector
POISON = 0x7F  # as a scale's bytes no number, nor as fp8; in int8 the largest


@pytest.fixture(params=NAMES, ids=list(NAMES.values()))
def stored(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, POISON, dtype=torch.uint8).view(dtype)


def vector_size(dim: int, dtype: torch.dtype) -> int:
    """Number of elements of a vector with its scale."""
    return SCALE_BYTES + dim // numbers_in(dtype)


def scaled(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache with NaN where no token is -> one of few bits, poisoned there: [num_blocks, 2, slots, K, 2 + D]."""
    made = poisoned((*cache.shape[:-1], vector_size(cache.shape[-1], dtype)), dtype)
    is_token = ~cache.isnan().any(-1)
    numbers, scales = quantise(cache[is_token], dtype)
    rows = torch.cat((scales[:, None].bfloat16().view(torch.uint8), numbers.view(torch.uint8)), dim=1)
    made.view(torch.uint8)[is_token] = rows
    return made


@cache
def case(
    number: int, shape: tuple[int, int, int], dtype: torch.dtype, stored: torch.dtype, options: AttentionOptions
) -> tuple[PagedBatch, Tensor, Tensor, Tensor]:
    """(batch, packed cache, queries, the twin's result of the same stored numbers)."""
    num_heads, num_kv_heads, dim = shape
    batch = make_batch(*BATCHES[number], 48 if number % 2 else 16, num_blocks=80)
    rows = scaled(make_cache(batch, 80, num_kv_heads, dim, dtype), stored)
    q = torch.randn(sum(BATCHES[number][1]), num_heads, dim, generator=torch.Generator().manual_seed(number)).to(dtype)
    numbers, scales = parts_of(rows)
    assert scales is not None
    return batch, pack(rows), q, paged_attention_twin(q, numbers, batch, options, scales)


@pytest.mark.parametrize("shape", [*SHAPES, (4, 2, 96)])
def test_is_its_twin(team: Team, dtype: torch.dtype, stored: torch.dtype, shape: tuple[int, int, int]) -> None:
    if shape[2] // numbers_in(stored) % 16:
        pytest.skip("torch computes such heads")
    for number in range(len(BATCHES)):
        batch, packed, q, expected = case(number, shape, dtype, stored, NO_OPTIONS)
        out = attend(team, q, packed, batch)
        torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_options_are_its_twins(team: Team, dtype: torch.dtype, stored: torch.dtype) -> None:
    for options in OPTIONS:
        for number in range(len(BATCHES)):
            batch, packed, q, expected = case(number, (6, 2, 32), dtype, stored, options)
            out = attend(team, q, packed, batch, options)
            torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("options", [NO_OPTIONS, AttentionOptions(window=270, softcap=3.0)])
def test_a_rows_bits_are_its_own(
    built: Library, dtype: torch.dtype, stored: torch.dtype, options: AttentionOptions
) -> None:
    """A chunk, decodes and other sequences beside them, one thread or three: equal results."""
    length, dim = 530, 64
    whole = make_batch([length], [length], 16, num_blocks=80)
    packed = pack(scaled(make_cache(whole, 80, 2, dim, dtype), stored))
    q = torch.randn(length, 6, dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    teams = Team(built, 1), Team(built, 3)
    expected = attend(teams[0], q, packed, whole, options)
    for team in teams:
        for chunks in ([(1, 1), (257, 1), (512, 1), (530, 1)], [(100, 37), (257, 2), (530, 263)], [(530, 18)]):
            ends, sizes = [end for end, _ in chunks], [size for _, size in chunks]
            starts = torch.tensor([0, *sizes]).cumsum(0).int()
            rows = torch.cat([torch.arange(end - size, end) for end, size in chunks])
            tables, lens = whole.block_tables.expand(len(chunks), -1).contiguous(), torch.tensor(ends).int()
            batch = PagedBatch(tables, lens, starts, ends, sizes, sizes.count(1), 16)
            assert torch.equal(attend(team, q[rows], packed, batch, options), expected[rows])
        team.close()


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [*SHAPES, (3, 1, 32), (3, 1, 96)])
def test_vectors_are_stored_as_the_twin_and_numpy_store_them(
    team: Team, dtype: torch.dtype, stored: torch.dtype, num_heads: int, num_kv_heads: int, dim: int
) -> None:
    """Keys that are not rotated, and values: bit for bit. No other slot is touched."""
    if dim // numbers_in(stored) % 16:
        pytest.skip("torch keeps such heads")
    generator = torch.Generator().manual_seed(0)
    num_tokens, block_size, num_all = 29, 32, num_heads + 2 * num_kv_heads
    qkv = torch.randn(num_tokens, num_all, dim, generator=generator)
    qkv = (qkv * 10.0 ** torch.randint(-3, 4, (num_tokens, num_all, 1), generator=generator)).to(dtype)
    qkv[3, -1], qkv[4, -1] = 0.0, TINY / 4
    places = Places(torch.zeros(num_tokens, dtype=torch.int64), torch.randperm(100, generator=generator)[:num_tokens])
    size = vector_size(dim, stored)
    packed = poisoned((5, 3, 2, num_kv_heads, 2, 16 * size), stored)
    heads, no_rope = Heads.of(num_heads, num_kv_heads, dim), torch.empty(1, 0)
    rope_kv_write(team, qkv.flatten(1), heads, no_rope, places, packed[:, 1])

    rows = unpack(packed[:, 1]).view(torch.uint8)
    for which, vectors in enumerate(qkv[:, num_heads:].split(num_kv_heads, dim=1)):
        numbers, scales = quantise(vectors, stored)
        due = torch.cat((scales[..., None].bfloat16().view(torch.uint8), numbers.view(torch.uint8)), dim=2)
        by_numpy = quantised(vectors.float().reshape(-1, dim).numpy(), NAMES[stored])
        assert np.array_equal(due.view(-1, size).numpy(), by_numpy)
        wide = dequantised(by_numpy, NAMES[stored])
        assert np.array_equal(dequantise(numbers, scales).view(-1, dim).numpy(), wide)
        found = rows[places.slots // block_size, which, places.slots % block_size]
        assert torch.equal(found, due)
        rows[places.slots // block_size, which, places.slots % block_size] = POISON
    assert bool((rows == POISON).all()) and bool((packed[:, [0, 2]].view(torch.uint8) == POISON).all())


def test_rotated_keys_are_within_a_step_of_the_twins(team: Team, dtype: torch.dtype, stored: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    num_tokens, dim = 20, 64
    qkv = torch.randn(num_tokens, 3, dim, generator=generator).to(dtype)
    angles = torch.rand(num_tokens, dim // 2, generator=generator) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    cos, sin = angles.cos(), angles.sin()
    first, second = qkv[:, 1].float().chunk(2, dim=1)
    key = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1).to(dtype).float()
    packed = poisoned((2, 2, 1, 1, 16 * vector_size(dim, stored)), stored)
    at = torch.arange(num_tokens)
    rope_kv_write(team, qkv.flatten(1).clone(), Heads.of(1, 1, dim), cos_sin, Places(at, at), packed)
    numbers, scales = parts_of(unpack(packed))
    assert scales is not None
    found = dequantise(numbers, scales)[:, 0].flatten(0, 1)[:num_tokens, 0]
    if stored == torch.uint8:  # of its transform each number is off by a step of 2 / 15 of the largest, at most
        found, key = hadamard(found), hadamard(key)
    step = key.abs().amax(1, keepdim=True) * ROUNDING.get(stored, 2 / 15)
    assert bool(((found - key).abs() <= step * 0.55 + key.abs() * 2**-8).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_makes_none_of_its_vector(team: Team, stored: torch.dtype, bad: float) -> None:
    """It shows in answers: nothing makes a number of it."""
    qkv = torch.ones(1, 3, 32)
    qkv[0, 1:, 7] = bad
    packed = poisoned((1, 2, 1, 1, 16 * vector_size(32, stored)), stored)
    at = torch.zeros(1, dtype=torch.int64)
    rope_kv_write(team, qkv.flatten(1), Heads.of(1, 1, 32), torch.empty(1, 0), Places(at, at), packed)
    _, scales = parts_of(unpack(packed))
    assert scales is not None and bool(scales[0, :, 0].isnan().all())


def test_packing_is_where_the_words_say(stored: torch.dtype) -> None:
    dim = 48  # elements of a vector
    rows = torch.randint(0, 256, (3, 2, 32, 2, SCALE_BYTES + dim), dtype=torch.uint8).view(stored)
    packed = pack(rows)
    assert torch.equal(unpack(packed).view(torch.uint8), rows.view(torch.uint8))
    bits, of_rows = packed.view(torch.uint8), rows.view(torch.uint8)
    for block, slot, head, d in [(0, 0, 0, 0), (2, 13, 1, 5), (1, 31, 1, dim - 1), (1, 7, 0, 8)]:
        group, s = divmod(slot, 16)
        assert bits[block, 0, head, group, d * 16 + s] == of_rows[block, 0, slot, head, SCALE_BYTES + d]
        assert bits[block, 1, head, group, s * dim + d] == of_rows[block, 1, slot, head, SCALE_BYTES + d]
        scale = slice(16 * dim + s * SCALE_BYTES, 16 * dim + (s + 1) * SCALE_BYTES)
        for which in (0, 1):
            assert torch.equal(bits[block, which, head, group, scale], of_rows[block, which, slot, head, :SCALE_BYTES])


def test_all_stored_dtypes_are_tried() -> None:
    assert set(NAMES) == set(LARGEST) - {torch.float8_e5m2}
