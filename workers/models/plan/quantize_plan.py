"""Weights that `diptych quantize` writes in fewer bits, by the spec alone: every matrix of the layers' products but the
ignored ones. The head, embeddings, routers, norms and biases stay as they are. No torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...common.errors import CheckpointError, ConfigError, UnsupportedArchitecture
from ..families.quantisation import read_quantisation
from ..families.registry import load_spec
from ..families.spec import MlpSpec, ModelSpec
from .formats import IN_LAYERS
from .quantize_job import AWQ, GROUPS, RTN, SMOOTHQUANT, QuantizeJob
from .tensor_names import layer_tensors

WEIGHT = ".weight"


class Product(NamedTuple):
    """Product of a layer: a field of LayerWeights, and of an expert's which it is."""

    field: str
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """Matrix of a checkpoint that is computed in a product, alone or below others."""

    name: str  # of the tensor
    shape: tuple[int, int]
    product: Product
    is_ignored: bool  # stays as it is

    @property
    def module(self) -> str:
        return self.name.removesuffix(WEIGHT)

    @property
    def num_inputs(self) -> int:
        return self.shape[1]


def check_source(job: QuantizeJob) -> tuple[ModelSpec, int]:
    """Return the model's spec and the inputs that share a scale. Raises DiptychErrors where the checkpoint cannot be
    quantised, by its config alone."""
    path = Path(job.model)
    if read_quantisation(path) is not None:
        raise CheckpointError(f"{path} is quantised already: quantise the checkpoint that it was made from")
    spec = load_spec(path)
    return spec, check_plan(spec, job)


def planned_weights(spec: ModelSpec, layer: int, job: QuantizeJob) -> list[PlannedWeight]:
    """Return the matrices of a layer's products. Raises UnsupportedArchitecture where they are stored otherwise than as
    modules' weights."""
    found: dict[str, PlannedWeight] = {}
    for field, pieces in layer_tensors(spec, layer).items():
        if field not in IN_LAYERS:
            continue
        for piece in pieces:
            name, shape = piece.name, piece.shape
            if len(shape) != 2 or not name.endswith(WEIGHT) or piece.transposed:
                raise UnsupportedArchitecture(
                    f"{spec.architecture} has {name} {list(shape)}, several experts in one tensor, for which "
                    "compressed-tensors has no format: serve it with --quantize, or as its publisher quantises it"
                )
            module = name.removesuffix(WEIGHT)
            product = Product(field, piece.expert)
            found[name] = PlannedWeight(name, (shape[0], shape[1]), product, job.ignores(module))
    return list(found.values())


def check_plan(spec: ModelSpec, job: QuantizeJob) -> int:
    """Return the inputs that share a scale; 0: the format has no groups. Raises ConfigError or UnsupportedArchitecture
    where the model cannot be written so."""
    weights = [of for i in range(spec.num_layers) for of in planned_weights(spec, i, job)]
    chosen = [of for of in weights if not of.is_ignored]
    if not chosen:
        raise ConfigError("--ignore leaves nothing to quantise: leave a pattern out")
    if job.chosen_method != RTN:
        _check_calibrated(spec, job)
    if job.written.strategy not in ("group", "tensor_group"):
        return _check_packs(chosen, job)
    wanted = (job.written.group or job.group_size,)
    sizes = [size for size in (wanted if wanted[0] else GROUPS) if size is not None]
    group = next((size for size in sizes if all(of.num_inputs % size == 0 for of in chosen)), None)
    if group is None:
        odd = next(of for of in chosen if of.num_inputs % min(sizes))
        raise ConfigError(
            f"weight {odd.name} has {odd.num_inputs} inputs, which groups of {' or '.join(map(str, sizes))} do not "
            f"divide: leave it as it is with --ignore {odd.module}, or use --format int8"
        )
    return group


def _check_packs(chosen: list[PlannedWeight], job: QuantizeJob) -> int:
    """Raise ConfigError for rows that do not fill whole words, which other readers refuse."""
    per_word = 32 // job.written.bits if job.written.format == "pack-quantized" else 1
    for of in chosen:
        if of.num_inputs % per_word:
            raise ConfigError(
                f"weight {of.name} has {of.num_inputs} inputs, no multiple of {per_word}: leave it as it is with "
                f"--ignore {of.module}, or use --format w8a8"
            )
    return 0


def _check_calibrated(spec: ModelSpec, job: QuantizeJob) -> None:
    """Raise UnsupportedArchitecture where layers cannot be computed one after another, or have nothing to scale."""
    if spec.token_input is not None or any(layer.kv_from is not None for layer in spec.layers):
        raise UnsupportedArchitecture(
            f"{spec.architecture} has layers that read another one's KV, or an input of each token: calibration, which "
            "computes a layer at a time, does not know these. Leave --calibrate out"
        )
    if job.chosen_method in (AWQ, SMOOTHQUANT) and not any(smoothed_fields(spec, i) for i in range(spec.num_layers)):
        raise UnsupportedArchitecture(
            f"{spec.architecture} has no norm before its products that could be scaled: use --method gptq or rtn"
        )


def smoothed_fields(spec: ModelSpec, layer: int) -> dict[str, str]:
    """Return the norm before each product of a layer whose inputs it alone makes, by fields of LayerWeights: what is
    divided there and multiplied in the weights cancels."""
    of = spec.layers[layer]
    if of.norms == "after":
        return {}
    found = {"qkv": "input_norm"}
    if isinstance(of.feed_forward, MlpSpec) and of.beside is None:
        found["gate_up"] = "mlp_norm"
    return found


def hessian_bytes(weight: PlannedWeight) -> int:
    """Bytes of the statistics of its inputs."""
    return 4 * weight.num_inputs * (weight.num_inputs + 2)


def largest_numbers(weights: list[PlannedWeight]) -> int:
    """Number of weights in the largest matrix."""
    return max((math.prod(of.shape) for of in weights), default=0)
