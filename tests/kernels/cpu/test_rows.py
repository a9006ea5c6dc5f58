import pytest
import torch

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.rows import embed, rms_norm
from diptych.kernels.elementwise.rms_norm import rms_norm_twin

SIZES = [(1, 16), (5, 63), (2, 7), (33, 576)]


def rows(num: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[num, dim] surrounded by NaN, which must not be read."""
    padded = torch.full((num, dim + 7), torch.nan, dtype=dtype)
    padded[:, :dim] = torch.randn(num, dim)
    return padded[:, :dim]


@pytest.mark.parametrize(("num_rows", "dim"), SIZES)
def test_norms_are_their_twins(team: Team, dtype: torch.dtype, num_rows: int, dim: int) -> None:
    torch.manual_seed(dim)
    x, weight = rows(num_rows, dim, dtype), torch.randn(dim)
    torch.testing.assert_close(rms_norm(team, x, weight, 1e-6), rms_norm_twin(x, weight, 1e-6))


def test_a_row_is_the_same_bits_in_any_batch(team: Team, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = rows(9, 70, dtype), torch.randn(70)
    alone = [rms_norm(team, x[i : i + 1], weight, 1e-6) for i in range(9)]
    assert torch.equal(rms_norm(team, x, weight, 1e-6), torch.cat(alone))


def test_norms_of_no_rows(team: Team, dtype: torch.dtype) -> None:
    assert rms_norm(team, torch.empty(0, 16, dtype=dtype), torch.ones(16), 1e-6).shape == (0, 16)


def test_looked_up_rows_are_the_tables(team: Team, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = torch.randn(50, 63, dtype=dtype)
    ids = torch.tensor([49, 0, 7, 7, 3, 48])
    assert torch.equal(embed(team, ids, table), table[ids])
    assert embed(team, ids[:0], table).shape == (0, 63)
