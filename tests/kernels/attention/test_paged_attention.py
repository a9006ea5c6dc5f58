"""The twin against attention written out plainly. (Triton against the twin: test_triton.py.)"""

import pytest
import torch

from diptych.kernels.attention.paged_attention import paged_attention

from ...support.paged import make_batch, make_cache, plain_attention


@pytest.mark.parametrize(
    ("context_lens", "num_new"),
    [
        ([1], [1]),
        ([7], [7]),
        ([9, 1, 33], [1, 1, 1]),
        ([16, 8, 24], [1, 1, 1]),
        ([33, 5, 20, 13], [1, 1, 7, 13]),
        ([20, 40], [20, 9]),
    ],
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 4, 8), (6, 2, 20), (5, 1, 16)])
@pytest.mark.parametrize("block_size", [1, 5, 8])
def test_twin_equals_plain_attention(
    context_lens: list[int], num_new: list[int], num_heads: int, num_kv_heads: int, dim: int, block_size: int
) -> None:
    batch = make_batch(context_lens, num_new, block_size, num_blocks=200)
    cache = make_cache(batch, 200, num_kv_heads, dim, torch.float32)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(sum(num_new), num_heads + 3, dim, generator=generator)[:, 1 : num_heads + 1]
    out = paged_attention(q, cache, batch)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), plain_attention(q, cache, batch), rtol=1e-5, atol=1e-5)
