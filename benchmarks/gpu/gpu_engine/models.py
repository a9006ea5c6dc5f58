"""Shapes of Llama 3 and DeepSeek-V2-Lite, and random weights of a shape, made on the device: no checkpoint is read."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from diptych.kernels.cpu.formats import Format, NumberLayout, group_of
from diptych.workers.models.checkpoint.packed_weights import products_of, rounded
from diptych.workers.models.checkpoint.weights import DecoderWeights, LayerWeights
from diptych.workers.models.families.spec import (
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    RoutingSpec,
)
from diptych.workers.models.plan.formats import DECODED_ON_GPUS, IN_LAYERS, QUANTIZE
from diptych.workers.models.plan.tensor_names import Pieces, layer_tensors, outer_tensors


def llama3(
    hidden: int,
    inner: int,
    layers: int,
    head_dim: int,
    *,
    factor: float,
    is_tied: bool,
    num_heads: int = 32,
    num_kv_heads: int = 8,
) -> ModelSpec:
    rope = RopeSpec("llama3", 500_000.0, factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    attention = AttentionSpec(num_heads, num_kv_heads, head_dim, rope, scale=head_dim**-0.5)
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=hidden,
        layers=(LayerSpec(attention, MlpSpec(inner)),) * layers,
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        longest_context=131_072,
        tie_word_embeddings=is_tied,
        eos_token_ids=(128_001,),
    )


def deepseek_v2_lite() -> ModelSpec:
    rope = RopeSpec("yarn", 10_000.0, 40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    attention = LatentSpec(16, 0, 512, 128, 64, 128, rope, scale=192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    mixture = MoeSpec(64, MlpSpec(1408), RoutingSpec(6, renormalise=False), MlpSpec(2 * 1408))
    return ModelSpec(
        architecture="DeepseekV2ForCausalLM",
        vocab_size=102_400,
        hidden_size=2048,
        layers=(LayerSpec(attention, MlpSpec(10_944)), *(LayerSpec(attention, mixture),) * 26),
        rms_norm_eps=1e-6,
        max_position_embeddings=163_840,
        longest_context=163_840,
        tie_word_embeddings=False,
        eos_token_ids=(100_001,),
    )


# A shape for a fake device, on which everything is computed on the CPU.
TINY = replace(llama3(64, 96, 2, 16, factor=32.0, is_tied=True, num_heads=4, num_kv_heads=2), vocab_size=300)
SHAPES = {
    "1b": llama3(2048, 8192, 16, 64, factor=32.0, is_tied=True),
    "8b": llama3(4096, 14336, 32, 128, factor=8.0, is_tied=False),
    "v2-lite": deepseek_v2_lite(),
}


# What `quantize` of a worker makes, and FP8 of checkpoints that were made for rows of FP8.
IN_FEW_BITS = {name: (format, False) for name, format in QUANTIZE.items()} | {"fp8-rows": (Format.FP8, True)}


def num_bytes(weights: DecoderWeights) -> int:
    """A tied head is counted once."""
    tensors = [weights.embed, weights.norm, *([] if weights.lm_head is weights.embed else [weights.lm_head])]
    tensors += [t for layer in weights.layers for name in layer.__slots__ if (t := getattr(layer, name)) is not None]
    return sum(tensor.nbytes for tensor in tensors)


def in_few_bits_(weights: DecoderWeights, quantize: str) -> None:
    """Replace the weights of products by what `--quantize` makes of them; quantize: of IN_FEW_BITS."""
    format, has_fp8_rows = IN_FEW_BITS[quantize]

    def layout(of: Format, k: int) -> NumberLayout:
        return NumberLayout(of, group_of(of, k), has_fp8_rows=has_fp8_rows and of == format)

    for layer in weights.layers:
        for field in set(IN_LAYERS) - set(DECODED_ON_GPUS):
            if isinstance(own := getattr(layer, field), Tensor):
                setattr(layer, field, rounded(own, layout(format, own.shape[-1])))
    assert isinstance(weights.lm_head, Tensor)
    weights.lm_head = rounded(weights.lm_head, layout(Format.INT8, weights.lm_head.shape[-1]))


def bytes_of_products(weights: DecoderWeights) -> float:
    """Return the mean bytes of a weight of a product, scales included."""
    products = [*(of for layer in weights.layers for of in products_of(layer)), weights.lm_head]
    return sum(of.nbytes for of in products) / sum(math.prod(of.shape) for of in products)


def random_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int = 0) -> DecoderWeights:
    """The same for the same seed on the same kind of device. Hidden states keep their size from layer to layer:
    matrices are normal with a deviation of one over the root of their inputs, norms near one, biases near none."""
    generator = torch.Generator(device).manual_seed(seed)

    def fused(field: str, pieces: Pieces) -> Tensor:
        shapes = [piece.own_shape for piece in pieces]
        size, of_dtype = (sum(s[0] for s in shapes), *shapes[0][1:]), torch.float32 if pieces[0].is_wide else dtype
        tensor = torch.empty(size, dtype=of_dtype, device=device)
        if tensor.dim() == 1:
            return tensor.normal_(1.0 if "norm" in field else 0.0, 0.05, generator=generator)
        tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
        num_experts = len({piece.expert for piece in pieces})
        return tensor if pieces[0].expert is None else tensor.unflatten(0, (num_experts, -1))

    def made(fields: dict[str, Pieces]) -> dict[str, Tensor]:
        return {field: fused(field, pieces) for field, pieces in fields.items()}

    layers = [LayerWeights(**made(layer_tensors(spec, i))) for i in range(spec.num_layers)]
    outer = made(outer_tensors(spec))
    return DecoderWeights(outer["embed"], layers, outer["norm"], outer.get("lm_head", outer["embed"]))
