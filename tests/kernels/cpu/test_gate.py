import pytest
import torch
from torch.nn.functional import gelu, silu

from diptych.kernels.cpu.gate import gelu_mul, silu_mul
from diptych.kernels.cpu.library import Team


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 16), (5, 63), (2, 7), (33, 48)])
def test_is_its_twin(team: Team, dtype: torch.dtype, num_rows: int, dim: int) -> None:
    torch.manual_seed(dim)
    padded = torch.full((num_rows, 2 * dim + 3), torch.nan, dtype=dtype)
    gate_up = padded[:, : 2 * dim]
    gate_up.copy_(torch.randn(num_rows, 2 * dim) * 4)
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(silu_mul(team, gate_up), (silu(gate) * up).to(dtype))
    torch.testing.assert_close(gelu_mul(team, gate_up), (gelu(gate, approximate="tanh") * up).to(dtype))
    for kernel in (silu_mul, gelu_mul):
        alone = [kernel(team, gate_up[i : i + 1]) for i in range(num_rows)]
        assert torch.equal(kernel(team, gate_up), torch.cat(alone))


def test_large_gates(team: Team, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, torch.nan]], dtype=dtype)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    expected = gate.clone()
    expected[0, :4] = 0.0
    for kernel in (silu_mul, gelu_mul):
        torch.testing.assert_close(kernel(team, gate_up), expected, rtol=0.0, atol=1e-30, equal_nan=True)
