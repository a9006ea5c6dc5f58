"""Scales of a product's inputs that a norm before it is divided by and its weights are multiplied by: the product stays
what it was, and rounds better.

    SmoothQuant (arXiv 2211.10438, equation 4)   largest activation^a / largest weight^(1 - a), a = 0.5
    AWQ (arXiv 2306.00978, equations 4 and 5)    mean activation^a, the a of a search by the error of the product
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .statistics import InputStatistics

MIGRATION = 0.5  # SmoothQuant's a
NUM_RATIOS = 20  # AWQ's a: 0, 1 / 20, ... 19 / 20
LEAST = 1e-5  # of activations and weights, before a power of theirs is taken


def smoothquant_scales(weights: Sequence[Tensor], inputs: InputStatistics) -> Tensor:
    """weights: float32 [.., k] each, of the product. Returns float32 [k]."""
    largest = torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)
    return inputs.largest.clamp(min=LEAST) ** MIGRATION / largest.clamp(min=LEAST) ** (1 - MIGRATION)


def awq_scales(weights: Sequence[Tensor], inputs: InputStatistics, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """weights: float32 [.., k] each, of the product. rounded: what the format leaves of a weight. Returns float32 [k],
    all 1 where nothing is better."""
    mean = (inputs.total / max(inputs.num_tokens, 1)).clamp(min=LEAST)
    best, least = torch.ones_like(mean), torch.inf
    for i in range(NUM_RATIOS):
        scales = mean ** (i / NUM_RATIOS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(squared_error(rounded(weight * scales) / scales - weight, inputs) for weight in weights)
        if error < least:
            best, least = scales, error
    return best


def squared_error(difference: Tensor, inputs: InputStatistics | None) -> float:
    """difference: float32 [n, k], of two weights. Returns its squared norm, or that of its products with all inputs."""
    return float(((difference if inputs is None else difference @ inputs.hessian) * difference).sum())


def folded(norm: Tensor, offset: float, scales: Tensor) -> tuple[Tensor, Tensor]:
    """norm: [k] as stored, which `offset` is added to when it is used. scales: float32 [k]. Returns the norm that is
    stored instead, of its dtype, and the scales that it then has exactly: its own rounding is in them."""
    before = norm.float() + offset
    after = (before / scales - offset).to(norm.dtype)
    exact = before / (after.float() + offset)
    is_usable = torch.isfinite(exact) & (exact > 0)
    return torch.where(is_usable, after, norm), torch.where(is_usable, exact, 1.0)
