"""Whole KV blocks between pools of one layout: copied, gathered into a buffer, scattered out of one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.lang import jit, kernel_for, tl
from ..common.tuning import chip_of

_BYTES = 8192  # of a program at once: four vectors a thread
_NUM_WARPS = 4


def copy_blocks(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None) -> None:
    """target[target_ids[i], :] = source[source_ids[i], :] for every i, whatever the numbers are.

    source, target: [blocks, layers, ...], of one dtype, with contiguous axes after the first two and any strides of
    these: so a layer-major pool is given transposed. Ids: [n] int64 on the device, of blocks that exist; below 0: no
    copy, so that a launch may be larger than its work. None: blocks 0, 1, ... in order (a buffer: gather or scatter).
    Both may be one pool if no block that is written is read or written again.
    """
    run = kernel_for(source, copy_blocks_triton, copy_blocks_twin)
    run(source, target, source_ids, target_ids)


def copy_blocks_twin(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None) -> None:
    num = _checked(source, target, source_ids, target_ids)
    ids = torch.arange(num, device=source.device)
    read, written = ids if source_ids is None else source_ids, ids if target_ids is None else target_ids
    copied = (read >= 0) & (written >= 0)
    target[written[copied]] = source[read[copied]]


def copy_blocks_triton(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None) -> None:
    num_blocks = _checked(source, target, source_ids, target_ids)
    num_layers = source.shape[1]
    words, strides = _as_words([source, target])
    num_words = words[0].numel() // max(source.shape[0] * num_layers, 1)
    block = _BYTES // words[0].element_size()
    num_tiles = num_blocks * num_layers * -(-num_words // block)
    if num_tiles:
        _copy_blocks_kernel[(min(num_tiles, chip_of(source.device).resident_programs(_NUM_WARPS)),)](
            *words,
            source_ids,
            target_ids,
            *strides,
            num_blocks,
            num_layers,
            num_words,
            BLOCK=block,
            num_warps=_NUM_WARPS,
        )


def _checked(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None) -> int:
    """Check the arguments and return the number of blocks to copy."""
    assert source.dtype == target.dtype and source.shape[1:] == target.shape[1:] and source.dim() >= 3
    assert source[0, 0].is_contiguous() and target[0, 0].is_contiguous()
    given = [ids for ids in (source_ids, target_ids) if ids is not None]
    assert given and len({len(ids) for ids in given}) == 1
    assert all(ids.dim() == 1 and ids.dtype == torch.int64 and ids.is_contiguous() for ids in given)
    num = len(given[0])
    assert source_ids is not None or num <= source.shape[0]
    assert target_ids is not None or num <= target.shape[0]
    return num


def _as_words(pools: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The pools as the widest integers that their runs and strides are made of, and their first two strides."""
    size = pools[0].element_size()
    run_bytes = pools[0][0, 0].numel() * size
    steps = [run_bytes, *(s * size for pool in pools for s in (*pool.stride()[:2], pool.storage_offset()))]
    dtype = next(d for d in (torch.int32, torch.int16, torch.int8) if all(s % d.itemsize == 0 for s in steps))
    flat = [pool.flatten(2).view(dtype) for pool in pools]
    return flat, [s for pool in flat for s in pool.stride()[:2]]


@jit
def _copy_blocks_kernel(
    source: tl.tensor,  # [blocks, num_layers, num_words] of whole numbers
    target: tl.tensor,  # [blocks, num_layers, num_words]
    source_ids: tl.tensor | None,  # [num_blocks] int64, or None
    target_ids: tl.tensor | None,  # [num_blocks] int64, or None
    source_block_stride: int,
    source_layer_stride: int,
    target_block_stride: int,
    target_layer_stride: int,
    num_blocks: int,
    num_layers: int,
    num_words: int,
    BLOCK: tl.constexpr,
):
    """Grid: (programs that are resident at once, or fewer,): a program copies every so many-th tile of BLOCK words of
    one layer of one block."""
    num_parts = tl.cdiv(num_words, BLOCK)
    for tile in range(tl.program_id(0), num_blocks * num_layers * num_parts, tl.num_programs(0)):
        run = tile // num_parts
        index = run // num_layers
        layer = tl.cast(run % num_layers, tl.int64)
        read = tl.cast(index, tl.int64) if source_ids is None else tl.load(source_ids + index)
        written = tl.cast(index, tl.int64) if target_ids is None else tl.load(target_ids + index)
        if (read >= 0) & (written >= 0):
            word = tile % num_parts * BLOCK + tl.arange(0, BLOCK)
            inside = word < num_words
            numbers = tl.load(source + read * source_block_stride + layer * source_layer_stride + word, mask=inside)
            tl.store(target + written * target_block_stride + layer * target_layer_stride + word, numbers, mask=inside)
