"""Loads the backend that computes with torch's own operators on CPU: the others' reference and fallback."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...device.kv_cache import KVCache, SharedPool
from ...device.upload import put_on
from ...kv.layout import ROWS, KVLayout
from ...models.checkpoint.weights import DTYPES, Checkpoint, DecoderWeights, Progress, load_weights
from ...models.families.spec import ModelSpec
from ...models.heads.draft_head import DraftHead
from ...models.heads.passes import TorchPasses
from ...models.layers.decoder import Decoder
from ...models.layers.rope import Ropes
from ...models.layers.step import Int32s, Step, StepLimits
from ...models.plan.sharding import Share, spec_of
from ...models.plan.sparse_plan import sparse_layers
from ...parallel.groups import GlooGroup
from ...ranks.data_parallel import DataParallelLoop, join
from ...sampling.grammar_masks import FIRST_S, GrammarMasks
from ...sampling.sampler import Sampler
from ..common.backend import Backend, BackendConfig, Follow, MadePasses, StepDecoder, StepResources
from ..common.host_backend import HostBackend
from ..common.ranked_decoder import follow_both, with_ranks
from .eager_steps import EagerStepDecoder, EagerSteps


class EagerLoader:
    """A BackendLoader."""

    packing = ROWS
    quantize = None
    keeps_numbers = False
    gpu = None
    torch_device = torch.device("cpu")

    def __init__(self, config: BackendConfig) -> None:
        self._config = config

    def load(self, checkpoint: Checkpoint, share: Share, progress: Progress) -> "EagerWeights":
        config = self._config
        with put_on(None, at_once=True) as put:
            dtype = DTYPES[config.dtype]
            reader = checkpoint.reader(dtype, self.torch_device, progress, share, config.quantize, put)
            return EagerWeights(config, checkpoint.spec, share, load_weights(reader))

    def head_passes(self, head: DraftHead, cache: KVCache, cos_sin: Ropes) -> MadePasses:
        """See BackendLoader."""
        return MadePasses(TorchPasses(head, cache, cos_sin))

    def make_cache(
        self, layout: KVLayout, num_blocks: int, rank: int, shared: SharedPool | None, ranks: range | None = None
    ) -> KVCache:
        return KVCache(layout, num_blocks, self.torch_device, rank=rank, shared=shared, ranks=ranks)


@dataclass(frozen=True, slots=True)
class EagerWeights:
    """LoadedWeights of the eager backend."""

    config: BackendConfig
    spec: ModelSpec  # of the whole model
    share: Share
    weights: DecoderWeights

    def step_bytes(self) -> int:
        return 0

    def build(self, resources: StepResources) -> Backend:
        self._prepare(resources.cache)
        sockets = resources.peer_sockets
        peers = join(sockets, GlooGroup.join) if sockets is not None else None
        decoder = Decoder(self._own_spec, self.weights, resources.group, self.share.experts, peers)
        masks = GrammarMasks(self.spec.vocab_size, self.spec.eos_token_ids, self.config.cores, first_s=FIRST_S)
        sampler, ranks = Sampler(self.spec.eos_token_ids, masks=masks), resources.ranks
        steps = EagerSteps(decoder, resources.cache, resources.cos_sin, sampler, ranks, peers, resources.taken)
        if sockets is None:
            return HostBackend(steps, resources.cache, ranks)
        loop = DataParallelLoop(sockets, steps, resources.on_loss, (self.config.cores or ())[:1])
        return HostBackend(steps, resources.cache, ranks, loop)

    def follow(self, resources: StepResources) -> Follow:
        config, cache = self.config, resources.cache
        self._prepare(cache)
        sizes = config.block_size, cache.num_blocks, config.max_context_tokens, self.spec.vocab_size
        limits = StepLimits(*sizes, cache.bounds.num_chosen, cache.num_tail_blocks)
        decoder = Decoder(self._own_spec, self.weights, resources.group, self.share.experts)

        def compute(message: Int32s) -> None:
            decoder.compute(Step.from_message(message, limits), cache, resources.cos_sin)

        return compute

    def step_decoder(self, resources: StepResources, skipped: Sequence[int] = ()) -> StepDecoder:
        group, first_kv = resources.group, resources.first_layer
        decoder = Decoder(self._own_spec, self.weights, group, self.share.experts, first_kv=first_kv)
        decoder = decoder.without(skipped) if skipped else decoder
        made = EagerStepDecoder(decoder, resources.cache, resources.cos_sin, Sampler(self.spec.eos_token_ids))
        return with_ranks(made, resources.ranks)

    def follow_draft(self, compute: Follow, resources: StepResources, skipped: Sequence[int] = ()) -> Follow:
        return follow_both(compute, self.step_decoder(resources, skipped), resources, self.spec.vocab_size)

    def _prepare(self, cache: KVCache) -> None:
        """Add to the cache what steps keep beside it."""
        cache.keep_bounds(sparse_layers(self.spec, self.config.sparse_budget), self.config.sparse_budget)
        cache.keep_tail(self.config.dtype, ROWS)

    @property
    def _own_spec(self) -> ModelSpec:
        return spec_of(self.spec, self.share)
