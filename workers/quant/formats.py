"""Which weights a `quantize` setting stores in which format.

All products of the layers in that format, and the head, where its weights are its own, in int8 either way: its errors
are those of the logits, with nothing after them to even them out. Embeddings, and so a head tied to them, biases and
norms stay as they are. Ranks quantise their shares: scales of int8, and of int4 where a share cuts a group, differ from
those of the whole for the products whose inputs are shared out.
"""

from torch import Tensor

from ...kernels.cpu.linear import Format
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


def as_stored(weight: Tensor, format: Format) -> Tensor:
    """What `format` leaves of a weight [n, k], in its dtype: for a product by torch."""
    match format:
        case Format.PLAIN:
            return weight
        case Format.INT8:
            return int8.dequantise(*int8.quantise(weight)).to(weight.dtype)
        case Format.INT4:
            return int4.dequantise(*int4.quantise(weight)).to(weight.dtype)
