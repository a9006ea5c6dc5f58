"""Scales that a norm gives to the weights after it."""

import pytest
import torch

from diptych.workers.quantize.grids import Grid
from diptych.workers.quantize.smoothing import awq_scales, folded, smoothquant_scales, squared_error
from diptych.workers.quantize.statistics import InputStatistics

K = 64


@pytest.mark.parametrize(("dtype", "offset"), [(torch.bfloat16, 0.0), (torch.bfloat16, 1.0), (torch.float32, 0.0)])
def test_a_folded_norm_and_its_scales_make_the_same_product(dtype: torch.dtype, offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = (torch.randn(K, generator=generator) * 0.5).to(dtype)
    norm[5] = -offset  # such an input is always 0
    wanted = torch.rand(K, generator=generator) * 4 + 0.1
    changed, scales = folded(norm, offset, wanted)
    assert changed.dtype == dtype
    torch.testing.assert_close((changed.float() + offset) * scales, norm.float() + offset, rtol=1e-6, atol=0)
    assert (scales > 0).all()
    torch.testing.assert_close(scales, torch.where(norm + offset == 0, 1.0, wanted), rtol=0.2, atol=0)


def inputs_with_outliers() -> InputStatistics:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(300, K, generator=generator)
    rows[:, ::9] *= 40
    found = InputStatistics.empty(K)
    for part in rows.split(70):
        found.add(part)
    torch.testing.assert_close(found.hessian, rows.T @ rows, rtol=1e-4, atol=0.05)
    torch.testing.assert_close(found.total, rows.abs().sum(dim=0))
    assert torch.equal(found.largest, rows.abs().amax(dim=0))
    assert found.num_tokens == 300
    return found


def test_awq_finds_scales_that_make_the_products_nearer() -> None:
    inputs, grid = inputs_with_outliers(), Grid(4, 32, torch.float32)
    weights = [torch.randn(n, K, generator=torch.Generator().manual_seed(n)) for n in (48, 16)]

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return grid.meaning(*grid.nearest(weight))

    scales = awq_scales(weights, inputs, rounded)
    plain = sum(squared_error(rounded(weight) - weight, inputs) for weight in weights)
    scaled = sum(squared_error(rounded(weight * scales) / scales - weight, inputs) for weight in weights)
    assert scaled < 0.5 * plain
    # The same, of the inputs that a folded norm makes.
    own = inputs.scaled(scales)
    again = sum(squared_error(rounded(weight * scales) - weight * scales, own) for weight in weights)
    assert again == pytest.approx(scaled, rel=1e-4)


def test_smoothquant_moves_half_of_the_range() -> None:
    inputs = inputs_with_outliers()
    weights = [torch.randn(24, K, generator=torch.Generator().manual_seed(7))]
    scales = smoothquant_scales(weights, inputs)
    largest = inputs.largest / scales
    torch.testing.assert_close(largest, (weights[0] * scales).abs().amax(dim=0))
    assert largest.max() / largest.min() < 0.3 * inputs.largest.max() / inputs.largest.min()
