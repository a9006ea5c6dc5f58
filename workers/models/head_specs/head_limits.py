"""Limits of the compiled CPU kernels for heads. No torch."""

from ..plan.compiled_limits import mixtures_of, why_torch
from .head_spec import HeadSpec


def why_torch_head(spec: HeadSpec, block_size: int, kv_dtype: str) -> str | None:
    """Return why torch computes a head where kernels compute its target; None: they compute it, too. block_size,
    kv_dtype: of the KV cache."""
    if mixtures_of(spec.decoder):
        return "the compiled kernels do not compute a head with a mixture of experts"
    return why_torch(spec.decoder, block_size, kv_dtype=kv_dtype)
