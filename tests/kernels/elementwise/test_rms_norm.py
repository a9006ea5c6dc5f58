"""The twins against the formula. (Triton against the twins: test_triton.py.)"""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from diptych.kernels.elementwise.rms_norm import add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 64), (1, 7), (5, 3, 20)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape[:-1], shape[-1] + 5, generator=generator)[..., 2:-3].to(dtype) * 3
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        rms_norm(x, weight, 0.1).double(), formula(x, weight, 0.1), rtol=tolerance, atol=tolerance
    )


def test_a_weight_of_float32_is_met_before_rounding() -> None:
    """As Gemma's is, by transformers: nothing is rounded but the result, by 2^-8 of it at most."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 256, generator=generator).bfloat16(), 1 + torch.randn(256, generator=generator)
    found = rms_norm(x, weight, 1e-6)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), formula(x, weight, 1e-6), rtol=2**-8 * 1.001, atol=0)
    reference = Gemma3RMSNorm(256, eps=1e-6)
    reference.weight.data = weight - 1
    assert (found != reference(x)).float().mean() < 0.001
    assert torch.equal(add_rms_norm(x, torch.zeros_like(x), weight, 1e-6), found)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm_of_a_sum(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 33, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(33, generator=generator).to(dtype)
    total = residual + x
    out = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), formula(total, weight, 1e-6), rtol=tolerance, atol=tolerance)
