from collections.abc import Callable

import pytest
import torch

from diptych.kernels.kv.kv_scales import LARGEST, KVParts, numbers_in
from diptych.kernels.kv.rope_kv_write import rope_kv_write_triton, rope_kv_write_twin, rotate_triton, rotate_twin

from .common import DEVICE, DTYPES, FOLLOWING, Launch, assert_near, following, meta, normal, scaled_layer


def launch(stored: torch.dtype, dim: int = 128) -> None:
    q, k, v = meta(64, 48, dim).split((32, 8, 8), dim=1)
    cos_sin, cache, scales = meta(64, dim, dtype=torch.float32), meta(100, 2, 16, 8, dim, dtype=stored), None
    if stored in LARGEST:
        cache, scales = scaled_layer(100, 16, 8, dim, stored, "meta")
    rope_kv_write_triton(q, k, v, cos_sin, cache, meta(64, dtype=torch.int64), scales)


LAUNCHES = [
    Launch("d 128", lambda: launch(torch.bfloat16)),
    Launch("d 128, follows", following(lambda: launch(torch.bfloat16)), FOLLOWING, gated_targets=("sm_90",)),
    Launch("d 128, int8", lambda: launch(torch.int8)),
    Launch("d 128, int4", lambda: launch(torch.uint8)),
    Launch("d 96, int4", lambda: launch(torch.uint8, 96), is_gated=False),
    Launch("d 256, int4", lambda: launch(torch.uint8, 256), is_gated=False),
    Launch("no keys", lambda: rotate_triton(meta(64, 8, 512), meta(64, 512, dtype=torch.float32)), is_gated=False),
    Launch("d 128, float8", lambda: launch(torch.float8_e4m3fn), ("sm_90", "sm_100", "gfx942"), is_gated=False),
]

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rotated queries, pool and scales


def rope_and_write(qkv: torch.Tensor, heads: list[int], cos_sin: torch.Tensor, stored: torch.dtype) -> list[Outputs]:
    """By the twin and by Triton, into one layer of three; the third token is not stored."""
    q, k, v = qkv.split(heads, dim=1)
    num_tokens, _, dim = qkv.shape
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:num_tokens].to(DEVICE)
    slots[2:3] = -1
    found: list[Outputs] = []
    for run in (rope_kv_write_twin, rope_kv_write_triton):
        pool = torch.full((4, 3, 2, 5, heads[1], dim // numbers_in(stored)), 77.0, device=DEVICE).to(stored)
        scales = torch.full((4, 3, 2, heads[1], 5), -1.0, device=DEVICE).transpose(3, 4)
        out = run(q, k, v, cos_sin, pool[:, 1], slots, scales[:, 1] if stored in LARGEST else None)
        assert (pool[:, 0] == pool[:, 2]).all() and (scales[:, 0] == scales[:, 2]).all()
        found.append((out, pool, scales))
        if stored in LARGEST:
            check_in_pool(found[-1], lambda of, run=run: run(q, k, v, cos_sin, of.numbers, slots, of.scales))
    return found


def check_in_pool(due: Outputs, run: Callable[[KVParts], torch.Tensor]) -> None:
    """Store the same in a pool as GPUs have it, of bfloat16 scales; due: with scales of float32."""
    out, pool, scales = due
    num_blocks, _, _, block_size, num_heads, width = pool.shape
    layer = scaled_layer(num_blocks, block_size, num_heads, width * numbers_in(pool.dtype), pool.dtype, DEVICE)
    assert layer.scales is not None
    before = layer.scales.clone()
    assert torch.equal(run(layer), out)
    written = scales[:, 1] >= 0
    assert torch.equal(layer.numbers.float()[written], pool[:, 1].float()[written])
    assert torch.equal(layer.scales[written].float(), scales[:, 1][written])
    assert torch.equal(layer.scales[~written], before[~written])


@pytest.mark.parametrize("stored", [None, torch.int8, torch.uint8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "dim"), [(1, 4, 4, 8), (15, 12, 4, 20), (3, 4, 2, 80)]
)
def test_rope_kv_write(
    num_tokens: int, num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    qkv[0, -1] = 0.0
    cos_sin = normal(num_tokens, dim, dtype=torch.float32, seed=1)
    expected, found = rope_and_write(qkv, [num_heads, num_kv_heads, num_kv_heads], cos_sin, stored or dtype)
    assert_near(found[0], expected[0])
    if stored is None:
        assert_near(found[1], expected[1])
    else:
        one, other = (codes(of[1]) for of in (found, expected))  # bfloat16 may have been rounded otherwise
        assert (one - other).abs().max() <= (0 if dtype == torch.float32 else 2)
        torch.testing.assert_close(found[2], expected[2], rtol=0.0 if dtype == torch.float32 else 2e-2, atol=0.0)


def codes(pool: torch.Tensor) -> torch.Tensor:
    """Whole numbers as they are stored."""
    return torch.stack((pool & 15, pool >> 4)).int() if pool.dtype == torch.uint8 else pool.int()


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_every_bit_of_4_bit_heads(dim: int) -> None:
    qkv = normal(5, 6, dim, dtype=torch.float32)
    cos_sin = normal(5, dim, dtype=torch.float32, seed=1)
    expected, found = rope_and_write(qkv, [2, 2, 2], cos_sin, torch.uint8)
    assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_alone(dtype: torch.dtype) -> None:
    x, cos_sin = normal(15, 5, 20, dtype=dtype)[:, 1:4], normal(15, 23, dtype=torch.float32, seed=1)[:, 3:]
    assert_near(rotate_triton(x, cos_sin), rotate_twin(x, cos_sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_kv_write_in_float8(dtype: torch.dtype) -> None:
    """Of numbers that float8 holds as they are: the interpreter rounds wrongly to it."""
    qkv = normal(7, 8, 12, dtype=torch.float32).to(torch.float8_e4m3fn).to(dtype)
    qkv[:, :, 3] = 56.0  # LARGEST / 8
    cos_sin = torch.tensor([1.0] * 6 + [0.0] * 6, device=DEVICE).repeat(7, 1)
    expected, found = rope_and_write(qkv, [4, 2, 2], cos_sin, torch.float8_e4m3fn)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.float(), other.float())
