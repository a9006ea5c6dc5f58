import pytest
import torch

from diptych.kernels.cpu.formats import Format
from diptych.kernels.cpu.greedy import greedy
from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.linear import linear, pack


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize(("num_rows", "vocab_size", "dim"), [(1, 1, 16), (5, 401, 63), (130, 300, 32)])
def test_is_the_argmax_of_the_logits(
    team: Team, dtype: torch.dtype, num_rows: int, vocab_size: int, dim: int, format: Format
) -> None:
    torch.manual_seed(dim)
    weight = torch.randn(vocab_size, dim, dtype=dtype)
    weight[vocab_size // 2 :: 3] = weight[::3][: len(weight[vocab_size // 2 :: 3])]  # ties, panels apart
    padded = torch.full((num_rows, dim + 5), torch.nan, dtype=dtype)
    hidden = padded[:, :dim]
    hidden.copy_(torch.randn(num_rows, dim))
    head = pack(team, [weight], format=format)
    logits = linear(team, hidden, head, out=torch.empty(num_rows, vocab_size))
    expected = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    assert torch.equal(greedy(team, hidden, head), expected)
    assert torch.equal(greedy(team, hidden[num_rows - 1 :], head), expected[num_rows - 1 :])


def test_rows_without_a_number(team: Team, dtype: torch.dtype) -> None:
    head = pack(team, [torch.ones(40, 16, dtype=dtype)])
    assert greedy(team, torch.full((2, 16), torch.nan, dtype=dtype), head).tolist() == [0, 0]
    assert greedy(team, torch.empty(0, 16, dtype=dtype), head).tolist() == []
