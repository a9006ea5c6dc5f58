import pytest
import torch

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.norm import rms_norm
from diptych.kernels.rms_norm import rms_norm_twin


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 16), (5, 63), (33, 576)])
def test_is_its_twin(team: Team, dtype: torch.dtype, num_rows: int, dim: int) -> None:
    torch.manual_seed(dim)
    x, weight = torch.randn(num_rows, dim + 7, dtype=dtype)[:, :dim], torch.randn(dim, dtype=dtype)
    torch.testing.assert_close(rms_norm(team, x, weight, 1e-6), rms_norm_twin(x, weight, 1e-6))
