"""Triton kernels against their twins: odd sizes, strided inputs, outputs that were NaN before.

test_triton.py runs this file in a process of its own, interpreted (TRITON_INTERPRET=1) or on a GPU: a process decides
once, when it imports the kernels, how they run.
"""

import os

import pytest
import torch
import triton  # noqa: F401 (imported before the kernels: see kernels/lang.py)

from diptych.kernels.paged_attention import PagedBatch, paged_attention_triton, paged_attention_twin
from diptych.kernels.rms_norm import add_rms_norm_triton, add_rms_norm_twin, rms_norm_triton, rms_norm_twin
from diptych.kernels.rope_kv_write import rope_kv_write_triton, rope_kv_write_twin
from diptych.kernels.silu_mul import silu_mul_triton, silu_mul_twin

from .paged import make_batch, make_cache

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.bfloat16]
# The interpreter multiplies matrices of bfloat16 by their bits, as if they were whole numbers.
DOT_DTYPES = [torch.float32, torch.float16 if DEVICE == "cpu" else torch.bfloat16]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few roundings; NaN, which stands for an element that was not written, is never near."""
    tolerance = 1e-5 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wrapper allocates is NaN until the kernel has written it."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        return empty(*args, **kwargs).fill_(torch.nan)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 33), (5, 3, 20), (2, 1, 7)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., 2:-3]
    weight = normal(shape[-1], dtype=dtype, seed=1)
    assert_near(rms_norm_triton(x, weight, 1e-5), rms_norm_twin(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 33)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = normal(shape[0], shape[1] + 3, dtype=dtype)[:, 3:], normal(shape[1], dtype=dtype, seed=1)
    residuals = [normal(*shape, dtype=dtype, seed=2) for _ in range(2)]
    expected = add_rms_norm_twin(x, residuals[0], weight, 1e-5)
    assert_near(add_rms_norm_triton(x, residuals[1], weight, 1e-5), expected)
    assert_near(residuals[1], residuals[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 33), (2, 1500)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = normal(shape[0], 2 * shape[1] + 7, dtype=dtype)[:, 4:-3]
    assert_near(silu_mul_triton(gate_up), silu_mul_twin(gate_up))


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


BATCHES: list[tuple[list[int], list[int]]] = [
    ([1], [1]),
    ([9, 1, 71], [1, 1, 1]),
    ([33, 5, 20, 13], [1, 1, 7, 13]),
    ([70, 90], [70, 25]),
]


def on_cpu(batch: PagedBatch, block_size: int) -> PagedBatch:
    return make_batch(batch.host_context_lens, batch.host_num_new, block_size, 200)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("context_lens", "num_new"), BATCHES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim", "block_size"), [(4, 4, 16, 8), (6, 2, 20, 5)])
def test_paged_attention(
    context_lens: list[int],
    num_new: list[int],
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    batch = make_batch(context_lens, num_new, block_size, 200, DEVICE)
    cache = make_cache(batch, 200, num_kv_heads, dim, dtype)
    q = normal(sum(num_new), num_heads + 3, dim, dtype=dtype)[:, 1 : num_heads + 1]
    expected = paged_attention_twin(q.cpu(), cache.cpu(), on_cpu(batch, block_size))
    assert_near(paged_attention_triton(q, cache, batch).cpu(), expected)
