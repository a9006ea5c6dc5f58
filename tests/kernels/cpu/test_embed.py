import torch

from diptych.kernels.cpu.embed import embed
from diptych.kernels.cpu.library import Team


def test_is_its_twin(team: Team, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = torch.randn(50, 63, dtype=dtype)
    ids = torch.tensor([49, 0, 7, 7, 3, 48])
    assert torch.equal(embed(team, ids, table), table[ids])
    assert embed(team, ids[:0], table).shape == (0, 63)
