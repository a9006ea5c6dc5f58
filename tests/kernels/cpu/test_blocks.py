import pytest
import torch

from diptych.kernels.cpu.blocks import copy_blocks, copy_blocks_twin
from diptych.kernels.cpu.library import Team

PAIRS = [([], []), ([3], [0]), ([5, 5, 0, 2], [1, 6, 4, 3])]


@pytest.mark.parametrize("inner", [(1,), (3, 7), (2, 5, 16, 3, 24)])
@pytest.mark.parametrize("is_outer_first", [True, False])
@pytest.mark.parametrize(("sources", "targets"), PAIRS)
def test_is_its_twin(
    team: Team, dtype: torch.dtype, inner: tuple[int, ...], is_outer_first: bool, sources: list[int], targets: list[int]
) -> None:
    """Targets hold NaN before, and so does what lies between the blocks and beyond them."""
    padded = torch.full((4, 8, 3, *inner) if is_outer_first else (8, 4, 3, *inner), torch.nan, dtype=dtype)

    def pool_of(whole: torch.Tensor) -> torch.Tensor:
        return (whole if is_outer_first else whole.transpose(0, 1))[:3, :7, 1]

    pool = pool_of(padded)
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
    pool[:, targets] = torch.nan
    expected = padded.clone()
    copy_blocks_twin(pool_of(expected), sources, targets)
    assert not pool_of(expected).isnan().any()
    copy_blocks(team, pool, sources, targets)
    torch.testing.assert_close(padded, expected, rtol=0, atol=0, equal_nan=True)
