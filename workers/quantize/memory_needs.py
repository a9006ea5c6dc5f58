"""Memory that a quantisation takes, stated before it begins, and how its statistics are kept within it.

Calibrated, it holds one layer's weights twice in float32 (as they are, and as they are left), the residual of every
token of the text, the tensors of the file that is being made, and statistics of as many products as fit: where not all
of a layer's do, the text goes through the layer several times. By rounding alone it holds the matrix at hand.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..common.errors import InsufficientMemory
from ..models.families.spec import ModelSpec
from ..models.plan.quantize_job import QuantizeJob
from ..models.plan.quantize_plan import PlannedWeight, Product, hessian_bytes, largest_numbers, planned_weights
from ..models.plan.tensor_names import layer_tensors

GIB = 1 << 30
PROCESS_BYTES = 1 << 29  # of torch and the rest of the process
WORK_COPIES = 6  # of the largest matrix and its Hessian, float32, while it is rounded
ACTIVATION_COPIES = 8  # of the widest activations of a sequence, float32


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory of a job, in bytes."""

    fixed: int  # whatever the statistics
    least_statistics: int  # of the product with the most inputs
    all_statistics: int  # of the layer with the most

    @property
    def least(self) -> int:
        return self.fixed + self.least_statistics

    @property
    def most(self) -> int:
        return self.fixed + self.all_statistics

    def statistics_bytes(self, available: int) -> int:
        """Return what statistics may take at once. Raises InsufficientMemory."""
        if available < self.least:
            raise InsufficientMemory(
                f"this takes at least {self.least / GIB:.2f} GiB, but {available / GIB:.2f} are free or allowed: allow "
                "more with --memory-gib, calibrate with fewer --samples or --sequence-tokens, or use a larger machine"
            )
        return min(available - self.fixed, self.all_statistics)


def memory_needs(
    spec: ModelSpec, job: QuantizeJob, lengths: Sequence[int], shard_bytes: int, fixed_bytes: int = PROCESS_BYTES
) -> MemoryNeeds:
    """lengths: tokens of each calibration sequence; none: by rounding alone. shard_bytes: of a file that is written."""
    layers = [planned_weights(spec, i, job) for i in range(spec.num_layers)]
    largest = max(map(largest_numbers, layers))
    fixed = fixed_bytes + shard_bytes + 4 * WORK_COPIES * largest
    if not lengths:
        return MemoryNeeds(fixed, 0, 0)
    numbers = [_numbers_of(spec, i) for i in range(spec.num_layers)]
    statistics = [sum(hessian_bytes(of) for of in _by_product(weights).values()) for weights in layers]
    most = max(hessian_bytes(of) for weights in layers for of in weights)
    widest = max(sum(of.shape) for weights in layers for of in weights)
    fixed += 8 * max(numbers) + 4 * spec.hidden_size * sum(lengths)
    fixed += 4 * ACTIVATION_COPIES * widest * max(lengths) + WORK_COPIES * most
    return MemoryNeeds(fixed, most, max(statistics))


def passes(weights: Sequence[PlannedWeight], available: int) -> list[list[PlannedWeight]]:
    """Divide a layer's weights, those of a product together, so that the statistics of each part fit in `available`
    bytes, or are of one product."""
    parts: list[list[PlannedWeight]] = []
    left = 0
    for product, first in _by_product(weights).items():
        size = hessian_bytes(first)
        if not parts or size > left:
            parts.append([])
            left = available
        left -= size
        parts[-1] += [of for of in weights if of.product == product]
    return parts


def _by_product(weights: Sequence[PlannedWeight]) -> dict[Product, PlannedWeight]:
    """Return a weight of each product."""
    return {of.product: of for of in weights}


def _numbers_of(spec: ModelSpec, layer: int) -> int:
    """Number of weights of a layer."""
    fields = layer_tensors(spec, layer)
    return sum(math.prod(piece.own_shape) for pieces in fields.values() for piece in pieces)
