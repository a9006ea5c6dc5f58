"""Which weights a `quantize` setting stores in which format.

All products of the layers in that format, and the head, where its weights are its own, in int8 either way: its errors
are those of the logits, with nothing after them to even them out. Embeddings, and so a head tied to them, biases and
norms stay as they are. Where ranks share a product's inputs, each takes the scales of the whole rows: all ranks
together hold bit for bit what one alone holds, and their KV goes by one name.
"""

import torch
from torch import Tensor

from ...kernels.cpu.linear import Format, group_of
from ..errors import ConfigError
from ..models.spec import AttentionSpec, MlpSpec, ModelSpec
from . import int4, int8

QUANTIZE = {"int8": Format.INT8, "int4": Format.INT4}
IN_LAYERS = ("qkv", "o", "gate_up", "down")  # fields of LayerWeights


def format_of(quantize: str | None, field: str) -> Format:
    """quantize: a key of QUANTIZE, or None. field: of LayerWeights or DecoderWeights."""
    if quantize is None:
        return Format.PLAIN
    if field == "lm_head":
        return Format.INT8
    return QUANTIZE[quantize] if field in IN_LAYERS else Format.PLAIN


def check_shares(spec: ModelSpec, quantize: str | None, size: int) -> None:
    """Raise ConfigError where the shares of `size` ranks would cut inputs that have one scale. spec: of the model."""
    inputs: dict[tuple[str, int], None] = {}
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.feed_forward
        if isinstance(attention, AttentionSpec):
            inputs["attention heads", attention.q_size] = None
        if isinstance(mlp, MlpSpec):
            inputs["intermediate size", mlp.intermediate_size] = None
    for what, k in inputs:
        part = k // size
        group = group_of(Format.INT4, part)
        if quantize == "int4" and size > 1 and part % group:
            raise ConfigError(
                f"quantize=int4 has a scale for each {group} inputs, and tensor_parallel={size} would cut them: a rank "
                f"would have {part} inputs of the {what}. Use int8, or fewer ranks"
            )


def scales_of_part(weight: Tensor, format: Format, part: slice) -> Tensor:
    """weight: whole rows [n, k]. Returns the scales that their inputs `part` have, float32 [n, groups]."""
    scales = int8.scales_of(weight) if format == Format.INT8 else int4.scales_of(weight)
    whole, own = group_of(format, weight.shape[1]), group_of(format, part.stop - part.start)
    return scales[:, torch.arange(part.start, part.stop, own) // whole].contiguous()


def as_stored(weight: Tensor, format: Format, scales: Tensor | None = None) -> Tensor:
    """What `format` leaves of a weight [n, k], in its dtype: for a product by torch. scales: None, its own."""
    match format:
        case Format.PLAIN:
            return weight
        case Format.INT8:
            return int8.dequantise(*int8.quantise(weight, scales)).to(weight.dtype)
        case Format.INT4:
            return int4.dequantise(*int4.quantise(weight, scales)).to(weight.dtype)
