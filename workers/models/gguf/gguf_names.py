"""Names of a decoder's tensors in GGUF files, and how llama.cpp's converter has changed their numbers. No torch.

model.layers.3.self_attn.q_proj.weight   ->  blk.3.attn_q.weight, rows of each head in another order
"""

import re
from dataclasses import dataclass

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
CHOICE_BIAS = "exp_probs_b"
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": CHOICE_BIAS,
    "block_sparse_moe.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Norms after attention, where there are others before the feed-forward, or, of gpt-oss, those under that name.
_POST_ATTENTION = {"gemma2", "gemma3", "olmo2", "gpt-oss"}
_EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?$")
_OF_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)$")
_OF_EXPERTS = re.compile(r"mlp\.experts\.(gate_up|down)_proj(_bias)?$")

SHIFTED_NORMS = {"gemma2", "gemma3"}  # their norms are stored with 1 added
TURNED = {"llama"}  # of queries and keys, the rows of two halves of a head are in turn
SPARE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read with the config


@dataclass(frozen=True, slots=True)
class GgufSource:
    """Tensors that a tensor of a decoder is stored as."""

    names: tuple[str, ...]
    expert: int | None = None  # its index in the first axis
    by_expert: str = ""  # the name of an expert's own tensor, in older files
    # Of newer files, instead: what makes keys, [heads, latent, key], and values, [heads, value, latent].
    by_head: tuple[str, str] | tuple[()] = ()
    is_turned: bool = False
    is_shifted: bool = False
    # [E, k, n], or, where it is two tensors in the file, [E, k, 2 n], outputs of both in turn; there each is [E, n, k].
    is_stacked: bool = False


def gguf_source(architecture: str, name: str) -> GgufSource | None:
    """Return what a decoder's tensor is stored as; None: no file has it. architecture: llama.cpp's name."""
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return GgufSource((f"{_OUTER[module]}.{kind}",), is_shifted=_is_shifted(architecture, module))
    found = _IN_LAYER.match(name)
    if found is None:
        return None
    prefix, module, kind = f"blk.{found[1]}.", found[2], found[3] or "weight"
    of_experts = _of_experts(prefix, module, kind)
    if of_experts is not None:
        return of_experts
    own = _LAYER.get(module)
    if module == "post_attention_layernorm" and architecture in _POST_ATTENTION:
        own = "post_attention_norm"
    if own is None:
        return None
    return GgufSource(
        (f"{prefix}{own}.{'bias' if own == CHOICE_BIAS else kind}",),
        by_head=(f"{prefix}attn_k_b.{kind}", f"{prefix}attn_v_b.{kind}") if own == "attn_kv_b" else (),
        is_turned=architecture in TURNED and own in ("attn_q", "attn_k"),
        is_shifted=_is_shifted(architecture, module),
    )


def _of_experts(prefix: str, module: str, kind: str) -> GgufSource | None:
    """Weights of one expert, or of all in one tensor."""
    if expert := _OF_EXPERT.match(module):
        stem = f"{prefix}ffn_{_EXPERT.get(expert[2], '')}"
        return GgufSource((f"{stem}_exps.{kind}",), int(expert[1]), by_expert=f"{stem}.{expert[1]}.{kind}")
    experts = _OF_EXPERTS.match(module)
    if experts is None:
        return None
    kind, parts = ("bias" if experts[2] else "weight"), (("down",) if experts[1] == "down" else ("gate", "up"))
    names = tuple(f"{prefix}ffn_{of}_exps.{kind}" for of in parts)
    return GgufSource(names, is_stacked=True)


def _is_shifted(architecture: str, module: str) -> bool:
    return architecture in SHIFTED_NORMS and module.endswith("norm")
