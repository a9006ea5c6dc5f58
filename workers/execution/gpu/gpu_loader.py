"""Loads the backend that computes on GPUs, with Triton kernels and CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...common.errors import ConfigError
from ...device.device import Device
from ...device.device_errors import needing_memory
from ...device.kv_cache import KVCache, SharedPool
from ...device.upload import put_on
from ...kv.layout import ROWS, KVLayout
from ...models.checkpoint.weights import DTYPES, Checkpoint, DecoderWeights, Progress, load_weights
from ...models.families.spec import ModelSpec
from ...models.layers.decoder import Decoder
from ...models.plan.sharding import Share, spec_of
from ...models.plan.sparse_plan import sparse_layers
from ..common.backend import Backend, BackendConfig, Follow, StepDecoder, StepResources
from .buckets import StepSizes
from .device_sampler import DeviceSampler
from .gpu_steps import GpuSteps
from .rank_steps import RankSteps


class GpuLoader:
    """A BackendLoader."""

    packing = ROWS
    quantize = None

    def __init__(self, config: BackendConfig, gpu: Device, *, samples: bool) -> None:
        """samples: on rank 0."""
        self._config, self.gpu, self._samples = config, gpu, samples
        self._sizes = StepSizes(config.max_running, config.max_draft_tokens)

    @property
    def torch_device(self) -> torch.device:
        return self.gpu.torch_device

    def load(self, checkpoint: Checkpoint, share: Share, progress: Progress) -> "GpuWeights":
        config, spec, gpu = self._config, checkpoint.spec, self.gpu
        sampler = None
        with put_on(gpu, config.quantize) as put:
            dtype = DTYPES[config.dtype]
            reader = checkpoint.reader(dtype, gpu.torch_device, progress, share, config.quantize, put)
            weights = load_weights(reader)
            if self._samples:  # before KV takes the free memory
                with needing_memory("the buffers that tokens are sampled with", "lower max_running"):
                    sampler = DeviceSampler(spec.vocab_size, spec.eos_token_ids, self._sizes.max_rows, gpu)
        return GpuWeights(config, self._sizes, gpu, spec_of(spec, share), share, weights, sampler)

    def make_cache(self, layout: KVLayout, num_blocks: int, rank: int, shared: SharedPool | None) -> KVCache:
        return KVCache(layout, num_blocks, self.torch_device, rank=rank, shared=shared, gpu=self.gpu)


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """LoadedWeights of the GPU backend."""

    config: BackendConfig
    sizes: StepSizes
    gpu: Device
    spec: ModelSpec  # of this rank's share
    share: Share
    weights: DecoderWeights
    sampler: DeviceSampler | None  # rank 0's

    def build(self, resources: StepResources) -> Backend:
        assert self.sampler is not None
        return GpuSteps(self._rank_steps(resources), self.sampler, resources.ranks)

    def follow(self, resources: StepResources) -> Follow:
        return self._rank_steps(resources).follow

    def step_decoder(self, resources: StepResources, skipped: Sequence[int] = ()) -> StepDecoder:
        raise ConfigError("a model cannot draft on GPUs yet: set speculation to ngram or suffix, or use device cpu")

    def _rank_steps(self, resources: StepResources) -> RankSteps:
        budget = self.config.sparse_budget
        resources.cache.keep_bounds(sparse_layers(self.spec, budget), budget)
        return RankSteps(
            self.gpu,
            Decoder(self.spec, self.weights, resources.group, self.share.experts),
            resources.cache,
            resources.cos_sin,
            self.sampler,
            self.sizes,
            graph_tokens=self.config.graph_tokens,
        )
