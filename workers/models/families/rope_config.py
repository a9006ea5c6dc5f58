"""RopeSpec: what a config.json says about rotary embedding, checked. Knows neither tensors nor families."""

from collections.abc import Iterable

from .json_config import MAX_DIMENSION, JsonFields
from .spec import RopeSpec

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def read_rope(config: JsonFields, max_position_embeddings: int) -> RopeSpec:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before); the older wins, as there."""
    theta = config.number("rope_theta", default=10_000.0, minimum=1.0)
    refuse_partial(config)
    return rope_of(config, rope_fields(config), theta, max_position_embeddings)


def rope_fields(config: JsonFields) -> JsonFields | None:
    return config.section("rope_scaling") or config.section("rope_parameters")


def rope_type_of(fields: JsonFields) -> object:
    return fields.get("rope_type") or fields.get("type") or "default"


def refuse_partial(fields: JsonFields) -> None:
    if (partial := fields.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise fields.error("partial_rotary_factor", "must be 1 (partial rotation is not supported)", partial)


def rope_of(config: JsonFields, fields: JsonFields | None, theta: float, max_position_embeddings: int) -> RopeSpec:
    """Read a RoPE from `fields` of `config`, if there are any; theta: used where they name none."""
    if fields is None:
        return RopeSpec(theta=theta)
    theta = fields.number("rope_theta", default=theta, minimum=1.0)
    rope_type = rope_type_of(fields)
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise fields.error("rope_type", f"must be one of {', '.join(SUPPORTED_ROPE_TYPES)}", rope_type)
    if rope_type == "proportional":
        return _proportional(fields, theta)
    refuse_partial(fields)
    if rope_type == "default":
        return RopeSpec(theta=theta)
    return _stretched(config, fields, str(rope_type), theta, max_position_embeddings)


def _stretched(
    config: JsonFields, fields: JsonFields, rope_type: str, theta: float, max_position_embeddings: int
) -> RopeSpec:
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


def _proportional(fields: JsonFields, theta: float) -> RopeSpec:
    turning = fields.number("partial_rotary_factor", default=1.0, minimum=0.0)
    if turning > 1.0:
        raise fields.error("partial_rotary_factor", "must be at most 1", turning)
    return RopeSpec("proportional", theta, fields.number("factor", default=1.0, minimum=0.0), turning=turning)


def _longrope(fields: JsonFields, theta: float, original: int, max_position_embeddings: int) -> RopeSpec:
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


def _yarn(fields: JsonFields, theta: float, original: int, max_position_embeddings: int) -> RopeSpec:
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


def longest_context(config: JsonFields, ropes: Iterable[RopeSpec]) -> int:
    """Tokens that a context may have. yarn stretches the model's first length by its factor (Peng et al. 2023; what
    transformers' validation calls the post-yarn length); max_position_embeddings may still say less, as in Qwen's
    configs with the rope_scaling that its documentation adds."""
    stretched = [rope.factor * rope.original_max_position_embeddings for rope in ropes if rope.rope_type == "yarn"]
    longest = max(config.size("max_position_embeddings"), *map(int, stretched), 0)
    if longest > MAX_DIMENSION:
        raise config.error("factor of yarn", f"must stretch contexts to at most {MAX_DIMENSION} tokens", longest)
    return longest
