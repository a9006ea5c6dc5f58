"""Blocks of 4-bit KV against the numbers that they were made of, and bytes against the words that place them."""

import pytest
import torch
from torch import Tensor

from diptych.kernels.kv.kivi import GROUP, SMALLEST, block_bytes, round_blocks, round_groups, widen_blocks


def blocks_of(num: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[num, 2, 32, K, D], with channels and tokens of unlike sizes, and means that are not zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 2, GROUP, num_kv_heads, dim, generator=generator)
    sizes = 10.0 ** torch.randint(-3, 4, (num, 1, 1, num_kv_heads, dim), generator=generator)
    return (x * sizes * torch.rand(num, 1, GROUP, 1, 1, generator=generator) + sizes / 3).to(dtype)


def pool_of(num: int, num_kv_heads: int, dim: int) -> Tensor:
    """A layer of a pool of three, whose bytes are all 255."""
    return torch.full((num, 3, 2, num_kv_heads, block_bytes(dim)), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "dim"), [(1, 32), (3, 64), (2, 96), (1, 128)])
def test_numbers_come_back_within_half_a_step(num_kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """No other block, layer or block of the tail is touched."""
    tail, pool = blocks_of(5, num_kv_heads, dim, dtype), pool_of(7, num_kv_heads, dim)
    tail[1] = torch.nan
    before = tail.clone()
    pairs = torch.tensor([[3, 2], [0, 6], [4, 5]])
    round_blocks(tail, pool[:, 1], pairs)
    assert torch.equal(tail.view(torch.uint8), before.view(torch.uint8))
    keys, values = widen_blocks(pool[:, 1], pairs[:, 1])
    assert keys.shape == values.shape == (3 * GROUP, num_kv_heads, dim)
    own = tail[pairs[:, 0]].float()
    by_channel = own[:, 0]  # [3, 32, K, D]
    by_token = own[:, 1].unflatten(3, (-1, GROUP))
    for found, due, axis in ((keys, by_channel, 1), (values, by_token, 4)):
        due_extent = (due.amax(axis, keepdim=True) - due.amin(axis, keepdim=True)).expand(due.shape)
        # The least number is up to a bfloat16's step below, and so the scale a 15th of it larger.
        largest = due.abs().amax(axis, keepdim=True)
        step = (due_extent + largest * 2**-7) / 15 * (1 + 2**-7)
        assert bool(((found.view(due.shape) - due).abs() <= step / 2 + largest * 2**-22).all())
    pool[pairs[:, 1], 1] = 0xFF
    assert bool((pool == 0xFF).all())


@pytest.mark.parametrize("dim", [32, 96])
def test_bytes_are_where_the_words_say(dim: int) -> None:
    tail, pool = blocks_of(2, 2, dim, torch.float32), pool_of(3, 2, dim)[:, 0]
    round_blocks(tail, pool, torch.tensor([[1, 2]]))

    def number(code: int, is_high: bool, scale: Tensor, least: Tensor) -> Tensor:
        wide, lowest = (bits.view(torch.bfloat16).float()[0] for bits in (scale, least))
        return (code >> 4 if is_high else code & 15) * wide + lowest

    keys, values = (x.view(GROUP, 2, dim) for x in widen_blocks(pool, torch.tensor([2])))
    for slot, head, d in [(0, 0, 0), (13, 1, 5), (31, 1, dim - 1), (16, 0, 30), (7, 0, 17)]:
        own = pool[2, 0, head]
        code = int(own[slot // 16 * dim * 8 + d // 2 * 16 + slot % 16])
        scale, least = (own[start + 2 * d : start + 2 * d + 2] for start in (16 * dim, 18 * dim))
        assert torch.equal(number(code, d % 2 == 1, scale, least), keys[slot, head, d])
        own = pool[2, 1, head]
        code, place = int(own[slot * dim // 2 + d // 32 * 16 + d % 16]), 2 * (d // 32 * 32 + slot)
        scale, least = (own[start + place : start + place + 2] for start in (16 * dim, 18 * dim))
        assert torch.equal(number(code, d % 32 >= 16, scale, least), values[slot, head, d])


def test_groups_are_rounded_as_the_format_says() -> None:
    """The least number down to a bfloat16, the scale up to one; both as near as they can be."""
    x = torch.randn(1000, GROUP, generator=torch.Generator().manual_seed(1)) + torch.linspace(-3, 3, 1000)[:, None]
    codes, scales, leasts = round_groups(x)
    assert codes.dtype == torch.uint8 and int(codes.amax()) == 15 and bool((codes.amin(1) == 0).any())
    exact = x.amin(1)
    assert bool((leasts.float() <= exact).all()) and bool((exact - leasts.float() <= exact.abs() * 2**-7).all())
    due = (x.double().amax(1) - leasts.double()) / 15
    assert bool((scales.double() >= due * (1 - 2**-23)).all()) and bool((scales.double() <= due * (1 + 2**-7)).all())
    found = codes * scales.float()[:, None] + leasts.float()[:, None]
    assert bool(((found - x).abs() <= scales.float()[:, None] * 0.50001 + x.abs() * 2**-22).all())


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -2.0, SMALLEST / 4])
def test_equal_numbers_have_no_scale(value: float) -> None:
    x = torch.full((GROUP,), value)
    x[3] = 0.0 if value == 0.0 else value
    codes, scale, least = round_groups(x)
    assert not codes.any() and float(scale) == 0.0 and float(least) <= value
    assert float(least) == torch.tensor(value).bfloat16() or abs(value) < SMALLEST
    assert not (value == 0.0 and torch.signbit(least))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.4e38])
def test_what_is_no_number_makes_none_of_its_group(bad: float) -> None:
    """It shows in answers: nothing makes a number of it. Other groups are as they are without it."""
    tail, pool = blocks_of(1, 2, 64, torch.float32), pool_of(2, 2, 64)[:, 0]
    pair = torch.tensor([[0, 1]])
    round_blocks(tail, pool, pair)
    clean = [x.clone() for x in widen_blocks(pool, pair[:, 1])]
    tail[0, :, 5, 1, 40] = bad
    tail[0, :, 6, 1, 40] = tail[0, :, 5, 1, 41] = -3e38 if bad == 3.4e38 else 1.0
    round_blocks(tail, pool, pair)
    keys, values = widen_blocks(pool, pair[:, 1])
    assert bool(keys[:, 1, 40].isnan().all()) and bool(values[5, 1, 32:].isnan().all())
    clean[0][:, 1, 40:42] = keys[:, 1, 40:42] = 0.0
    clean[1][5:7, 1, 32:] = values[5:7, 1, 32:] = 0.0
    assert torch.equal(keys, clean[0]) and torch.equal(values, clean[1])


def test_no_blocks_are_none() -> None:
    pool = pool_of(2, 1, 32)[:, 0]
    round_blocks(blocks_of(1, 1, 32, torch.bfloat16), pool, torch.zeros(0, 2, dtype=torch.int64))
    assert bool((pool == 0xFF).all())
    assert widen_blocks(pool, torch.zeros(0, dtype=torch.int64))[0].shape == (0, 1, 32)
