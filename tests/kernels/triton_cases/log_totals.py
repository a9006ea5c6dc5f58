import pytest
import torch

from diptych.kernels.sampling.log_totals import log_totals_triton, log_totals_twin

from .common import DTYPES, Launch, assert_near, meta, normal

LAUNCHES = [Launch("128k, top 20", lambda: log_totals_triton(meta(8, 131072, dtype=torch.float32), 20))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size", "num_top"), [(1, 1, 1), (3, 33, 0), (5, 70, 20), (2, 9001, 7)])
def test_log_totals(num_rows: int, vocab_size: int, num_top: int, dtype: torch.dtype) -> None:
    logits = normal(num_rows, vocab_size + 5, dtype=dtype)[:, 2:-3] * 5
    logits[0, 1:9:2] = -torch.inf
    logits[-1] = logits[-1].round()  # many are equal
    expected, found = log_totals_twin(logits, num_top), log_totals_triton(logits, num_top)
    assert_near(found[0], expected[0])
    assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])


def test_a_row_depends_on_itself_alone() -> None:
    """However many programs share it: with many rows a row has one."""
    logits = normal(17, 9001, dtype=torch.float32) * 5
    together = log_totals_triton(logits, 3)[0]
    assert torch.equal(torch.cat([log_totals_triton(row[None], 3)[0] for row in logits]), together)
