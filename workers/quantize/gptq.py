"""GPTQ (Frantar et al., arXiv 2210.17323): rounds a weight input by input, and makes up for each input's error by the
weights of the inputs that are not rounded yet.

    H = sum of x x^T over calibration inputs, damped;  U = the upper Cholesky factor of H^-1
    of input j: q = round(w_j), e = (w_j - q) / U_jj, and w_i -= e U_ji for all later i        (section 3.3, step 3)

Scales are those of the weights as they were, so that the order in which inputs are rounded leaves the groups as they
are stored.
"""

import torch
from torch import Tensor

from .grids import Grid

BLOCK = 128  # inputs whose errors reach the others together (section 3.3, step 2)


def gptq(weight: Tensor, hessian: Tensor, grid: Grid, damping: float, *, act_order: bool) -> tuple[Tensor, Tensor]:
    """weight: float32 [n, k]; hessian: float32 [k, k], symmetric. damping: part of the mean of its diagonal that is
    added to it. act_order: inputs of the largest activations are rounded first.

    Returns int8 [n, k] and scales, as `Grid.nearest` does.
    """
    n, k = weight.shape
    scales = grid.scales_of(weight)
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(k)
    factor = inverse_factor(hessian[order][:, order], damping)
    left, spread = weight[:, order].T.contiguous(), grid.spread(scales, k)[:, order].T.contiguous()  # [k, n]
    numbers = torch.empty(k, n)
    for first in range(0, k, BLOCK):
        end = min(first + BLOCK, k)
        errors = torch.empty(end - first, n)
        for j in range(first, end):
            numbers[j] = grid.round(left[j], spread[j])
            errors[j - first] = (left[j] - numbers[j] * spread[j]) / factor[j, j]
            left[j + 1 : end] -= factor[j, j + 1 : end, None] * errors[j - first]
        left[end:] -= factor[first:end, end:].T @ errors
    restored = torch.empty(n, k, dtype=torch.int8)
    restored[:, order] = numbers.T.to(torch.int8)
    return restored, scales


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """hessian: float32 [k, k]. Returns U, upper, with U^T U the inverse of the damped Hessian; damped more where that
    has no factor. Inputs that were always 0 say nothing: theirs is a diagonal of 1."""
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    mean = float(diagonal.mean()) or 1.0
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean).masked_fill_(dead, mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        else:
            upper = lower
        if not failed:
            return upper
        damping *= 10
