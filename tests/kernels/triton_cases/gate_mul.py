import pytest
import torch

from diptych.kernels.elementwise.gate_mul import (
    GELU,
    GELU_TANH,
    SILU,
    SILU_UP_FIRST,
    SWIGLU_CLAMPED,
    gate_mul_triton,
    gate_mul_twin,
)

from .common import DTYPES, FOLLOWING, Launch, assert_near, following, meta, normal

LAUNCHES = [
    Launch("silu 14336", lambda: gate_mul_triton(meta(64, 2 * 14336), SILU)),
    Launch(
        "silu 14336, follows",
        following(lambda: gate_mul_triton(meta(64, 2 * 14336), SILU)),
        FOLLOWING,
        gated_targets=("sm_90",),
    ),
    Launch("gelu 768", lambda: gate_mul_triton(meta(64, 2 * 768), GELU), is_gated=False),
    Launch("gelu, by tanh, 14336", lambda: gate_mul_triton(meta(64, 2 * 14336), GELU_TANH), is_gated=False),
    Launch("clamped 2880", lambda: gate_mul_triton(meta(64, 2 * 2880), SWIGLU_CLAMPED), is_gated=False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [SILU, GELU, GELU_TANH, SWIGLU_CLAMPED, SILU_UP_FIRST])
@pytest.mark.parametrize("shape", [(1, 64), (35, 33), (2, 2100)])
def test_gate_mul(shape: tuple[int, int], activation: int, dtype: torch.dtype) -> None:
    spread = 4 if activation == SWIGLU_CLAMPED else 1  # larger than the limit of the clamp
    gate_up = spread * normal(shape[0], 2 * shape[1] + 7, dtype=dtype)[:, 4:-3]
    assert_near(gate_mul_triton(gate_up, activation), gate_mul_twin(gate_up, activation))
