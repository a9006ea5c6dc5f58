"""A draft head computed by the compiled CPU kernels, several passes in one foreign call: weights of a DraftHead packed.

Where its sizes do not fit, torch computes it (`why_torch_head`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from ....kernels.cpu.formats import Format, NumberLayout
from ....kernels.cpu.heads import CompiledPasses, PackedHead
from ....kernels.cpu.layer import CompiledLayers, PackedOuter
from ....kernels.cpu.library import Team
from ....kernels.cpu.linear import PackedLinear, pack
from ...device.kv_cache import KVCache
from ...models.checkpoint.weights import LayerTensors, LayerWeights
from ...models.heads.draft_head import DraftHead, norm_aux
from ...models.heads.passes import GreedyDrafts, PassOutput
from ...models.layers.rope import Ropes
from ...models.layers.step import Step
from .compiled import Arena, packed_layer
from .compiled_shape import attention_ids, shape_of


class CompiledHead:
    """HostPasses of a head for which `why_torch_head` gives no reason."""

    def __init__(self, team: Team, head: DraftHead, cache: KVCache, cos_sin: Ropes) -> None:
        """cos_sin: of the head's ropes. The head's weights are packed; those that are read as they are are kept."""
        spec, parts, arena = head.spec.decoder, head.parts, Arena()
        block_size, dtype = cache.layout.block_size, parts.fc.dtype if parts.fc is not None else parts.norm.dtype

        def packed(weight: Tensor | None) -> PackedLinear | None:
            return None if weight is None else pack(team, [weight], take=arena.take)

        kinds = zip(spec.layers, attention_ids(spec), parts.layers, strict=True)
        layers = [packed_layer(team, _HeldTensors(own), arena, of, attention) for of, attention, own in kinds]
        lm_head = pack(team, [parts.lm_head], take=arena.take)
        embed = None if parts.embed is parts.lm_head else parts.embed.contiguous()
        outer = PackedOuter(parts.norm.float(), lm_head, embed)
        own = PackedHead(
            parts.embed_norm.float(),
            parts.hidden_norm.float(),
            packed(parts.fc),
            packed(parts.joined),
            parts.to_target,
            norms_residual=parts.norms_residual,
            norms_output=parts.norms_output,
        )
        shape = replace(shape_of(spec, cos_sin, block_size, dtype), vocab_size=head.spec.draft_vocab_size)
        kv = [cache.layer(parts.first_kv_layer + i) for i in range(spec.num_layers)]
        self._passes = CompiledPasses(team, shape, own, CompiledLayers(team, shape, layers, outer, kv))
        self._aux_norms, self._eps, self._block_size = parts.aux_norms, spec.rms_norm_eps, block_size

    def store(self, step: Step, aux: Tensor) -> None:
        self._take(step)
        self._passes.store(self._aux(aux))

    def first(self, step: Step, aux: Tensor) -> PassOutput:
        self._take(step)
        return PassOutput(*self._passes.logits(self._aux(aux)))

    def further(self, step: Step, hidden: Tensor) -> PassOutput:
        self._take(step)
        return PassOutput(*self._passes.logits(None, hidden))

    def greedy(self, step: Step, aux: Tensor, num_active: Sequence[int]) -> GreedyDrafts:
        self._take(step, len(num_active) - 1)
        ids, chances = self._passes.greedy(self._aux(aux), num_active)
        drafts = ([each[:num].tolist() for each, num in zip(of, num_active, strict=True)] for of in (ids, chances))
        return GreedyDrafts(*drafts)

    def _aux(self, aux: Tensor) -> Tensor:
        return norm_aux(aux, self._aux_norms, self._eps).contiguous()

    def _take(self, step: Step, num_further: int = 0) -> None:
        """Write a step into the memory of passes. num_further: passes that follow it, of one entry each."""
        memory, num_seqs = self._passes.memory, len(step.num_new)
        width = -(-(int(step.context_lens.max()) + num_further) // self._block_size)
        memory.begin(step.num_new, step.context_lens, step.num_tokens, width)
        memory.set_tables(np.ascontiguousarray(step.tables), np.arange(num_seqs))
        memory.token_ids[: step.num_tokens] = step.token_ids


class _HeldTensors(LayerTensors):
    """Tensors of a layer that was read already."""

    def __init__(self, weights: LayerWeights) -> None:
        self._weights = weights

    def has(self, field: str) -> bool:
        return getattr(self._weights, field) is not None

    def parts(self, field: str) -> list[Tensor]:
        return [self.tensor(field)]

    def tensor(self, field: str) -> Tensor:
        found: Tensor = getattr(self._weights, field)
        return found

    def layout(self, field: str) -> NumberLayout | None:
        return None

    def format(self, field: str) -> Format:
        return Format.PLAIN

    def scales(self, field: str) -> Tensor | None:
        return None
