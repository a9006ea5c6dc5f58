import pytest
import torch

from diptych.kernels.silu_mul import silu_mul_triton, silu_mul_twin

from .common import DTYPES, Launch, assert_near, meta, normal

LAUNCHES = [Launch("14336", lambda: silu_mul_triton(meta(64, 2 * 14336)))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 33), (2, 1500)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = normal(shape[0], 2 * shape[1] + 7, dtype=dtype)[:, 4:-3]
    assert_near(silu_mul_triton(gate_up), silu_mul_twin(gate_up))
