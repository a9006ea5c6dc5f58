"""Statistics of what enters a layer's products, gathered while it computes calibration text.

A product is torch's `linear` with a weight that is one of the layer's fields, or an expert's part of one. The decoder
is not changed for it: a torch function mode sees each call.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ...kernels.common.lang import launched
from ..models.checkpoint.weights import LayerWeights
from ..models.plan.quantize_plan import Product


@dataclass(slots=True)
class InputStatistics:
    """Statistics of the k inputs of a product, over all tokens so far."""

    hessian: Tensor  # float32 [k, k]: sum of x x^T
    largest: Tensor  # float32 [k]: of the magnitudes
    total: Tensor  # float32 [k]: of the magnitudes
    num_tokens: int = 0

    @classmethod
    def empty(cls, k: int) -> "InputStatistics":
        return cls(torch.zeros(k, k), torch.zeros(k), torch.zeros(k))

    def add(self, rows: Tensor) -> None:
        """rows: float32 [T, k]."""
        magnitudes = rows.abs()
        self.hessian.addmm_(rows.T, rows)
        self.largest = torch.maximum(self.largest, magnitudes.amax(dim=0))
        self.total += magnitudes.sum(dim=0)
        self.num_tokens += len(rows)

    def scaled(self, scales: Tensor) -> "InputStatistics":
        """Return those of inputs that are divided by `scales`, float32 [k], above 0."""
        inverse = 1 / scales
        hessian = self.hessian * inverse * inverse[:, None]
        return InputStatistics(hessian, self.largest * inverse, self.total * inverse, self.num_tokens)


class InputRecorder(TorchFunctionMode):
    """Gathers, while it is entered, the statistics of some of a layer's products."""

    def __init__(self, weights: LayerWeights, found: Mapping[Product, InputStatistics]) -> None:
        """found: of the products that are asked for; is added to."""
        super().__init__()
        self._of: dict[tuple[int, int], InputStatistics] = {}  # by address and inputs of the weight
        for product, of in found.items():
            field: Tensor = getattr(weights, product.field)
            own = field if product.expert is None else field[product.expert]
            self._of[own.data_ptr(), own.shape[-1]] = of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is launched:  # products are in it, too
            with self:
                return args[0](*args[1:], **(kwargs or {}))
        if func is linear:
            rows, weight = args[0], args[1]
            of = self._of.get((weight.data_ptr(), weight.shape[-1]))
            if of is not None and rows.numel():
                of.add(rows.float().flatten(0, -2))
        return func(*args, **(kwargs or {}))
