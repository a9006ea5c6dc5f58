import pytest
import torch

from diptych.kernels.attention.quest import score_blocks_triton, score_blocks_twin, summarise_triton, summarise_twin
from diptych.kernels.attention.quest_choice import choose_tables_triton, choose_tables_twin
from diptych.kernels.attention.sparse_attention import SparseRows, sparse_attention_triton, sparse_attention_twin

from .common import DEVICE, DOT_DTYPES, Launch, assert_near, meta, normal

I32 = torch.int32


def launch(dtype: torch.dtype = torch.bfloat16) -> None:
    cache, summaries = meta(256, 2, 16, 8, 128, dtype=dtype), meta(256, 2, 8, 128, dtype=dtype)
    summarise_triton(cache, summaries, meta(64, dtype=torch.int64), meta(64, dtype=I32))
    tables, num_blocks = meta(64, 512, dtype=I32), meta(64, dtype=I32)
    scores = score_blocks_triton(meta(64, 32, 128, dtype=dtype), summaries, tables, num_blocks)
    choose_tables_triton(scores, tables, num_blocks, 128)


LAUNCHES = [
    Launch("bf16", launch),
    Launch("fp16", lambda: launch(torch.float16), is_gated=False),
    Launch("fp32", lambda: launch(torch.float32), spilled_bytes=96, is_gated=False),
]


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_summarise(dtype: torch.dtype) -> None:
    cache = normal(9, 3, 2, 5, 2, 20, dtype=dtype)[:, 1]
    blocks = torch.tensor([7, 2, 4, 1], device=DEVICE)
    lengths = torch.tensor([5, 1, 3, 0], dtype=I32, device=DEVICE)  # the last one is left as it is
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
    found, expected = (run(q, summaries, tables, num_blocks) for run in (score_blocks_triton, score_blocks_twin))
    for of, num in enumerate(num_blocks.tolist()):
        assert_near(found[of, :, :num], expected[of, :, :num])


@pytest.mark.parametrize("most", [3, 9, 40])
@pytest.mark.parametrize("width", [5, 37, 1100])
def test_choose_tables(width: int, most: int) -> None:
    """Of many equal scores, too, and of contexts of all lengths; of what is beyond a context there are no scores."""
    num_blocks = torch.tensor([width, 1, 0, min(4, width), width // 2], dtype=I32, device=DEVICE)
    scores = (normal(5, 2, width, dtype=torch.float32) * 4).round() / 4
    scores[0, 1] = -scores[0, 1].abs() - 1e30
    for s, num in enumerate(num_blocks.tolist()):
        scores[s, :, num:] = torch.nan
    order = torch.randperm(5 * width, generator=torch.Generator().manual_seed(2))
    tables = order.view(5, width).int().to(DEVICE)
    found, expected = (run(scores, tables, num_blocks, most) for run in (choose_tables_triton, choose_tables_twin))
    assert found.shape == expected.shape == (5, 2, min(most, width))
    for s, num in enumerate(num_blocks.tolist()):
        assert torch.equal(found[s, :, :num], expected[s, :, :num])
        assert torch.isin(found[s], tables[s]).all()


@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_sparse_attention(dtype: torch.dtype) -> None:
    """Of rows of which one is not sparse; the bounds of the newest blocks are computed on the way."""
    cache, q = normal(60, 2, 16, 2, 32, dtype=dtype), normal(3, 4, 32, dtype=dtype, seed=1)
    context_lens = torch.tensor([300, 0, 205], dtype=I32, device=DEVICE)
    tables = torch.randperm(60, generator=torch.Generator().manual_seed(2)).view(3, 20).int().to(DEVICE)
    summaries = torch.full((60, 2, 2, 32), torch.nan, dtype=dtype, device=DEVICE)
    for s, num in ((0, 17), (2, 11)):
        full = torch.full((num,), 16, dtype=I32, device=DEVICE)
        summarise_twin(cache, summaries, tables[s, :num].long(), full)
    runs = sparse_attention_triton, sparse_attention_twin
    bounds = summaries, summaries.clone()
    found, expected = (
        run(q, cache, own, SparseRows(tables, context_lens, 5, 16)) for run, own in zip(runs, bounds, strict=True)
    )
    assert_near(found, expected)
    assert not found[1].any()
    assert torch.equal(bounds[0].isnan(), bounds[1].isnan())
    assert torch.equal(bounds[0].nan_to_num(), bounds[1].nan_to_num())
