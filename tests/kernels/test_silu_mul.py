"""The twin against the formula. (Triton against the twin: test_triton.py.)"""

import torch

from diptych.kernels.silu_mul import silu_mul


def test_gate() -> None:
    gate_up = torch.randn(5, 2 * 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    gate, up = gate_up[:, :33], gate_up[:, 33:]
    torch.testing.assert_close(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)
