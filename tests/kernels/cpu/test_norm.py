import pytest
import torch

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.norm import add_rms_norm, rms_norm
from diptych.kernels.rms_norm import add_rms_norm_twin, rms_norm_twin

SIZES = [(1, 16), (5, 63), (2, 7), (33, 576)]


def rows(num: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[num, dim] beside NaNs that nothing may read."""
    padded = torch.full((num, dim + 7), torch.nan, dtype=dtype)
    padded[:, :dim] = torch.randn(num, dim)
    return padded[:, :dim]


@pytest.mark.parametrize(("num_rows", "dim"), SIZES)
def test_is_its_twin(team: Team, dtype: torch.dtype, num_rows: int, dim: int) -> None:
    torch.manual_seed(dim)
    x, weight = rows(num_rows, dim, dtype), torch.randn(dim)
    torch.testing.assert_close(rms_norm(team, x, weight, 1e-6), rms_norm_twin(x, weight, 1e-6))


@pytest.mark.parametrize(("num_rows", "dim"), SIZES)
def test_adds_to_the_residual_first(team: Team, dtype: torch.dtype, num_rows: int, dim: int) -> None:
    torch.manual_seed(dim)
    x, residual, weight = rows(num_rows, dim, dtype), rows(num_rows, dim, dtype), torch.randn(dim)
    theirs = residual.clone()
    out = add_rms_norm(team, x, residual, weight, 1e-6)
    torch.testing.assert_close(out, add_rms_norm_twin(x, theirs, weight, 1e-6))
    assert torch.equal(residual, theirs)
    assert residual.as_strided((num_rows, dim + 7), (dim + 7, 1))[:, dim:].isnan().all()


def test_a_row_is_the_same_bits_in_any_batch(team: Team, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = rows(9, 70, dtype), rows(9, 70, dtype), torch.randn(70)
    alone = [add_rms_norm(team, x[i : i + 1], residual[i : i + 1].clone(), weight, 1e-6) for i in range(9)]
    assert torch.equal(add_rms_norm(team, x, residual, weight, 1e-6), torch.cat(alone))


def test_no_rows(team: Team, dtype: torch.dtype) -> None:
    assert rms_norm(team, torch.empty(0, 16, dtype=dtype), torch.ones(16), 1e-6).shape == (0, 16)
