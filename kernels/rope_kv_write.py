"""Rotary embedding of queries and keys (Su et al. 2021, half-split form); keys and values go to the paged cache."""

import torch
from torch import Tensor


def rope_kv_write(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Rotate q and k; store k and v in one layer of the cache.

    q: [T, N, D]; k, v: [T, K, D], strided, of the cache's dtype. cos_sin: [T, D] float32, cos of the D/2 angles of
    each token's position, then sin. cache: [num_blocks, 2, block_size, K, D], strided, written in place.
    slots: [T] int64, block * block_size + offset. Returns the rotated q, [T, N, D] contiguous.
    """
    return rope_kv_write_twin(q, k, v, cos_sin, cache, slots)


def rope_kv_write_twin(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    block_size = cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    cos, sin = cos_sin[:, None, :].chunk(2, dim=-1)
    cache[blocks, 0, offsets] = _rotate(k, cos, sin)
    cache[blocks, 1, offsets] = v
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D]; cos, sin: [T, 1, D/2] float32. The product is taken in float32 and rounded once."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
