import pytest
import torch

from diptych.kernels.attention.libraries.merge_results import merge_results_triton, merge_results_twin

from .common import DTYPES, Launch, assert_near, meta, normal

FLOAT = torch.float32


def launch(dim: int, first: torch.dtype, out: torch.dtype) -> object:
    logs = meta(32, 2048, dtype=FLOAT), meta(32, 2560, dtype=FLOAT)[:, :2048]
    whole = meta(2048, 32, dim, dtype=first), meta(2560, 32, dim)[:2048]
    return merge_results_triton(whole[0], logs[0], whole[1], logs[1], out)


LAUNCHES = [
    Launch("d 128, the first", lambda: launch(128, torch.bfloat16, FLOAT)),
    Launch("d 128, others", lambda: launch(128, FLOAT, FLOAT)),
    Launch("d 128, the last", lambda: launch(128, FLOAT, torch.bfloat16)),
    Launch("d 80, all", lambda: launch(80, torch.bfloat16, torch.bfloat16), is_gated=False),
    Launch("d 256, all", lambda: launch(256, torch.bfloat16, torch.bfloat16), is_gated=False),
]


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "dim"), [(1, 1, 8), (37, 3, 24), (90, 4, 128)])
def test_merge_results(num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype, out: torch.dtype) -> None:
    """Rows and logarithms of more than what is merged; some weights are nearly 0 or 1."""
    first = normal(num_tokens + 5, num_heads, dim, dtype=dtype)[2 : num_tokens + 2]
    second = normal(num_tokens + 9, num_heads, dim, dtype=torch.bfloat16, seed=1)[:num_tokens]
    first_logs = (normal(num_heads, num_tokens + 5, dtype=FLOAT, seed=2) * 30)[:, 2 : num_tokens + 2].contiguous()
    second_logs = (normal(num_heads, num_tokens + 9, dtype=FLOAT, seed=3) * 30)[:, :num_tokens]
    found, logs = merge_results_triton(first, first_logs, second, second_logs, out)
    due, due_logs = merge_results_twin(first, first_logs, second, second_logs, out)
    assert found.dtype == out
    assert_near(found, due)
    assert_near(logs, due_logs)
