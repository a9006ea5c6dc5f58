import pytest
import torch

from diptych.kernels.sampling.logsumexp import logsumexp_top_k_triton, logsumexp_top_k_twin

from .common import DTYPES, Launch, assert_near, meta, normal

LAUNCHES = [Launch("128k, top 20", lambda: logsumexp_top_k_triton(meta(8, 131072, dtype=torch.float32), 20))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size", "num_top"), [(1, 1, 1), (3, 33, 0), (5, 70, 20), (2, 9001, 7)])
def test_logsumexp_top_k(num_rows: int, vocab_size: int, num_top: int, dtype: torch.dtype) -> None:
    logits = normal(num_rows, vocab_size + 5, dtype=dtype)[:, 2:-3] * 5
    logits[0, 1:9:2] = -torch.inf
    logits[-1] = logits[-1].round()  # many are equal
    expected, found = logsumexp_top_k_twin(logits, num_top), logsumexp_top_k_triton(logits, num_top)
    assert_near(found[0], expected[0])
    assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])


def test_a_row_depends_on_itself_alone() -> None:
    """However many programs share it: with many rows a row has one."""
    logits = normal(17, 9001, dtype=torch.float32) * 5
    together = logsumexp_top_k_triton(logits, 3)[0]
    assert torch.equal(torch.cat([logsumexp_top_k_triton(row[None], 3)[0] for row in logits]), together)
