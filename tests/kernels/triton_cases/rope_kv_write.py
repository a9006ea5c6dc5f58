import pytest
import torch

from diptych.kernels.rope_kv_write import rope_kv_write_triton, rope_kv_write_twin

from .common import DEVICE, DTYPES, Launch, assert_near, meta, normal


def launch() -> None:
    q, k, v = meta(64, 48, 128).split((32, 8, 8), dim=1)
    cos_sin, cache = meta(64, 128, dtype=torch.float32), meta(100, 2, 16, 8, 128)
    rope_kv_write_triton(q, k, v, cos_sin, cache, meta(64, dtype=torch.int64))


LAUNCHES = [Launch("d 128", launch)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "num_kv_heads", "dim"), [(1, 4, 4, 8), (5, 6, 2, 20)])
def test_rope_kv_write(num_tokens: int, num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos_sin = normal(num_tokens, dim, dtype=torch.float32, seed=1)
    caches = [torch.full((4, 3, 2, 5, num_kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:num_tokens].to(DEVICE)
    expected = rope_kv_write_twin(q, k, v, cos_sin, caches[0][:, 1], slots)
    assert_near(rope_kv_write_triton(q, k, v, cos_sin, caches[1][:, 1], slots), expected)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert_near(caches[1].nan_to_num(), caches[0].nan_to_num())
