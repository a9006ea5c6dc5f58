"""Storage formats of a model's weights under each `quantize` setting.

All products of the layers in that format, and the head in int8 in any case: its errors are those of the logits, with
nothing after them to even them out. Embeddings, biases and norms stay as they are; a head that is tied to them becomes
a copy, for a step reads all of it, and of the embeddings few rows. Where ranks share a product's inputs, each takes the
scales of the whole rows: all ranks together hold bit for bit what one alone holds, and their KV goes by one name. No
torch.
"""

from ....kernels.cpu.formats import Format, group_of
from ...common.errors import ConfigError
from ..families.spec import AttentionSpec, ModelSpec

QUANTIZE = {
    "int8": Format.INT8,
    "int4": Format.INT4,
    "fp8": Format.FP8,
    "w8a8": Format.W8A8,
    "mxfp4": Format.TABLE4,
}
BY_GROUP = (Format.INT4, Format.TABLE4)  # of inputs, which share a scale
MLPS = ("gate_up", "down", "experts_gate_up", "experts_down", "shared_gate_up", "shared_down")
DECODED_ON_GPUS = ("kv_b",)  # of which a step needs each head's part by itself, and transposed
IN_LAYERS = ("qkv", "q_b", "kv_b", "o", *MLPS)  # fields of LayerWeights


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
        attention = layer.attention
        if isinstance(attention, AttentionSpec):
            inputs["attention heads", attention.q_size] = None
        else:
            inputs["attention heads", attention.num_heads * attention.value_dim] = None
        inputs |= {("intermediate size", mlp.intermediate_size): None for mlp in layer.mlps}
    format = Format.PLAIN if quantize is None else QUANTIZE[quantize]
    for what, k in inputs:
        part = k // size
        group = group_of(format, part)
        if format in BY_GROUP and size > 1 and part % group:
            raise ConfigError(
                f"quantize={quantize} has one scale per {group} inputs, and tensor_parallel={size} would split these: "
                f"a rank would have {part} inputs of the {what}. Use int8 or fp8, or fewer ranks"
            )
