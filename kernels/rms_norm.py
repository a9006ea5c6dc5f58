"""RMSNorm (Zhang & Sennrich 2019), alone and fused with the residual addition before it."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in float32.

    x: [..., D]; weight: [D], of one dtype. Returns a new tensor of x's shape and dtype.
    """
    return rms_norm_twin(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns rms_norm(residual).

    x, residual: [T, D]; weight: [D], of one dtype. Returns [T, D].
    """
    residual.add_(x)
    return rms_norm_twin(residual, weight, eps)


def rms_norm_twin(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    # The product with the weight is taken in x's own dtype, as transformers does.
    return torch.nn.functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype).mul_(weight)
