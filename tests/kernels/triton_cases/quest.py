import pytest
import torch

from diptych.kernels.attention.quest import score_blocks_triton, score_blocks_twin, summarise_triton, summarise_twin

from .common import DEVICE, DOT_DTYPES, Launch, assert_near, meta, normal

I32 = torch.int32


def launch(dtype: torch.dtype = torch.bfloat16) -> None:
    cache, summaries = meta(256, 2, 16, 8, 128, dtype=dtype), meta(256, 2, 8, 128, dtype=dtype)
    summarise_triton(cache, summaries, meta(64, dtype=torch.int64), meta(64, dtype=I32))
    score_blocks_triton(meta(64, 32, 128, dtype=dtype), summaries, meta(64, 500, dtype=I32), meta(64, dtype=I32))


LAUNCHES = [
    Launch("bf16", launch),
    Launch("fp16", lambda: launch(torch.float16), is_gated=False),
    Launch("fp32", lambda: launch(torch.float32), spilled_bytes=80, is_gated=False),
]


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_summarise(dtype: torch.dtype) -> None:
    cache = normal(9, 3, 2, 5, 2, 20, dtype=dtype)[:, 1]
    blocks, lengths = torch.tensor([7, 2, 4], device=DEVICE), torch.tensor([5, 1, 3], dtype=I32, device=DEVICE)
    cache[4, :, 3:] = torch.nan
    found, expected = (torch.full((9, 2, 2, 20), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    summarise_triton(cache, found, blocks, lengths)
    summarise_twin(cache, expected, blocks, lengths)
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 20)])
def test_score_blocks(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, dim = heads
    summaries = normal(80, 2, num_kv_heads + 1, dim, dtype=dtype, seed=1)[:, :, 1:]
    summaries = torch.stack((summaries.amin(1), summaries.amax(1)), dim=1)
    num_blocks = torch.tensor([37, 1], dtype=I32, device=DEVICE)
    tables = torch.randperm(80, generator=torch.Generator().manual_seed(2))[:74].view(2, 37).int().to(DEVICE)
    q = normal(2, num_heads + 1, dim, dtype=dtype)[:, 1:]
    assert_near(*(run(q, summaries, tables, num_blocks) for run in (score_blocks_triton, score_blocks_twin)))
