"""DeepSeek-V2 and V3: latent attention, dense layers and then mixtures with shared experts, chosen by groups."""

import math

from .family import read_mlp
from .json_config import JsonFields
from .moe import read_num_experts
from .rope_config import read_rope
from .spec import LatentSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec, RoutingSpec

# As transformers has them, of fields that a config.json need not name.
_BOTH = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V2_DEFAULTS = _BOTH | {"first_k_dense_replace": 0, "n_shared_experts": 2, "topk_method": "greedy"}
V3_DEFAULTS = _BOTH | {
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
}


def deepseek_v2(config: JsonFields) -> tuple[LayerSpec, ...]:
    _must_be(config, "scoring_func", "softmax")
    _must_be(config, "norm_topk_prob", False)
    method = config.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error("topk_method", "must be greedy or group_limited_greedy", method)
    groups = _groups(config) if method == "group_limited_greedy" else (1, 1)
    scale = config.number("routed_scaling_factor", default=1.0, minimum=0.0)
    routing = RoutingSpec(config.size("num_experts_per_tok"), False, False, scale, *groups)
    return _layers(config, routing, is_interleaved=True)


def deepseek_v3(config: JsonFields) -> tuple[LayerSpec, ...]:
    _must_be(config, "scoring_func", "sigmoid")
    _must_be(config, "topk_method", "noaux_tc")
    routing = RoutingSpec(
        config.size("num_experts_per_tok"),
        sigmoid=True,
        renormalise=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", minimum=0.0),
        num_groups=_groups(config)[0],
        top_groups=_groups(config)[1],
        group_by_two=True,
        choice_bias=True,
    )
    return _layers(config, routing, is_interleaved=config.flag("rope_interleave", default=True))


def _layers(config: JsonFields, routing: RoutingSpec, *, is_interleaved: bool) -> tuple[LayerSpec, ...]:
    _must_be(config, "mlp_bias", False)
    _must_be(config, "moe_layer_freq", 1)
    attention, mlp = _attention(config, is_interleaved), read_mlp(config)
    num_layers, num_dense = config.size("num_hidden_layers"), config.size("first_k_dense_replace", minimum=0)
    dense = (LayerSpec(attention, mlp),) * min(num_dense, num_layers)
    if num_dense >= num_layers:
        return dense
    return dense + (LayerSpec(attention, _moe(config, routing, mlp)),) * (num_layers - num_dense)


def _attention(config: JsonFields, is_interleaved: bool) -> LatentSpec:
    num_heads = config.size("num_attention_heads")
    _must_be(config, "num_key_value_heads", num_heads)
    nope, rope_dim = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", "must be even for rotary embedding", rope_dim)
    rope = read_rope(config, config.size("max_position_embeddings"))
    q_rank, bias = 0 if config.get("q_lora_rank") is None else config.size("q_lora_rank"), config.flag("attention_bias")
    if bias and not q_rank:
        raise config.error("attention_bias", "must be false where q_lora_rank is null", bias)
    return LatentSpec(
        num_heads,
        q_rank,
        config.size("kv_lora_rank"),
        nope,
        rope_dim,
        config.size("v_head_dim"),
        rope,
        scale=(nope + rope_dim) ** -0.5 * _temperature(rope) ** 2,
        bias=bias,
        is_interleaved=is_interleaved,
    )


def _temperature(rope: RopeSpec) -> float:
    """YaRN's (Peng et al. 2023, section 3.4), of queries and of keys: here in the scale of the scores."""
    if not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def _groups(config: JsonFields) -> tuple[int, int]:
    """Return the number of groups of experts, and how many of them a token chooses from."""
    num, top = config.size("n_group"), config.size("topk_group")
    if top > num:
        raise config.error("topk_group", f"must be at most n_group={num}", top)
    return num, top


def _moe(config: JsonFields, routing: RoutingSpec, dense: MlpSpec) -> MoeSpec:
    num_experts = read_num_experts(config, "n_routed_experts")
    per_group = num_experts // routing.num_groups
    if per_group * routing.num_groups != num_experts or (per_group < 2 and routing.group_by_two):
        raise config.error("n_group", f"must divide n_routed_experts={num_experts} into groups", routing.num_groups)
    if routing.top_k > per_group * routing.top_groups:
        raise config.error("num_experts_per_tok", "must be at most the experts of topk_group groups", routing.top_k)
    inner = config.size("moe_intermediate_size")
    shared = MlpSpec(inner * config.size("n_shared_experts"), dense.activation)
    return MoeSpec(num_experts, MlpSpec(inner, dense.activation), routing, shared)


def _must_be(config: JsonFields, name: str, value: object) -> None:
    """Raise for a field that is there and says anything else."""
    if config.get(name) not in (None, value):
        raise config.error(name, f"must be {value}", config.get(name))
