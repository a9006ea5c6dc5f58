import pytest
import torch

from diptych.kernels.mla.latent_kv_write import latent_kv_write_triton, latent_kv_write_twin

from .common import DEVICE, DTYPES, Launch, assert_near, meta, normal


def launch() -> None:
    mixed = meta(64, 1536 + 576)
    latent, key = mixed[:, 1536:].split((512, 64), dim=1)
    cos_sin, cache = meta(64, 64, dtype=torch.float32), meta(100, 61, 64, 576)[:, 3]
    latent_kv_write_triton(
        meta(64, 128, 192), latent, key, meta(512), 1e-6, cos_sin, cache, meta(64, dtype=torch.int64)
    )


LAUNCHES = [Launch("rank 512", launch)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "rank", "nope", "rope"), [(1, 3, 24, 8, 4), (15, 70, 40, 0, 20), (7, 2, 16, 5, 64)]
)
def test_latent_kv_write(num_tokens: int, num_heads: int, rank: int, nope: int, rope: int, dtype: torch.dtype) -> None:
    """Into one layer of two; the first token but one is not stored."""
    width = num_heads * (nope + rope)
    mixed = normal(num_tokens, width + rank + rope, dtype=dtype)
    cos_sin, norm = normal(num_tokens, rope, dtype=torch.float32, seed=1), normal(rank, dtype=dtype, seed=2)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:num_tokens].to(DEVICE)
    slots[1:2] = -1
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for run in (latent_kv_write_twin, latent_kv_write_triton):
        q, latent, key = mixed.clone().split((width, rank, rope), dim=1)
        pool = torch.full((4, 2, 5, rank + rope), 77.0, device=DEVICE, dtype=dtype)
        q = q.view(num_tokens, num_heads, nope + rope)
        run(q, latent, key, norm, 1e-5, cos_sin, pool[:, 1], slots)
        assert (pool[:, 0] == 77.0).all()
        found.append((q, pool))
    for one, other in zip(*found, strict=True):
        assert_near(other, one)
