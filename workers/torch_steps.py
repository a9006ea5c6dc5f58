"""A batch computed with torch, on any device: the twin of compiled_steps.py, and what runs where that cannot."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .kv_cache import KVCache
from .launched import Compute
from .models.decoder import Decoder
from .models.rope import Ropes
from .rank_processes import RankProcesses
from .runner import LayerWatch
from .sampler import Sampler
from .sequence import Batch, SampledToken, ScheduledSequence
from .step import Step


class TorchSteps:
    def __init__(
        self, decoder: Decoder, cache: KVCache, cos_sin: Ropes, sampler: Sampler, ranks: RankProcesses | None
    ) -> None:
        """cos_sin: on the device that computes. `ranks`: those that compute with us."""
        self._decoder, self._cache, self._cos_sin = decoder, cache, cos_sin
        self._sampler, self._ranks = sampler, ranks
        self._device = cache.tensor.device

    def prepare(self, batch: Batch, watch: LayerWatch | None) -> Compute:
        return partial(self._compute, batch, watch)

    def _compute(self, batch: Batch, watch: LayerWatch | None) -> list[SampledToken]:
        """Raises RankLost."""
        # Attention wants sequences with one new token first; order is restored by sampling in the batch's own order.
        order = sorted(range(len(batch.entries)), key=lambda i: batch.entries[i].num_new > 1)
        entries = [batch.entries[i] for i in order]
        hidden = self._forward(entries, self._stored(watch))
        last_rows = np.cumsum([e.num_new for e in entries]) - 1
        rows = {id(e): row for e, row in zip(entries, last_rows.tolist(), strict=True)}
        sampled = [e for e in batch.entries if e.samples]
        if not sampled:
            return []
        logits = self._decoder.logits(hidden[self._tensor(np.array([rows[id(e)] for e in sampled]))])
        return self._sampler.sample(logits, [e.sequence for e in sampled])

    def _stored(self, watch: LayerWatch | None) -> Callable[[int], None]:
        """Passes on the layers that `watch` waits for, once the device has really stored them."""
        ends = set(watch.ends if watch else ())

        def stored(num_layers: int) -> None:
            if watch is not None and num_layers in ends:
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                watch.reached(num_layers)

        return stored

    def _forward(self, entries: SequenceOf[ScheduledSequence], stored: Callable[[int], None]) -> Tensor:
        """Final hidden states of all new tokens, [T, H]."""
        block_size = self._cache.layout.block_size
        step = Step.of(entries, block_size)
        tokens: list[int] = []
        for entry in entries:
            start = entry.sequence.num_computed
            tokens += entry.sequence.token_ids[start : start + entry.num_new]
        if self._ranks is not None:
            self._ranks.tell(step)
        meta = step.meta(self._cos_sin, block_size)
        return self._decoder.forward(self._tensor(np.array(tokens)), self._cache, meta, stored)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
