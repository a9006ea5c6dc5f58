"""act(gate) * up against the formulas of the papers, in double precision."""

import math

import pytest
import torch

from diptych.kernels.elementwise.gate_mul import GELU, GELU_TANH, SILU, SILU_UP_FIRST, SWIGLU_CLAMPED, gate_mul

GATE_UP = torch.randn(3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def formula(x: float, activation: int) -> float:
    if activation == SILU:
        return x / (1 + math.exp(-x))
    if activation == GELU:
        return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))
    return x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("activation", [SILU, GELU, GELU_TANH])
def test_gate_mul(activation: int) -> None:
    gate, up = GATE_UP[:, :10], GATE_UP[:, 10:]
    expected = torch.tensor([[formula(x, activation) for x in row] for row in gate.tolist()], dtype=torch.float64) * up
    torch.testing.assert_close(gate_mul(GATE_UP, activation), expected)


def test_a_gate_that_is_behind() -> None:
    up_gate = torch.cat((GATE_UP[:, 10:], GATE_UP[:, :10]), dim=1)
    assert torch.equal(gate_mul(up_gate, SILU_UP_FIRST), gate_mul(GATE_UP, SILU))


def test_the_clamped_gate() -> None:
    gate_up = 6 * GATE_UP  # of which some are clamped, on either side
    pairs = zip(gate_up[:, :10].flatten().tolist(), gate_up[:, 10:].flatten().tolist(), strict=True)
    clamped = [(min(gate, 7.0), max(min(up, 7.0), -7.0)) for gate, up in pairs]
    expected = [gate / (1 + math.exp(-1.702 * gate)) * (up + 1) for gate, up in clamped]
    found = gate_mul(gate_up, SWIGLU_CLAMPED)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).view(3, 10))
