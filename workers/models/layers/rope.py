"""Rotary position embedding tables (Su et al. 2021) and the ways of stretching them to longer contexts."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..families.spec import ModelSpec, RopeSpec

Ropes = tuple[Tensor, ...]  # each [positions, D] float32: see rope_tables


def rope_tables(spec: ModelSpec, num_positions: int, device: torch.device) -> Ropes:
    """Return the cos and sin of every angle, scaled by the attention factor, for each of the spec's ropes, in their
    order.

    Each [num_positions, D] float32: cos of the D/2 frequencies of a head, then sin.
    """
    return tuple(_table(rope, dim, spec.max_position_embeddings, num_positions).to(device) for rope, dim in spec.ropes)


def _table(rope: RopeSpec, dim: int, max_position_embeddings: int, num_positions: int) -> Tensor:
    inv_freq, attention_factor = inverse_frequencies(rope, dim, max_position_embeddings, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    still = (0, dim // 2 - len(inv_freq))  # numbers that are not rotated have the angle 0
    return torch.cat((pad(cos, still, value=1.0), pad(sin, still)), dim=1)


def inverse_frequencies(
    rope: RopeSpec, head_dim: int, max_position_embeddings: int, num_positions: int
) -> tuple[Tensor, float]:
    """(inv_freq [rotated / 2] float32, factor on cos and sin), equal to transformers' ROPE_INIT_FUNCTIONS but for
    frequencies of 0 at its end.

    longrope (Ding et al. 2024): where contexts may be longer than those that the model was first made for, all have the
    frequencies for long ones: a cache cannot change them on the way.
    """
    head_dim = rope.rotated(head_dim)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    theta = rope.theta
    if rope.rope_type == "dynamic":
        # NTK-aware scaling grows theta with lengths beyond max_position_embeddings. Contexts here end there, so this
        # is theta up to rounding; the formula stays, to round as transformers does.
        stretch = (rope.factor * max_position_embeddings / max_position_embeddings) - (rope.factor - 1)
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    inv_freq = 1.0 / (theta**exponents)
    match rope.rope_type:
        case "linear":
            return inv_freq / rope.factor, 1.0
        case "proportional":  # the frequencies of a whole head, of which the last ones are 0
            return inv_freq[: int(rope.turning * head_dim // 2)] / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, inv_freq), 1.0
        case "yarn":
            return _yarn(rope, theta**exponents, head_dim), _yarn_attention_factor(rope)
        case "longrope":
            factors = rope.long_factors if rope.is_long(num_positions) else rope.short_factors
            return 1.0 / (torch.tensor(factors) * theta**exponents), _longrope_attention_factor(rope)
        case _:
            return inv_freq, 1.0


def _llama3(rope: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by factor, short ones kept, those between interpolated."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    is_long, is_short = wavelength > original / low, wavelength < original / high
    scaled = torch.where(is_long, inv_freq / rope.factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(is_long | is_short, scaled, between)


def _yarn(rope: RopeSpec, pos_freqs: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, §3.2): interpolate dimensions that turn few times over the original context."""
    low, high = (_yarn_dimension(rope, turns, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * pos_freqs) * (1 - keep) + 1.0 / pos_freqs * keep


def _yarn_dimension(rope: RopeSpec, turns: float, head_dim: int) -> float:
    """The (fractional) dimension whose wavelength makes `turns` turns over the original context."""
    original = rope.original_max_position_embeddings
    return (head_dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeSpec) -> float:
    """YaRN §3.4: the temperature of attention, applied to cos and sin."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
