"""A worker's runner and engine, of random weights or given ones: all that a worker has but a server."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diptych.workers.core.runner import ModelInfo
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.device.kv_cache import KVCache, available_bytes
from diptych.workers.device.precision import settle_products
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.common.backend import StepResources
from diptych.workers.execution.common.library_choice import choose_for_steps
from diptych.workers.execution.gpu.buckets import StepSizes
from diptych.workers.execution.gpu.device_sampler import DeviceSampler
from diptych.workers.execution.gpu.gpu_steps import GpuSteps
from diptych.workers.execution.gpu.rank_steps import RankSteps, graph_tokens_of
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.dtypes import is_scaled
from diptych.workers.kv.layout import ROWS
from diptych.workers.models.checkpoint.weights import DTYPES, DecoderWeights
from diptych.workers.models.families.spec import ModelSpec
from diptych.workers.models.layers.decoder import Decoder
from diptych.workers.models.layers.rope import rope_tables
from diptych.workers.models.plan.kv_plan import check_kv_dtype, layout_of, packing_of, plan_num_blocks, tail_blocks

from .models import bytes_of_products, in_few_bits_, num_bytes, random_weights
from .timed import TimedDevice, TimedLane


@dataclass(frozen=True)
class Settings:
    """Settings of a worker; the rest are its defaults."""

    max_context_tokens: int = 40_960
    max_batch_tokens: int = 8192
    max_running: int = 256
    kv_memory_bytes: int | None = None
    kv_memory_fraction: float = 0.8  # else: of what is free beside the weights; graphs and activations need some, too
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"  # as the setting
    cuda_graphs: bool = True
    quantize: str | None = None  # of models.py's IN_FEW_BITS
    max_draft_tokens: int = 0  # of a sequence in a step; 0: buffers and graphs have no room for drafts


@dataclass(frozen=True)
class Rig:
    spec: ModelSpec
    settings: Settings
    device: TimedDevice
    runner: ModelRunner
    engine: Engine
    num_weight_bytes: int
    product_bytes: float  # of a weight that a token is multiplied by, scales included
    num_kv_bytes: int
    logits: Tensor  # [rows, vocabulary] float32, of the newest step, on the device
    main: TimedLane  # in whose order they are written
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # that parts of loading took


def make_rig(spec: ModelSpec, settings: Settings, device: TimedDevice, weights: DecoderWeights | None = None) -> Rig:
    """Random KV fills the cache: what sequences that come with their KV find there. weights: on the device; None:
    random ones."""
    settle_products()
    where, dtype, began = device.torch_device, DTYPES[settings.dtype], time.perf_counter()
    weights = weights or random_weights(spec, dtype, where)
    if settings.quantize is not None:
        in_few_bits_(weights, settings.quantize)
    device.synchronize()
    weights_s = time.perf_counter() - began
    stored = settings.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    check_kv_dtype(spec, stored, settings.block_size, on_gpu=True)
    packing = packing_of(stored, ROWS, on_gpu=True)
    layout = layout_of(spec, stored, settings.block_size, model_id="random", packing=packing)
    sizes = StepSizes(settings.max_running, settings.max_draft_tokens, settings.max_batch_tokens)
    sampler = DeviceSampler(spec.vocab_size, spec.eos_token_ids, sizes.max_rows, device)
    decoder, began = Decoder(spec, weights), time.perf_counter()
    limits = settings.max_batch_tokens, settings.max_context_tokens
    libraries = choose_for_steps(device.lane("choices"), decoder, layout, *limits)
    choices_s = time.perf_counter() - began
    wanted = settings.kv_memory_bytes or int(available_bytes(where) * settings.kv_memory_fraction)
    cache = KVCache(layout, plan_num_blocks(layout, settings.max_context_tokens, wanted), where)
    _fill(cache)
    cache.keep_tail(settings.dtype, ROWS, tail_blocks(layout, sizes.max_sequences, sizes.max_batch_tokens))
    cos_sin = rope_tables(spec, settings.max_context_tokens, where)
    graph_tokens = graph_tokens_of(spec) if settings.cuda_graphs else None
    resources = StepResources(cache, cos_sin, decoder.group)
    began, captures_s = time.perf_counter(), device.capture_s
    own = RankSteps(device, decoder, resources, sampler, sizes, graph_tokens=graph_tokens, libraries=libraries)
    captures_s = device.capture_s - captures_s
    seconds = {
        "weights": weights_s,
        "choices": choices_s,
        "warm-up": time.perf_counter() - began - captures_s,
        "captures": captures_s,
    }
    steps = GpuSteps(own, sampler)
    info = ModelInfo(
        name="random",
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_context_tokens=settings.max_context_tokens,
        eos_token_ids=spec.eos_token_ids,
        dtype=settings.dtype,
    )
    runner = ModelRunner(info, steps, cache)
    config = SchedulerConfig(settings.max_batch_tokens, max_running=settings.max_running)
    engine = Engine(runner, config, prefix_cache=False)
    assert isinstance(own.main, TimedLane)
    return Rig(
        spec,
        settings,
        device,
        runner,
        engine,
        num_bytes(weights),
        bytes_of_products(weights),
        cache.memory.region.num_bytes,
        own.buffers.logits,
        own.main,
        seconds,
    )


def _fill(cache: KVCache) -> None:
    """Fill with random numbers; of 8 bits: with bytes that are numbers in each format, of one scale; of blocks that are
    rounded as a whole: with codes, of one scale and least number."""
    generator = torch.Generator(cache.tensor.device).manual_seed(1)
    if cache.layout.has_tail:
        cache.tensor.random_(0, 256, generator=generator)
        for layer in range(cache.layout.num_layers):
            blocks = cache.layer(layer)  # [..., 20 D]
            dim = blocks.shape[-1] // 20
            blocks[..., 16 * dim :].view(torch.bfloat16)[..., :dim] = 0.25
            blocks[..., 18 * dim :].view(torch.bfloat16)[...] = -1.875
        return
    if not is_scaled(cache.layout.dtype):
        cache.tensor.normal_(generator=generator)
        return
    cache.tensor.view(torch.uint8).random_(0, 0x70, generator=generator)
    for layer in range(cache.layout.num_layers):
        scales = cache.parts(layer).scales
        assert scales is not None
        scales.fill_(2**-6)
