"""Loads the backend that computes with the compiled CPU kernels."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....kernels.cpu.library import Library, Team
from ....kernels.cpu.sample import RowSampler
from ...core.batch_tables import BatchTables
from ...device.kv_cache import KVCache, SharedPool
from ...device.upload import put_on
from ...kv.layout import DOT, KVLayout
from ...models.checkpoint.weights import DTYPES, Checkpoint, Progress
from ...models.families.spec import ModelSpec
from ...models.head_specs.head_limits import why_torch_head
from ...models.heads.draft_head import DraftHead
from ...models.heads.passes import TorchPasses
from ...models.layers.rope import Ropes
from ...models.layers.step import Int32s, Step, StepLimits
from ...models.plan.sharding import Share, spec_of
from ...models.plan.sparse_plan import sparse_layers
from ...ranks.step_executor import ThreadExecutor
from ...sampling.grammar_masks import FIRST_S, GrammarMasks
from ...sampling.sampler import Sampler
from ..common.backend import Backend, BackendConfig, Follow, MadePasses, StepDecoder, StepResources
from ..common.bounded import Bounded
from ..common.host_backend import HostBackend
from ..common.ranked_decoder import follow_both, with_ranks
from ..common.tail_blocks import tail_blocks_of
from .compiled import CompiledDecoder, CompiledWeights, read_weights
from .compiled_head import CompiledHead
from .compiled_steps import CompiledStepDecoder, CompiledSteps, KeptBeside, runs_between
from .cpu_kernels import make_team
from .elastic_team import ElasticTeam, share_cores

log = logging.getLogger("diptych.worker")


class CompiledLoader:
    """A BackendLoader."""

    packing = DOT
    keeps_numbers = True
    gpu = None
    torch_device = torch.device("cpu")

    def __init__(self, config: BackendConfig, library: Library) -> None:
        self._config, self._library = config, library
        self.quantize = config.quantize
        self._team: Team | None = None  # of all that is loaded: one model computes at a time
        self._shared: ElasticTeam | None = None  # whose team it is

    def load(self, checkpoint: Checkpoint, share: Share, progress: Progress) -> "PackedWeights":
        config, team = self._config, self.team
        with put_on(None, at_once=True) as put:
            dtype = DTYPES[config.dtype]
            reader = checkpoint.reader(dtype, self.torch_device, progress, share, config.quantize, put)
            if not share.rank and (numbers := reader.describe()) is not None:
                log.info("products of the quantised checkpoint: %s", numbers)
            weights = read_weights(team, reader, sparse_layers(checkpoint.spec, config.sparse_budget))
            return PackedWeights(config, checkpoint.spec, share, team, weights, self._shared)

    @property
    def team(self) -> Team:
        """Threads that compute all that is loaded."""
        if self._team is None:
            config, num_threads = self._config, torch.get_num_threads()
            if config.share_cores and config.cores and len(config.cores) == num_threads:
                self._shared = share_cores(self._library, config.cores)
            self._team = self._shared.team if self._shared else make_team(self._library, num_threads, config.cores)
        return self._team

    def head_passes(self, head: DraftHead, cache: KVCache, cos_sin: Ropes) -> MadePasses:
        """See BackendLoader."""
        is_compiled = why_torch_head(head.spec, self._config.block_size, cache.layout.dtype) is None
        made = CompiledHead(self.team, head, cache, cos_sin) if is_compiled else TorchPasses(head, cache, cos_sin)
        return MadePasses(made, rows=RowSampler(self.team))

    def make_cache(
        self, layout: KVLayout, num_blocks: int, rank: int, shared: SharedPool | None, ranks: range | None = None
    ) -> KVCache:
        return KVCache(
            layout, num_blocks, self.torch_device, rank=rank, shared=shared, ranks=ranks, library=self._library
        )


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """LoadedWeights of the compiled backend."""

    config: BackendConfig
    spec: ModelSpec  # of the whole model
    share: Share
    team: Team
    weights: CompiledWeights
    shared: ElasticTeam | None  # whose team it is

    def step_bytes(self) -> int:
        return 0

    def build(self, resources: StepResources) -> Backend:
        config, cache, ranks = self.config, resources.cache, resources.ranks
        self._prepare(cache)
        num_blocks = cache.layout.num_blocks_for(len(resources.cos_sin[0]))
        runs_ahead = config.look_ahead and ranks is None
        tables = [BatchTables(config.block_size, num_blocks) for _ in range(2 if runs_ahead else 1)]
        masks = GrammarMasks(self.spec.vocab_size, self.spec.eos_token_ids, config.cores, first_s=FIRST_S)
        sampler = Sampler(self.spec.eos_token_ids, RowSampler(self.team), masks)
        kept = KeptBeside(Bounded(cache.bounds.budget, config.block_size), tail_blocks_of(cache))
        steps = CompiledSteps(self._decoder(resources), tables, sampler, ranks, kept, resources.taken)
        executor = ThreadExecutor((config.cores or ())[:1]) if runs_ahead else None
        return HostBackend(steps, cache, ranks, executor, self.shared)

    def follow(self, resources: StepResources) -> Follow:
        config, cache = self.config, resources.cache
        self._prepare(cache)
        sizes = config.block_size, cache.num_blocks, config.max_context_tokens, self.spec.vocab_size
        limits = StepLimits(*sizes, cache.bounds.num_chosen, cache.num_tail_blocks)
        decoder = self._decoder(resources)

        def compute(message: Int32s) -> None:
            decoder.follow(Step.from_message(message, limits))

        return compute

    def step_decoder(self, resources: StepResources, skipped: Sequence[int] = ()) -> StepDecoder:
        decoder, sampler = self._decoder(resources), Sampler(self.spec.eos_token_ids, RowSampler(self.team))
        runs = runs_between(skipped, self.spec.num_layers) if skipped else None
        return with_ranks(CompiledStepDecoder(decoder, sampler, runs), resources.ranks)

    def follow_draft(self, compute: Follow, resources: StepResources, skipped: Sequence[int] = ()) -> Follow:
        return follow_both(compute, self.step_decoder(resources, skipped), resources, self.spec.vocab_size)

    def _prepare(self, cache: KVCache) -> None:
        """Add to the cache what steps keep beside it."""
        cache.keep_bounds(sparse_layers(self.spec, self.config.sparse_budget), self.config.sparse_budget)
        cache.keep_tail(self.config.dtype, DOT)

    def _decoder(self, resources: StepResources) -> CompiledDecoder:
        own, cache, cos_sin = spec_of(self.spec, self.share), resources.cache, resources.cos_sin
        return CompiledDecoder(
            own, self.weights, cache, cos_sin, self.team, resources.group, self.shared, resources.first_layer
        )
