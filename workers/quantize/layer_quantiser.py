"""Quantises the matrices of one layer after another. Knows weights and statistics of their inputs; knows no text.

Calibrated, what it leaves of a weight stands in the checkpoint's overlay, so that the layer can be computed with it.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..common.errors import CheckpointError
from ..models.plan.quantize_job import GPTQ, SMOOTHQUANT, QuantizeJob
from ..models.plan.quantize_plan import PlannedWeight, Product, smoothed_fields
from ..models.plan.tensor_names import layer_tensors
from .gptq import gptq
from .grids import Grid
from .overlaid_checkpoint import OverlaidCheckpoint
from .rounded import RoundedWeight, grid_of, of_numbers, rounded_float
from .smoothing import awq_scales, folded, smoothquant_scales, squared_error
from .statistics import InputStatistics

Named = tuple[str, Tensor]  # a tensor that is to be stored, and its name
ALL = (slice(None), slice(None))
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class LayerQuantiser:
    def __init__(self, checkpoint: OverlaidCheckpoint, job: QuantizeJob, group: int) -> None:
        """group: inputs that share a scale, where the format has groups."""
        self.checkpoint, self.job, self._group = checkpoint, job, group
        self.spec = checkpoint.spec
        self.quantised: set[str] = set()  # names of tensors, as stored
        self.written: set[str] = set()  # with those that were changed otherwise
        self.num_weights = 0
        self._error = self._norm = 0.0  # squared, of all weights, or of what they make of the text

    @property
    def relative_error(self) -> float:
        """Norm of what rounding has changed, divided by that of the whole: of products with the text's inputs by GPTQ,
        else of weights."""
        return (self._error / self._norm) ** 0.5 if self._norm else 0.0

    def by_rounding(self, weights: Sequence[PlannedWeight]) -> Iterator[Named]:
        """Round each to nearest. weights: all of a layer."""
        for of in weights:
            if not of.is_ignored:
                weight = self._weight(of)
                yield from self._stored(of, weight, self._nearest(of, weight, weights))

    def statistics(self, layer: int, weights: Sequence[PlannedWeight]) -> dict[Product, InputStatistics]:
        """Return statistics, empty yet, of the products of those weights that need any."""
        chosen = {of.product: of.num_inputs for of in weights if not of.is_ignored}
        if self.job.chosen_method != GPTQ:
            fields = smoothed_fields(self.spec, layer)
            chosen = {product: k for product, k in chosen.items() if product.field in fields}
        return {product: InputStatistics.empty(k) for product, k in chosen.items()}

    def calibrated(
        self, layer: int, weights: Sequence[PlannedWeight], found: Mapping[Product, InputStatistics]
    ) -> Iterator[Named]:
        """weights: of `layer`, all of each product that has any. found: of these. Each is replaced in the checkpoint by
        what is left of it."""
        inputs, job = dict(found), self.job
        if job.chosen_method != GPTQ:
            yield from self._smooth(layer, weights, inputs)
        for of in weights:
            if of.is_ignored:
                continue
            weight, statistics = self._weight(of), inputs.get(of.product)
            if job.chosen_method == GPTQ and statistics is not None and statistics.num_tokens:
                grid = self._grid(of)
                numbers = gptq(weight, statistics.hessian, grid, job.damping, act_order=job.act_order)
                rounded = of_numbers(job.written, grid, *numbers)
            else:  # an expert that no token of the text went to, among them
                rounded = self._nearest(of, weight, weights)
            self.checkpoint.replaced[of.name] = rounded.meaning
            yield from self._stored(of, weight, rounded, statistics if job.chosen_method == GPTQ else None)

    def _smooth(
        self, layer: int, weights: Sequence[PlannedWeight], inputs: dict[Product, InputStatistics]
    ) -> Iterator[Named]:
        """Divide norms, and multiply the weights after them; both are replaced in the checkpoint. inputs: become those
        of the divided norms. Gives what is not quantised and has changed."""
        for field, norm_field in smoothed_fields(self.spec, layer).items():
            product = Product(field)
            own = [of for of in weights if of.product == product]
            if product not in inputs:
                continue
            matrices = [self._weight(of) for of in own]
            (piece,) = layer_tensors(self.spec, layer)[norm_field]
            norm = self.checkpoint.stored(piece.name, (slice(None),))
            changed, scales = folded(norm, piece.offset, self._scales(own, matrices, inputs[product]))
            self.checkpoint.replaced[piece.name] = changed
            yield self._changed(piece.name, changed)
            for of, matrix in zip(own, matrices, strict=True):
                scaled = matrix * scales
                self.checkpoint.replaced[of.name] = scaled
                if of.is_ignored:
                    yield self._changed(of.name, scaled.to(self._dtype(of.name)))
            inputs[product] = inputs[product].scaled(scales)

    def _scales(self, own: Sequence[PlannedWeight], matrices: Sequence[Tensor], inputs: InputStatistics) -> Tensor:
        """Search the scales of a product's inputs. matrices: float32 [n, k] of each of `own`. Returns float32 [k]."""
        if self.job.chosen_method == SMOOTHQUANT:
            return smoothquant_scales(matrices, inputs)
        chosen = [matrix for of, matrix in zip(own, matrices, strict=True) if not of.is_ignored]
        return awq_scales(chosen, inputs, lambda matrix: self._left_of(own[0], matrix))

    def _nearest(self, of: PlannedWeight, weight: Tensor, together: Sequence[PlannedWeight]) -> RoundedWeight:
        """together: all weights of the layer, or of those of its products that are looked at."""
        written = self.job.written
        if not written.is_float:
            grid = self._grid(of)
            return of_numbers(written, grid, *grid.nearest(weight))
        largest = 0.0
        if written.strategy == "tensor_group":
            same = [other for other in together if other.product == of.product and not other.is_ignored]
            largest = max(float(self._weight(other).abs().max()) for other in same)
        return rounded_float(written, weight, largest)

    def _left_of(self, of: PlannedWeight, weight: Tensor) -> Tensor:
        """weight: float32, in the place of `of`. Returns what rounding to nearest leaves of it."""
        grid = self._grid(of)
        return grid.meaning(*grid.nearest(weight))

    def _grid(self, of: PlannedWeight) -> Grid:
        return grid_of(self.job.written, self._group, self._dtype(of.name))

    def _weight(self, of: PlannedWeight) -> Tensor:
        """Return the weight as it is now, float32 [n, k]. Raises CheckpointError for numbers that are not finite."""
        weight = self.checkpoint.stored(of.name, ALL).float()
        if not torch.isfinite(weight).all():
            raise CheckpointError(
                f"{self.checkpoint.where(of.name)}: tensor {of.name} has numbers that are not finite: fetch it again"
            )
        return weight

    def _stored(
        self, of: PlannedWeight, weight: Tensor, rounded: RoundedWeight, inputs: InputStatistics | None = None
    ) -> Iterator[Named]:
        """Count a weight, float32 [n, k], and what is left of it. inputs: of its product, where that is what counts.
        Returns its tensors, named as they are stored."""
        self._error += squared_error(rounded.meaning - weight, inputs)
        self._norm += squared_error(weight, inputs)
        self.num_weights += 1
        stored = self.checkpoint.stored_name(of.name)
        self.quantised.add(stored)
        self.written.add(stored)
        for short, tensor in rounded.tensors.items():
            yield f"{stored.removesuffix('weight')}{short}", tensor

    def _changed(self, name: str, tensor: Tensor) -> Named:
        """Return a tensor that stands for `name`, named as it is stored."""
        stored = self.checkpoint.stored_name(name)
        self.written.add(stored)
        return stored, tensor

    def _dtype(self, name: str) -> torch.dtype:
        header = self.checkpoint.header(name)
        assert header is not None
        return DTYPES[header.dtype]
