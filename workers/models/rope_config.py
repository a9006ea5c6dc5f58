"""RopeSpec: what a config.json says about rotary embedding, checked. Knows no tensor."""

from .config import Fields
from .spec import RopeSpec

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def read_rope(config: Fields, max_position_embeddings: int) -> RopeSpec:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before); the older wins, as there."""
    fields = config.section("rope_scaling") or config.section("rope_parameters")
    theta = config.number("rope_theta", default=10_000.0, minimum=1.0)
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise config.error(
            "partial_rotary_factor",
            "must be 1 (partial rotation is not supported)",
            config.get("partial_rotary_factor"),
        )
    if fields is None:
        return RopeSpec(theta=theta)
    theta = fields.number("rope_theta", default=theta, minimum=1.0)
    rope_type = fields.get("rope_type") or fields.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise fields.error("rope_type", f"must be one of {', '.join(SUPPORTED_ROPE_TYPES)}", rope_type)
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.error(
            "partial_rotary_factor",
            "must be 1 (partial rotation is not supported)",
            fields.get("partial_rotary_factor"),
        )
    if rope_type == "default":
        return RopeSpec(theta=theta)
    original = fields.size("original_max_position_embeddings", default=max_position_embeddings)
    original = config.size("original_max_position_embeddings", default=original)
    if rope_type == "yarn":
        return _yarn(fields, theta, original, max_position_embeddings)
    factor = fields.number("factor", minimum=0.0)
    if rope_type != "llama3":
        return RopeSpec(rope_type, theta, factor)
    low = fields.number("low_freq_factor", minimum=0.0)
    high = fields.number("high_freq_factor", minimum=low)
    return RopeSpec(rope_type, theta, factor, original, low_freq_factor=low, high_freq_factor=high)


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
