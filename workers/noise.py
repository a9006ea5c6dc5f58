"""Counter-based randomness: a pure function of (seed, position, token id), never of batch, time or order.

SplitMix64 (Steele, Lea & Flood 2014): a stream is a 64-bit key, its i-th number the finaliser of key + i * GOLDEN.
Here the key mixes the request's seed with the position of the token to be drawn, and i is the token id. All of it is
wrapping 64-bit integer arithmetic, so every device computes the same bits; only the logarithms at the end may differ
between devices, in their last place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_SMALLEST = 2.0**-54


def stream_key(seed: int, position: int) -> int:
    """The key of the draw at `position` (index in prompt and output) under `seed`, as a signed 64-bit integer."""
    return _signed(_mix(seed ^ _mix((position + 1) * _GOLDEN & _MASK)))


def gumbel(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise for every token under each key. Returns [len(keys), vocab_size] float32.

    The argmax of logits + noise is a draw from softmax(logits) (Gumbel-max; Maddison et al. 2014).
    """
    steps = torch.arange(vocab_size, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN))
    x = torch.tensor(keys, dtype=torch.int64, device=device)[:, None] + steps
    x ^= (x >> 30) & (1 << 34) - 1  # the masks make torch's arithmetic shifts logical
    x *= _signed(_MIX1)
    x ^= (x >> 27) & (1 << 37) - 1
    x *= _signed(_MIX2)
    x ^= (x >> 31) & (1 << 33) - 1
    # Winners have small exponentials, so these come from small uniforms: float32 is finest there, and no two tie.
    uniform = ((x >> 11) & (1 << 53) - 1).to(torch.float32).mul_(2.0**-53).clamp_min_(_SMALLEST)
    exponential = torch.log1p(uniform.neg_()).neg_()
    return exponential.log_().neg_()


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * _MIX1 & _MASK
    x = (x ^ x >> 27) * _MIX2 & _MASK
    return x ^ x >> 31


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
