"""Bounds of keys on a rank's device (QUEST): those of blocks that were written before a sparse decode reads them first.

A decode brings the bounds of its two newest blocks up to date itself (kernels/attention/sparse_attention.py). Those of
its other blocks are computed here, before the step, where they do not stand: at the first sparse step of a sequence,
whose prompt was computed without, or whose KV came from elsewhere.

    missing (rank 0's host): blocks, from Bounded's account   ->   launch (each rank), on the lane of the steps
"""

from collections.abc import Sequence as SequenceOf
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.quest import summarise_triton, summarise_twin
from ....kernels.common.lang import kernel_for
from ...core.sequence import ScheduledSequence
from ...device.device import Device, Lane
from ...device.kv_cache import KVCache
from ...models.layers.layer import Layer
from ..common.bounded import FULL
from .step_plan import Ints

_UPDATED = 2  # newest blocks, by the decode itself


def missing(
    entries: SequenceOf[ScheduledSequence], context_lens: SequenceOf[int], bounded: SequenceOf[int], block_size: int
) -> Ints:
    """Return the blocks, all full, whose bounds a step needs and has not. context_lens: with the new tokens; bounded:
    see Bounded.tokens, of each entry, or empty."""
    blocks: list[int] = []
    for entry, context_len, num_bounded in zip(entries, context_lens, bounded, strict=False):
        if num_bounded != FULL:
            last = (context_len - 1) // block_size
            blocks += entry.sequence.block_table[num_bounded // block_size : last + 1 - _UPDATED]
    return np.array(blocks, dtype=np.int32)


class KeyBoundsPart:
    def __init__(self, device: Device, cache: KVCache, layers: SequenceOf[Layer]) -> None:
        """layers: of the decoder; those with bounds are sparse."""
        bounds = cache.bounds.layers
        self._device, self._block_size = device, cache.layout.block_size
        self._layers = [(cache.layer(of.kv_id), bounds[of.number]) for of in layers if of.number in bounds]

    def launch(self, lane: Lane, blocks: Ints) -> None:
        """Compute the bounds of these full blocks, after what is on the lane. blocks: [n], at least one."""
        sent = self._device.pinned(blocks.shape, torch.int64)
        sent.numpy()[:] = blocks
        lane.run(partial(self._compute, sent))

    def _compute(self, sent: Tensor) -> None:
        """Device work."""
        for cache, bounds in self._layers:
            blocks = sent.to(cache.device, non_blocking=True)
            lengths = torch.full((len(blocks),), self._block_size, dtype=torch.int32, device=cache.device)
            summaries = bounds[..., : cache.shape[4]].transpose(1, 2)
            kernel_for(cache, summarise_triton, summarise_twin)(cache, summaries, blocks, lengths)
