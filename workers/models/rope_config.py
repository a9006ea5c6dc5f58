"""RopeSpec: what a config.json says about rotary embedding, checked. Knows no tensor."""

from collections.abc import Mapping
from dataclasses import replace

from .config import Fields
from .spec import RopeSpec

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rope(config: Fields, max_position_embeddings: int) -> RopeSpec:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before); the older wins, as there."""
    theta = config.number("rope_theta", default=10_000.0, minimum=1.0)
    _refuse_partial(config)
    return _rope(config, _scaling(config) or config.section("rope_parameters"), theta, max_position_embeddings)


def read_partial_rope(config: Fields, max_position_embeddings: int, head_dim: int) -> RopeSpec:
    """The same, of Phi-3: it may rotate a part of each head, and "su" and "yarn" are older names of longrope."""
    theta = config.number("rope_theta", default=10_000.0, minimum=1.0)
    fields = _scaling(config) or config.section("rope_parameters")
    source = config if fields is None or fields.get("partial_rotary_factor") is None else fields
    partial = source.number("partial_rotary_factor", default=1.0, minimum=0.0)
    rotated = int(head_dim * partial)
    if partial > 1.0 or rotated % 2 or not rotated:
        raise source.error("partial_rotary_factor", f"must rotate an even part of {head_dim} numbers", partial)
    rope = RopeSpec(theta=theta)
    if fields is not None:
        renamed = "longrope" if _type_of(fields) in ("su", "yarn") else _type_of(fields)
        plain = fields.with_values({"rope_type": renamed, "partial_rotary_factor": None})
        rope = _rope(config, plain, theta, max_position_embeddings)
    for factors, name in ((rope.short_factors, "short_factor"), (rope.long_factors, "long_factor")):
        if rope.rope_type == "longrope" and len(factors) != rotated // 2:
            raise config.error(f"{name} of longrope", f"must have {rotated // 2} numbers", len(factors))
    return replace(rope, partial=partial)


def read_ropes(config: Fields, max_position_embeddings: int, thetas: Mapping[str, float]) -> dict[str, RopeSpec]:
    """One for each of the layer types that `thetas` names: of Gemma 3. Before transformers 5 the full layers had
    `rope_theta` and `rope_scaling`, the sliding ones `rope_local_base_freq`."""
    _refuse_partial(config)
    nested = config.section("rope_parameters")
    ropes: dict[str, RopeSpec] = {}
    for layer_type, default in thetas.items():
        is_full = layer_type == "full_attention"
        older = "rope_theta" if is_full else "rope_local_base_freq"
        theta = config.number(older, default=default, minimum=1.0)
        fields = nested.section(layer_type) if nested is not None else None
        if is_full and (scaling := _scaling(config)) is not None:
            fields = scaling if fields is None else fields.with_values(scaling.values)
        ropes[layer_type] = _rope(config, fields, theta, max_position_embeddings)
    return ropes


def _scaling(config: Fields) -> Fields | None:
    return config.section("rope_scaling")


def _type_of(fields: Fields) -> object:
    return fields.get("rope_type") or fields.get("type") or "default"


def _refuse_partial(fields: Fields) -> None:
    if (partial := fields.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise fields.error("partial_rotary_factor", "must be 1 (partial rotation is not supported)", partial)


def _rope(config: Fields, fields: Fields | None, theta: float, max_position_embeddings: int) -> RopeSpec:
    if fields is None:
        return RopeSpec(theta=theta)
    theta = fields.number("rope_theta", default=theta, minimum=1.0)
    rope_type = _type_of(fields)
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise fields.error("rope_type", f"must be one of {', '.join(SUPPORTED_ROPE_TYPES)}", rope_type)
    _refuse_partial(fields)
    if rope_type == "default":
        return RopeSpec(theta=theta)
    original = fields.size("original_max_position_embeddings", default=max_position_embeddings)
    original = config.size("original_max_position_embeddings", default=original)
    if rope_type == "yarn":
        return _yarn(fields, theta, original, max_position_embeddings)
    if rope_type == "longrope":
        return _longrope(fields, theta, original, max_position_embeddings)
    factor = fields.number("factor", minimum=0.0)
    if rope_type != "llama3":
        return RopeSpec(rope_type, theta, factor)
    low = fields.number("low_freq_factor", minimum=0.0)
    high = fields.number("high_freq_factor", minimum=low)
    return RopeSpec(rope_type, theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _longrope(fields: Fields, theta: float, original: int, max_position_embeddings: int) -> RopeSpec:
    factor = fields.optional_number("factor", minimum=0.0)
    if factor is None:
        factor = max_position_embeddings / original
    if factor > 1.0 and original < 2:
        raise fields.error("original_max_position_embeddings", "must be at least 2", original)
    return RopeSpec(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=fields.optional_number("attention_factor"),
        short_factors=fields.numbers("short_factor", minimum=0.0),
        long_factors=fields.numbers("long_factor", minimum=0.0),
    )


def _yarn(fields: Fields, theta: float, original: int, max_position_embeddings: int) -> RopeSpec:
    factor = fields.optional_number("factor")
    if factor is None:
        factor = max_position_embeddings / original
    if factor <= 0.0:
        raise fields.error("factor", "must be above 0", factor)
    return RopeSpec(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=fields.optional_number("beta_fast") or 32.0,
        beta_slow=fields.optional_number("beta_slow") or 1.0,
        attention_factor=fields.optional_number("attention_factor"),
        mscale=fields.optional_number("mscale"),
        mscale_all_dim=fields.optional_number("mscale_all_dim"),
        truncate=fields.flag("truncate", default=True),
    )
