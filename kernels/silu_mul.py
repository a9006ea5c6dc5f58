"""The gate of a SwiGLU MLP (Shazeer 2020): silu(gate) * up."""

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2I], gate in the first half of each row, up in the second. Returns [T, I] of the same dtype."""
    return silu_mul_twin(gate_up)


def silu_mul_twin(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
