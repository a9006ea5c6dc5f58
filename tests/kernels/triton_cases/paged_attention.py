import pytest
import torch

from diptych.kernels.paged_attention import PagedBatch, paged_attention_triton, paged_attention_twin

from ..paged import make_batch, make_cache
from .common import DEVICE, DOT_DTYPES, Launch, assert_near, meta, normal


def launch(num_new: int) -> None:
    batch = make_batch([300], [num_new], 16, 32, "meta")
    paged_attention_triton(meta(num_new, 32, 128), meta(32, 2, 16, 8, 128), batch)


LAUNCHES = [
    Launch("chunk", lambda: launch(256), spilled_bytes=64),
    Launch("decode", lambda: launch(1), is_gated=False),
]

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
