"""Calibration text's way through a model, one layer at a time, in float32 on CPU.

embed  ->  of each layer: statistics (what enters its products, nothing moves on)  ->  advance (through the layer as it
is quantised)  ->  the next layer

Of a model no more than a layer's weights is in memory, and of text the residual of every token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention.paged_batch import NO_OPTIONS
from ..device.kv_cache import KVCache
from ..kv.layout import blocks_for
from ..models.checkpoint.weights import Checkpoint, LayerWeights
from ..models.families.spec import AttentionSpec
from ..models.layers.attention import StepMeta, options_of
from ..models.layers.layer import Layer, LayerRows, run_layers
from ..models.layers.rope import rope_tables
from ..models.layers.step import Step
from ..models.plan.kv_plan import layout_of
from ..models.plan.quantize_plan import Product
from ..models.plan.tensor_names import EMBED
from ..parallel.groups import Alone
from .statistics import InputRecorder, InputStatistics

CPU = torch.device("cpu")
BLOCK_TOKENS = 16


class LayerRuns:
    """Residuals of all sequences, before one layer of the model."""

    def __init__(self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> None:
        """sequences: token ids of each, at least two."""
        self._spec, self._longest = checkpoint.spec, max(map(len, sequences))
        # As in serving, where contexts may be as long as the model allows: some ropes depend on that.
        tables = rope_tables(self._spec, max(self._spec.max_position_embeddings, self._longest), CPU)
        self._cos_sin = tuple(table[: self._longest].clone() for table in tables)
        self._number = 0
        self._cached: tuple[int, KVCache] | None = None
        self.residuals = [_embedded(checkpoint, ids) for ids in sequences]

    @torch.inference_mode()
    def gather(self, weights: LayerWeights, found: Mapping[Product, InputStatistics]) -> None:
        """Add to `found` what enters those products of the layer that stands next. weights: float32, of that layer."""
        with InputRecorder(weights, found):
            for residual in self.residuals:
                self._compute(weights, residual.clone())

    @torch.inference_mode()
    def advance(self, weights: LayerWeights) -> None:
        """Move all sequences on by the layer that stands next. weights: float32, of that layer."""
        for residual in self.residuals:
            added = self._compute(weights, residual)
            if added is not None:
                residual.add_(added)
        self._number += 1

    def _compute(self, weights: LayerWeights, residual: Tensor) -> Tensor | None:
        """residual: float32 [T, H], of one sequence; overwritten. Returns what is to be added to it, [T, H]."""
        of, number = self._spec.layers[self._number], self._number
        options = options_of(of.attention, weights) if isinstance(of.attention, AttentionSpec) else NO_OPTIONS
        layer = Layer(of, weights, self._spec.rms_norm_eps, self._spec.rope_ids[number], options, 0, number=number)
        return run_layers([layer], LayerRows(residual, self._meta(len(residual))), self._cache(), Alone()).hidden

    def _cache(self) -> KVCache:
        """Return a cache of the layer that stands next, for one sequence."""
        if self._cached is None or self._cached[0] != self._number:
            spec = replace(self._spec, layers=(self._spec.layers[self._number],))
            layout = layout_of(spec, "float32", BLOCK_TOKENS)
            self._cached = self._number, KVCache(layout, blocks_for(self._longest, BLOCK_TOKENS), CPU)
        return self._cached[1]

    def _meta(self, num_tokens: int) -> StepMeta:
        """Return that of a step which computes one sequence from its beginning."""
        blocks = np.arange(blocks_for(num_tokens, BLOCK_TOKENS), dtype=np.int32)[None]
        length, last = np.array([num_tokens], dtype=np.int32), np.array([num_tokens - 1], dtype=np.int32)
        step = Step(length, length, blocks, np.zeros(num_tokens, dtype=np.int32), last)
        return step.meta(self._cos_sin, BLOCK_TOKENS)


def _embedded(checkpoint: Checkpoint, ids: Sequence[int]) -> Tensor:
    """Return the residual before the first layer, float32 [T, H]. Reads no more than these tokens' rows."""
    table = checkpoint.stored(EMBED, (slice(None), slice(None)))
    return table[torch.tensor(ids)].float() * checkpoint.spec.embedding_scale
