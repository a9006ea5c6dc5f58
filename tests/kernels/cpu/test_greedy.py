import numpy as np
import pytest
import torch

from diptych.kernels.cpu.formats import AT_LOAD, Format
from diptych.kernels.cpu.greedy import TokenMasks, greedy
from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.linear import linear, pack


@pytest.mark.parametrize("format", AT_LOAD[:3])
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


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 31), (5, 401), (130, 300)])
def test_of_the_tokens_that_masks_allow(team: Team, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    hidden, weight = torch.randn(num_rows, 32, dtype=dtype), torch.randn(vocab_size, 32, dtype=dtype)
    head = pack(team, [weight])
    logits = linear(team, hidden, head, out=torch.empty(num_rows, vocab_size))
    is_allowed = torch.rand(num_rows, vocab_size) < 0.1
    is_allowed[:, : vocab_size // 2] = False  # whole panels that nobody may have
    is_allowed[0] = False
    is_allowed[0, vocab_size - 1] = True
    masked = list(range(0, num_rows, 2))  # the others may have any token
    bits = np.zeros((len(masked), -(-vocab_size // 32) * 32), dtype=np.uint8)
    bits[:, :vocab_size] = is_allowed[masked].numpy()
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits[masked] = logits[masked].masked_fill(~is_allowed[masked], -torch.inf)
    expected = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    assert torch.equal(greedy(team, hidden, head, TokenMasks(num_rows, masked, words)), expected)


def test_rows_without_a_number(team: Team, dtype: torch.dtype) -> None:
    head = pack(team, [torch.ones(40, 16, dtype=dtype)])
    assert greedy(team, torch.full((2, 16), torch.nan, dtype=dtype), head).tolist() == [0, 0]
    assert greedy(team, torch.empty(0, 16, dtype=dtype), head).tolist() == []
