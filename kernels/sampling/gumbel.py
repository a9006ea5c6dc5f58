"""Standard Gumbel noise of tokens: a pure function of (key, token id), the same bits on every device.

SplitMix64 (Steele, Lea & Flood 2014): a stream is a 64-bit key, its i-th number the finaliser of key + i * GOLDEN; i is
the token id. That is wrapping 64-bit integer arithmetic; the two logarithms are taken in float64 and rounded, so that
the last place of a device's logarithm shows once in 2^28 numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.lang import jit, tl

GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
_SMALLEST = 2.0**-54


def signed(x: int) -> int:
    """The signed 64-bit integer of the same bits."""
    return x - (1 << 64) if x >> 63 else x


def gumbel(keys: Sequence[int] | Tensor, vocab_size: int, device: torch.device) -> Tensor:
    """Noise of every token under each key (signed; a tensor: int64, on `device`). Returns [len(keys), vocab_size]
    float32.

    The argmax of logits + noise is a draw from softmax(logits) (Gumbel-max; Maddison et al. 2014).
    """
    steps = torch.arange(vocab_size, dtype=torch.int64, device=device).mul_(signed(GOLDEN))
    column = keys if isinstance(keys, Tensor) else torch.tensor(keys, dtype=torch.int64, device=device)
    x = column[:, None] + steps
    x ^= (x >> 30) & (1 << 34) - 1  # the masks make torch's arithmetic shifts logical
    x *= signed(MIX1)
    x ^= (x >> 27) & (1 << 37) - 1
    x *= signed(MIX2)
    x ^= (x >> 31) & (1 << 33) - 1
    # Winners have small exponentials, so these come from small uniforms: float32 is finest there, and no two tie.
    uniform = ((x >> 11) & (1 << 53) - 1).to(torch.float32).mul_(2.0**-53).clamp_min_(_SMALLEST)
    exponential = torch.log1p(uniform.double().neg_()).neg_().to(torch.float32)
    return exponential.double().log_().neg_().to(torch.float32)


@jit
def uniforms(key: tl.tensor, ids: tl.tensor):
    """key: int64; ids: int64. What `gumbel` draws, float32 in [2^-54, 1]."""
    x = key + ids * -7046029254386353131  # GOLDEN, MIX1 and MIX2, signed
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return tl.maximum(((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float32) * 1.1102230246251565e-16, 5.551115123125783e-17)


@jit
def gumbels(uniform: tl.tensor):
    """Noise of uniforms, float32. log1p(-u) is log(1 - u), which float64 holds exactly, and -u below 2^-29 to a
    float32's last place."""
    wide = uniform.to(tl.float64)
    is_small = uniform < 1.862645149230957e-09
    exponential = tl.where(is_small, wide, -tl.log(1.0 - tl.where(is_small, 0.5, wide)))
    return (-tl.log(exponential.to(tl.float32).to(tl.float64))).to(tl.float32)
