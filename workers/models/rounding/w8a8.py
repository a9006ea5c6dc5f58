"""Products of int8 weights and rows that are quantised as they come: each by its own scale, to whole numbers from -127
to 127. The twin of kernels/cpu's kW8A8, for torch on CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [.., k]. Returns float32 whole numbers [.., k], and scales [.., 1]: NaN where a row is not finite."""
    wide = x.float()
    most = wide.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, 127.0) / most, 0.0)  # 127 / most is another number
    numbers = torch.round(wide * inverse)
    return numbers, most / 127 + (wide * 0).sum(dim=-1, keepdim=True)


class RowsQuantised(Tensor):
    """A weight [n, k], or several [E, n, k], that `linear` multiplies by quantised rows; in other products it is the
    plain weight."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is linear and len(args) > 1 and isinstance(args[1], cls):
            return _product(args[0], args[1].as_subclass(Tensor), *args[2:], **kwargs)
        found = super().__torch_function__(func, types, args, kwargs)  # of this class, where it is a tensor
        keeps = func in (Tensor.__getitem__, Tensor.as_subclass)
        return found.as_subclass(Tensor) if isinstance(found, cls) and not keeps else found


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product in x's dtype. Whole numbers of 8 bits are exact in it."""
    numbers, scales = quantise_rows(x)
    y = linear(numbers.to(weight.dtype), weight).float() * scales
    return (y if bias is None else y + bias).to(x.dtype)
