"""Which tensors of a Hugging Face checkpoint make up a decoder, by name and shape. No torch."""

from collections.abc import Iterator

from .spec import ModelSpec

Shape = tuple[int, ...]


def layer_tensors(spec: ModelSpec, layer: int) -> dict[str, dict[str, Shape]]:
    """For each field of LayerWeights, the checkpoint's tensors that are stacked into it: name -> shape."""
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_rows, kv_rows = spec.num_heads * dim, spec.num_kv_heads * dim
    attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
    qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    gate_up = {"gate_proj": inner, "up_proj": inner}
    tensors: dict[str, dict[str, Shape]] = {
        "input_norm": {f"model.layers.{layer}.input_layernorm.weight": (hidden,)},
        "qkv": {f"{attention}{name}.weight": (rows, hidden) for name, rows in qkv.items()},
        "o": {f"{attention}o_proj.weight": (hidden, q_rows)},
        "post_norm": {f"model.layers.{layer}.post_attention_layernorm.weight": (hidden,)},
        "gate_up": {f"{mlp}{name}.weight": (rows, hidden) for name, rows in gate_up.items()},
        "down": {f"{mlp}down_proj.weight": (hidden, inner)},
    }
    if spec.qk_norm:
        tensors["q_norm"] = {f"{attention}q_norm.weight": (dim,)}
        tensors["k_norm"] = {f"{attention}k_norm.weight": (dim,)}
    if spec.attention_bias:
        tensors["qkv_bias"] = {f"{attention}{name}.bias": (rows,) for name, rows in qkv.items()}
        tensors["o_bias"] = {f"{attention}o_proj.bias": (hidden,)}
    if spec.mlp_bias:
        tensors["gate_up_bias"] = {f"{mlp}{name}.bias": (rows,) for name, rows in gate_up.items()}
        tensors["down_bias"] = {f"{mlp}down_proj.bias": (hidden,)}
    return tensors


def outer_tensors(spec: ModelSpec) -> dict[str, dict[str, Shape]]:
    """The same for the fields of DecoderWeights outside its layers."""
    matrix = (spec.vocab_size, spec.hidden_size)
    return {
        "embed": {"model.embed_tokens.weight": matrix},
        "norm": {"model.norm.weight": (spec.hidden_size,)},
        # Where it is tied it may be absent; where it is stored all the same, transformers uses it, and so do we.
        "lm_head": {"lm_head.weight": matrix},
    }


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor of a checkpoint of `spec`: name -> shape."""
    groups: Iterator[dict[str, Shape]] = (
        sources for i in range(spec.num_layers) for sources in layer_tensors(spec, i).values()
    )
    expected = {name: shape for sources in outer_tensors(spec).values() for name, shape in sources.items()}
    for sources in groups:
        expected |= sources
    return expected
