"""FlashMLA without its kernels: the released signatures and checks of a dense decode, computed plainly.

Two of its interfaces: of 2025, whose metadata are tensors, and that since 2026 (1.0.0), which are found by the first
call with them.
"""

import importlib.machinery
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from diptych.kernels.attention.decode_plan import DecodePlan, Decodes
from diptych.kernels.mla.decode import mla_decode_twin

RANK, DIM, PAGE = 512, 576, 64
TMA_BYTES = 16  # of which addresses and strides of what TMA reads are multiples


@dataclass
class FlashMLASchedMeta:
    """Parts of contexts, once they are found."""

    num_calls: int = 0
    config: tuple[Any, ...] | None = None
    contexts: Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """The later interface: what it is given is not looked at."""
    return FlashMLASchedMeta(), None


def get_first_metadata(cache_seqlens: Tensor, num_heads_per_head_k: int, num_heads_k: int) -> tuple[Tensor, Tensor]:
    """The first interface. num_heads_per_head_k: new tokens times query heads."""
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous()
    assert num_heads_per_head_k > 0 and num_heads_k == 1
    return cache_seqlens.clone(), torch.zeros(len(cache_seqlens) + 1, dtype=torch.int32)


def flash_mla_with_kvcache(  # noqa: PLR0917 (as released)
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q: [S, 1, N, 576]; k_cache: [num_blocks, 64, 1, 576]. Returns [S, 1, N, 512], and sums that nobody reads."""
    unused = (indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length)
    assert unused == (None,) * len(unused) and not is_fp8_kvcache and not causal
    assert block_table is not None and cache_seqlens is not None and softmax_scale is not None
    num_seqs, num_queries, num_heads, dim = q.shape
    assert num_seqs > 0 and num_queries == 1 and dim == DIM and head_dim_v == RANK
    assert k_cache.shape[1:] == (PAGE, 1, DIM) and k_cache.stride(-1) == q.stride(-1) == 1
    assert q.dtype == k_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
    for of in (q, k_cache):
        assert of.data_ptr() % TMA_BYTES == 0 and all(n * of.element_size() % TMA_BYTES == 0 for n in of.stride()[:2])
    assert cache_seqlens.shape == (num_seqs,) and cache_seqlens.is_contiguous() and block_table.stride(-1) == 1
    assert block_table.dtype == cache_seqlens.dtype == torch.int32 and len(block_table) == num_seqs
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        meta, config = tile_scheduler_metadata, (num_seqs, num_queries, num_heads, PAGE, 1)
        assert num_splits is None and meta.config in (None, config)
        assert meta.contexts is None or torch.equal(meta.contexts, cache_seqlens)
        meta.config, meta.contexts, meta.num_calls = config, cache_seqlens.clone(), meta.num_calls + 1
    else:
        assert torch.equal(tile_scheduler_metadata, cache_seqlens) and num_splits.shape == (num_seqs + 1,)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=q.device)
    decodes, none = Decodes(block_table, cache_seqlens, starts, 1), torch.empty(0)
    rows, plan = q[:, 0], DecodePlan(none, none, none, 1, 0)
    out = mla_decode_twin(rows[..., :RANK], rows[..., RANK:], k_cache[:, :, 0], decodes, plan, softmax_scale)
    return out[:, None], torch.empty(num_seqs, num_heads, 1)


def make_flash_mla(*, is_first: bool = False) -> ModuleType:
    """Make the module, for `sys.modules`. is_first: of the first interface."""
    module = ModuleType("flash_mla")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)
    module.get_mla_metadata = get_first_metadata if is_first else get_mla_metadata  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = flash_mla_with_kvcache  # type: ignore[attr-defined]
    return module
