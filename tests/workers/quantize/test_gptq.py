"""GPTQ against its definition, one input after another, and against rounding to nearest."""

import pytest
import torch
from torch import Tensor

from diptych.workers.quantize import gptq as of_gptq
from diptych.workers.quantize.gptq import gptq
from diptych.workers.quantize.grids import Grid

GRIDS = {"int4": Grid(4, 16, torch.float32), "int8": Grid(8, 0, torch.float32)}
N, K = 24, 48


def correlated(num_tokens: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """A weight, and the Hessian of inputs that say much about one another."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, generator=generator) + 3 * torch.randn(K, 1, generator=generator)
    inputs = torch.randn(num_tokens, K, generator=generator) @ mix
    return torch.randn(N, K, generator=generator), inputs.T @ inputs


def by_definition(weight: Tensor, hessian: Tensor, grid: Grid, damping: float) -> Tensor:
    """Round input after input; each error is made up for by the least squares of those that are left (equation 2)."""
    damped = hessian.double() + damping * hessian.diagonal().mean().double() * torch.eye(K)
    left, spread = weight.double().clone(), grid.spread(grid.scales_of(weight), K)
    numbers = torch.empty(N, K)
    for j in range(K):
        numbers[:, j] = grid.round(left[:, j].float(), spread[:, j])
        error = left[:, j] - numbers[:, j] * spread[:, j]
        inverse = torch.linalg.inv(damped[j:, j:])
        left[:, j:] -= error[:, None] * inverse[0] / inverse[0, 0]
    return numbers


@pytest.mark.parametrize("name", GRIDS)
def test_it_is_what_the_definition_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_gptq, "BLOCK", 20)  # the last of three is shorter
    weight, hessian = correlated(400)
    numbers, scales = gptq(weight, hessian, GRIDS[name], 0.01, act_order=False)
    expected = by_definition(weight, hessian, GRIDS[name], 0.01)
    assert torch.equal(scales, GRIDS[name].scales_of(weight))
    assert (numbers == expected).float().mean() > 0.99  # a tie within rounding moves what comes after it


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", GRIDS)
def test_products_are_nearer_than_by_rounding(name: str, act_order: bool) -> None:
    (weight, hessian), grid = correlated(400), GRIDS[name]

    def error(numbers: Tensor, scales: Tensor) -> Tensor:
        difference = grid.meaning(numbers, scales) - weight
        return ((difference @ hessian) * difference).sum()

    assert error(*gptq(weight, hessian, grid, 0.01, act_order=act_order)) < 0.5 * error(*grid.nearest(weight))


@pytest.mark.parametrize("act_order", [False, True])
def test_inputs_that_say_nothing_of_one_another_are_rounded_to_nearest(act_order: bool) -> None:
    weight, _ = correlated(10)
    hessian = torch.diag(torch.rand(K, generator=torch.Generator().manual_seed(4)) + 0.1)
    for grid in GRIDS.values():
        found = gptq(weight, hessian, grid, 0.01, act_order=act_order)
        assert all(torch.equal(one, other) for one, other in zip(found, grid.nearest(weight), strict=True))


def test_few_tokens_and_inputs_that_are_always_0_are_no_obstacle() -> None:
    weight, hessian = correlated(5)  # of rank 5
    hessian[7], hessian[:, 7] = 0, 0
    grid = GRIDS["int4"]
    for of in (hessian, torch.zeros(K, K)):
        numbers, scales = gptq(weight, of, grid, 1e-7, act_order=True)
        assert torch.isfinite(grid.meaning(numbers, scales)).all()
    assert torch.equal(numbers, grid.nearest(weight)[0])
