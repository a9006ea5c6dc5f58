from dataclasses import replace

import pytest
import torch

from diptych.kernels.attention.paged_batch import PagedBatch
from diptych.kernels.mla import latent_attention
from diptych.kernels.mla.latent_attention import latent_attention_triton, latent_attention_twin

from ...support.paged import make_batch, make_cache
from .common import DEVICE, DOT_DTYPES, Launch, assert_near, meta, normal

I32 = torch.int32


def launch(heads: int) -> None:
    num_new, contexts = [100, 40], [5000, 4000]
    tables, lens, starts = meta(2, 512, dtype=I32), meta(2, dtype=I32), meta(3, dtype=I32)
    batch = PagedBatch(tables, lens, starts, contexts, num_new, num_decodes=0, block_size=16)
    q, cache = meta(140, heads, 576), meta(256, 16, 576)
    latent_attention_triton(q[..., :512], q[..., 512:], cache, batch, range(2), 0.1)


LAUNCHES = [Launch("bf16, 128 heads, pieces", lambda: launch(128), spilled_bytes=148, is_gated=False)]


def test_a_captured_batch_with_drafts() -> None:
    """Of which the host knows no context: as many sequences as rows, some of no tokens, one idle."""
    of = make_batch([40, 0, 0, 9, 0], [3, 0, 0, 1, 1], 5, 100, DEVICE)
    cache = make_cache(of, 100, 1, 48, torch.float32)[:, 0, :, 0]
    captured = replace(of, host_context_lens=[], host_num_new=[1] * 5, num_decodes=5, max_queries=3)
    q = normal(5, 3, 48, dtype=torch.float32)
    found, expected = (
        run(q[..., :32], q[..., 32:], cache, captured, range(5), 0.2)
        for run in (latent_attention_triton, latent_attention_twin)
    )
    assert not found[4].any()
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("most_pieces", [2, 32])
def test_latent_attention(most_pieces: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, and sequences that are cut into pieces."""
    monkeypatch.setattr(latent_attention, "MOST_PIECES", most_pieces)
    num_new = [1, 1, 5, 40, 16]
    batch = make_batch([9, 70, 33, 90, 16], num_new, 5, 100, DEVICE)
    cache = make_cache(batch, 100, 1, 48, dtype)[:, 0, :, 0]
    q = normal(sum(num_new), 3, 48, dtype=dtype)
    for sequences, rows in ((range(2), slice(0, 2)), (range(2, 5), slice(2, 63)), (range(3, 4), slice(7, 47))):
        queries = q[rows, :, :32], q[rows, :, 32:]
        found, expected = (
            run(*queries, cache, batch, sequences, 0.2) for run in (latent_attention_triton, latent_attention_twin)
        )
        assert_near(found, expected)
