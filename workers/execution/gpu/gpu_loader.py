"""Loads the backend that computes on GPUs, with Triton kernels and CUDA graphs."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ....kernels.common import untried
from ....kernels.kv.kv_scales import can_store
from ...common.errors import ConfigError
from ...device.device import Device
from ...device.device_errors import LESS_KV, needing_memory
from ...device.device_group import FakeGroup, NcclGroup
from ...device.kv_cache import KVCache, SharedPool
from ...device.kv_convert import STORED
from ...device.upload import put_on
from ...kv.layout import ROWS, KVLayout
from ...models.checkpoint.packed_weights import read_weight
from ...models.checkpoint.weights import DTYPES, Checkpoint, DecoderWeights, Progress, load_weights
from ...models.families.spec import LatentSpec, ModelSpec
from ...models.heads.draft_head import DraftHead
from ...models.layers import mla
from ...models.layers.decoder import Decoder
from ...models.layers.rope import Ropes, rope_tables
from ...models.layers.row_exchange import RowExchange
from ...models.layers.step import NO_ROWS, Step, StepLimits
from ...models.plan.kv_plan import layout_of, tail_blocks
from ...models.plan.sharding import Share, spec_of
from ...models.plan.sparse_plan import sparse_layers
from ...parallel.groups import Group
from ...ranks.device_peers import DevicePeers
from ...sampling.sampler import Sampler
from ..common.backend import Backend, BackendConfig, Follow, MadePasses, StepDecoder, StepResources
from ..common.library_choice import OURS, PromptLibraries, choose_for_steps
from ..common.peer_backend import PeerBackend
from ..common.sum_choice import choose_sums
from .buckets import StepSizes
from .device_sampler import DeviceSampler
from .draft_passes import GpuHeadPasses, HeadWork, ModelPasses, PassChain, warm_up
from .forward import ForwardPieces
from .gpu_steps import GpuSteps
from .prompt_part import prompt_sizes
from .rank_passes import FollowedDraft, LaneDecoder, ModelWork, RankPasses, is_of_draft
from .rank_steps import RankSteps

log = logging.getLogger("diptych.worker")


def untried_kernels() -> list[str]:
    """Names of the kernels that have not run on a GPU and are wanted all the same. Raises ConfigError."""
    try:
        return untried.wanted()
    except ValueError as e:
        raise ConfigError(str(e)) from e


def check_known(spec: ModelSpec) -> None:
    """Raise ConfigError for a decoder that the GPU's kernels cannot compute."""
    if any(isinstance(of := layer.attention, LatentSpec) and not mla.has_kernels(of) for layer in spec.layers):
        what = "latents and heads of sizes other than powers of 2 from 16 on"
        raise ConfigError(f"the CUDA engine does not support {what} yet ({spec.architecture}): use device cpu")


def check_stored(kv_dtype: str, gpu: Device) -> None:
    """Raise ConfigError for KV that the kernels cannot store on this device. kv_dtype: of kv/dtypes.py."""
    if not can_store(STORED[kv_dtype], gpu.torch_device):
        text = f"needs a GPU with FP8 (NVIDIA's from compute capability 8.9 on), and {gpu.torch_device} has none"
        raise ConfigError(f"kv_dtype {kv_dtype} {text}: set it to int8, or leave it out")


class GpuLoader:
    """A BackendLoader."""

    packing = ROWS
    keeps_numbers = True

    def __init__(self, config: BackendConfig, gpu: Device, *, samples: bool) -> None:
        """samples: on rank 0."""
        self._config, self.gpu, self._samples = config, gpu, samples
        self.quantize = config.quantize
        self._sizes = StepSizes(config.max_running, config.max_draft_tokens, config.max_batch_tokens)
        self._sampler: DeviceSampler | None = None  # of all that is loaded: a draft has the target's tokens

    @property
    def torch_device(self) -> torch.device:
        return self.gpu.torch_device

    def load(self, checkpoint: Checkpoint, share: Share, progress: Progress) -> "GpuWeights":
        config, spec, gpu = self._config, checkpoint.spec, self.gpu
        check_known(spec)
        if not share.rank and (untried := untried_kernels()):
            log.warning("kernels that have not run on a GPU compute: %s", ", ".join(untried))
        with put_on(gpu, at_once=config.quantize is not None or bool(checkpoint.layouts)) as put:
            dtype = DTYPES[config.dtype]
            reader = checkpoint.reader(dtype, gpu.torch_device, progress, share, config.quantize, put)
            if not share.rank and (numbers := reader.describe()) is not None:
                log.info("products of the quantised checkpoint: %s", numbers)
            weights = load_weights(reader, read_weight)
            if self._samples and self._sampler is None:  # before KV takes the free memory
                with needing_memory("the buffers that tokens are sampled with", "lower max_running"):
                    self._sampler = DeviceSampler(spec.vocab_size, spec.eos_token_ids, self._sizes.max_rows, gpu)
        exchange = exchange_of(share)
        return GpuWeights(config, self._sizes, gpu, spec_of(spec, share), share, weights, self._sampler, exchange)

    def head_passes(self, head: DraftHead, cache: KVCache, cos_sin: Ropes) -> MadePasses:
        """See BackendLoader. Raises ConfigError where the device has too little memory."""
        assert self._sampler is not None
        check_known(head.spec.decoder)
        sizes, has_graphs = self._sizes, self._config.graph_tokens is not None
        with needing_memory("the buffers of a draft head", LESS_KV):
            work = HeadWork(head, cache, torch.cat(cos_sin, dim=1), DTYPES[self._config.dtype], sizes.max_rows)
        passes = RankPasses(self.gpu, work, sizes, sizes.max_rows, self._sampler.logits, has_graphs=has_graphs)
        chain = PassChain(passes, self._sampler, has_graphs=has_graphs)
        prompts = prompt_sizes(zip(head.spec.decoder.layers, head.parts.layers, strict=True), sizes.max_batch_tokens)
        warm_up(chain.lane, cache, cos_sin, prompts, work.prompt)
        made = GpuHeadPasses(head, work, cos_sin, chain)
        return MadePasses(made, made)

    def make_cache(
        self, layout: KVLayout, num_blocks: int, rank: int, shared: SharedPool | None, ranks: range | None = None
    ) -> KVCache:
        return KVCache(layout, num_blocks, self.torch_device, rank=rank, shared=shared, ranks=ranks, gpu=self.gpu)


@dataclass(slots=True, eq=False)
class GpuWeights:
    """LoadedWeights of the GPU backend."""

    config: BackendConfig
    sizes: StepSizes
    gpu: Device
    spec: ModelSpec  # of this rank's share
    share: Share
    weights: DecoderWeights
    sampler: DeviceSampler | None  # rank 0's
    exchange: RowExchange | None = None  # with the workers that share its experts
    libraries: PromptLibraries = OURS  # of the steps, once `step_bytes` has chosen

    def step_bytes(self) -> int:
        """Choose libraries, which take memory in a step, then measure it."""
        config, experts = self.config, None if self.exchange is None else self.share.experts
        with needing_memory("the largest step", "lower max_batch_tokens"):
            decoder = Decoder(self.spec, self.weights, experts=experts, peers=self.exchange)
            layout = layout_of(self.spec, config.kv_dtype, config.block_size)
            limits = self.sizes.max_batch_tokens, config.max_context_tokens
            self.libraries = choose_for_steps(self.gpu.lane("choices"), decoder, layout, *limits)
            return self.gpu.peak_bytes(partial(self._largest_step, decoder))

    def _largest_step(self, decoder: Decoder) -> None:
        """Device work, at the end of the longest contexts: of a rank, as if there were no others, for their numbers
        take the memory of its own; of workers that share experts with the rows of all."""
        config, device, most = self.config, self.gpu.torch_device, self.config.max_context_tokens
        num_seqs, num_left = divmod(self.sizes.max_batch_tokens, most)
        new = np.array([num_left] * (num_left > 0) + [most] * num_seqs, dtype=np.int32)
        layout = layout_of(self.spec, config.dtype, config.block_size)
        tables = np.zeros((len(new), layout.num_blocks_for(most)), dtype=np.int32)
        step = Step(new, np.full_like(new, most), tables, np.zeros(int(new.sum()), dtype=np.int32), NO_ROWS)
        meta = step.meta(rope_tables(self.spec, most, device), config.block_size)
        tokens = torch.zeros(step.num_tokens, dtype=torch.int64, device=device)
        paged = replace(meta.paged, library=self.libraries.paged, latent_library=self.libraries.latent)
        nowhere = replace(meta, slots=torch.full_like(meta.slots, -1), paged=paged)
        decoder.forward(tokens, KVCache(layout, 1, device), nowhere)

    def build(self, resources: StepResources) -> Backend:
        assert self.sampler is not None
        sockets = resources.peer_sockets
        if sockets is None:
            return GpuSteps(self._rank_steps(resources), self.sampler, resources.ranks)
        assert self.exchange is not None
        peers = DevicePeers(sockets, self.gpu, self.exchange)
        with ExitStack() as failing:
            failing.callback(peers.close)
            steps = GpuSteps(self._rank_steps(resources, peers), self.sampler, peers=peers)
            failing.callback(steps.close)
            steps.check_ranks()
            failing.pop_all()
        return PeerBackend(steps, sockets, resources.on_loss, (self.config.cores or ())[:1])

    def follow(self, resources: StepResources) -> Follow:
        return self._rank_steps(resources).follow

    def step_decoder(self, resources: StepResources, skipped: Sequence[int] = ()) -> StepDecoder:
        steps = self._lane_decoder(resources, skipped)
        if not self.sizes.max_draft_tokens:
            return steps
        assert self.sampler is not None
        passes, has_graphs = self._rank_passes(steps), self.config.graph_tokens is not None
        turns = resources.turns if self.exchange is not None else None
        return ModelPasses(steps, PassChain(passes, self.sampler, resources.ranks, turns, has_graphs=has_graphs))

    def follow_draft(self, compute: Follow, resources: StepResources, skipped: Sequence[int] = ()) -> Follow:
        steps, cache = self._lane_decoder(resources, skipped), resources.cache
        limits = StepLimits(self.config.block_size, cache.num_blocks, len(steps.cos_sin[0]), self.spec.vocab_size)
        draft = FollowedDraft(self.gpu, steps, self._rank_passes(steps), limits)
        return lambda message: (draft.follow if is_of_draft(message) else compute)(message)

    def _lane_decoder(self, resources: StepResources, skipped: Sequence[int]) -> LaneDecoder:
        experts, first_kv = self.share.experts, resources.first_layer
        decoder = Decoder(self.spec, self.weights, resources.group, experts, self.exchange, first_kv)
        decoder = decoder.without(skipped) if skipped else decoder
        sampler, lane = Sampler(self.spec.eos_token_ids), self.gpu.lane("drafts")
        return LaneDecoder(decoder, resources.cache, resources.cos_sin, sampler, lane, resources.ranks)

    def _rank_passes(self, steps: LaneDecoder) -> RankPasses:
        """Make the passes of this rank, and compile the kernels of all; with the other ranks."""
        sizes, has_graphs = self.sizes, self.config.graph_tokens is not None
        decoder, cache, cos_sin = steps.decoder, steps.cache, steps.cos_sin
        work = ModelWork(ForwardPieces(decoder, cache), torch.cat(cos_sin, dim=1))
        max_rows, logits = min(2 * sizes.max_sequences, sizes.max_rows), self.sampler and self.sampler.logits
        passes = RankPasses(self.gpu, work, sizes, max_rows, logits, has_graphs=has_graphs)
        if self.exchange is not None:  # layers of the target, which compute no prompt here and are compiled
            return passes
        prompts = prompt_sizes(((of.spec, of.weights) for of in decoder.layers), sizes.max_batch_tokens)
        warm_up(steps.lane, cache, cos_sin, prompts, lambda tokens, meta: decoder.forward(tokens, cache, meta))
        return passes

    def _rank_steps(self, resources: StepResources, peers: DevicePeers | None = None) -> RankSteps:
        budget, ranks = self.config.sparse_budget, resources.ranks
        with ranks.waiting() if ranks is not None else nullcontext():
            self._choose_sums(resources.group)
        cache = resources.cache
        cache.keep_bounds(sparse_layers(self.spec, budget), budget)
        num_tail_blocks = tail_blocks(cache.layout, self.sizes.max_sequences, self.sizes.max_batch_tokens)
        cache.keep_tail(self.config.dtype, ROWS, num_tail_blocks)
        return RankSteps(
            self.gpu,
            Decoder(self.spec, self.weights, resources.group, self.share.experts, self.exchange),
            resources,
            self.sampler,
            self.sizes,
            graph_tokens=self.config.graph_tokens,
            peers=peers,
            libraries=self.libraries,
        )

    def _choose_sums(self, group: Group) -> None:
        """Choose with the other ranks what adds up their parts, if there are any."""
        if isinstance(group, NcclGroup | FakeGroup):
            most = max(self.sizes.max_rows, self.sizes.max_batch_tokens)
            has_graphs = self.config.graph_tokens is not None
            with needing_memory("the sums of ranks", LESS_KV):
                choose_sums(self.gpu, group, self.weights.embed, most, has_graphs=has_graphs)


def exchange_of(share: Share) -> RowExchange | None:
    """Return the exchange of a worker that shares experts with others; None: it has its own."""
    if share.data_rank is None or not share.experts:
        return None
    return RowExchange(share.data_rank, next(iter(share.experts.values())).num_ranks)
