"""Packages of FlashAttention 3 without its kernels: the released signatures (hopper/), as strict, and computed
plainly."""

import importlib.machinery
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from diptych.kernels.attention.paged_batch import AttentionOptions, PagedBatch
from diptych.kernels.attention.prefill_attention import prefill_attention_twin


def flash_attn_with_kvcache(  # noqa: PLR0917 (as released)
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """q: [T, N, D]; k_cache and v_cache: [num_pages, page_size, K, D]. Of what is optional, what prompts need."""
    unused: tuple[Any, ...] = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new)
    unused += (rotary_seqlens, q_descale, k_descale, v_descale, scheduler_metadata, pack_gqa)
    assert unused == (None,) * len(unused) and not attention_chunk and rotary_interleaved
    assert not sm_margin and not return_softmax_lse and num_splits == 1 and causal
    assert isinstance(cache_seqlens, Tensor) and page_table is not None and cu_seqlens_q is not None
    num_seqs = len(page_table)
    assert cache_seqlens.shape == (num_seqs,) and cu_seqlens_q.shape == (num_seqs + 1,) and not cu_seqlens_q[0]
    for numbers in (cache_seqlens, cu_seqlens_q):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous()
    assert page_table.dtype == torch.int32 and page_table.stride(-1) == 1
    assert q.dtype == k_cache.dtype == v_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1 and k_cache.shape == v_cache.shape
    assert q.shape[2] == k_cache.shape[3] <= 256 and q.shape[2] % 8 == 0 and q.shape[1] % k_cache.shape[2] == 0
    num_new = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max(num_new) and cu_seqlens_q[-1] == len(q)
    left, right = window_size
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    options = AttentionOptions(softmax_scale, softcap, left + 1)
    batch = PagedBatch(
        page_table, cache_seqlens, cu_seqlens_q, cache_seqlens.tolist(), num_new, 0, block_size=k_cache.shape[1]
    )
    return prefill_attention_twin(q, torch.stack((k_cache, v_cache), dim=1), batch, options)


def flash_attn_varlen_func(  # noqa: PLR0917 (as released)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:
    """q: [T, N, D]; k: [C, K, D] and v: [C, K, V], of all contexts. As a build without windows."""
    unused: tuple[Any, ...] = (seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa)
    assert unused == (None,) * len(unused) and not attention_chunk and not deterministic and not return_attn_probs
    assert not sm_margin and num_splits == 1 and causal and tuple(window_size) == (-1, -1)
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    for numbers in (cu_seqlens_q, cu_seqlens_k):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous() and not numbers[0]
    lens, num_new = cu_seqlens_k.diff(), cu_seqlens_q.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (max(num_new), int(lens.max()))
    assert (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])) == (len(q), len(k))
    dim = v.shape[2]
    assert k.shape[:2] == v.shape[:2] and (dim == k.shape[2] or (k.shape[2], dim) == (192, 128))
    v = torch.nn.functional.pad(v, (0, k.shape[2] - dim))
    tables = torch.zeros(len(lens), int(lens.max()), dtype=torch.int32)
    for row, (start, length) in zip(tables, zip(cu_seqlens_k.tolist(), lens.tolist(), strict=False), strict=True):
        row[:length] = torch.arange(start, start + length)
    batch = PagedBatch(tables, lens, cu_seqlens_q, lens.tolist(), num_new, 0, block_size=1)
    cache = torch.stack((k, v), dim=1)[:, :, None]
    return prefill_attention_twin(q, cache, batch, AttentionOptions(softmax_scale, softcap))[..., :dim]


def make_package(name: str, *, lacks: str = "") -> ModuleType:
    """Make the module, for `sys.modules`. lacks: "windows" or "caps", which were left out when it was compiled."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for function in (flash_attn_with_kvcache, flash_attn_varlen_func):
        setattr(module, function.__name__, partial(_compiled, function, lacks))
    return module


def _compiled(function: Callable[..., Tensor], lacks: str, q: Tensor, *others: Any, **named: Any) -> Tensor:
    """Refuse as hopper/flash_api.cpp does. A window that hides nothing is none there."""
    longest = named["page_table"].shape[1] * others[0].shape[1] if "page_table" in named else named["max_seqlen_k"]
    if lacks == "windows" and 0 <= named["window_size"][0] < longest - 1:
        raise RuntimeError("This flash attention build does not support local attention.")
    if lacks == "caps" and named["softcap"]:
        raise RuntimeError("This flash attention build does not support tanh softcapping.")
    return function(q, *others, **named)
