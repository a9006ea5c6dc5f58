"""Batch -> tokens: the Runner that computes a model, by the compiled CPU kernels or by torch.

Life: load (config and weights checked, then read; KV memory reserved) -> launch, once a step -> close.

With `tensor_parallel` above 1 this is rank 0 of as many: the others are processes of their own (rank_processes.py)
that compute each step with it. If one is lost, a step raises RankLost and the runner is of no more use.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.cpu.sample import RowSampler
from .batch_tables import BatchTables
from .compiled_steps import CompiledSteps
from .cores import part_of
from .cpu_kernels import Choice, choose, make_team
from .errors import ConfigError, RankLost
from .gpu.cuda_device import gpu_named
from .gpu.device import Device
from .gpu.device_errors import needing_memory
from .gpu.device_sampler import DeviceSampler
from .gpu.gpu_steps import GRAPH_TOKENS, GpuSteps, check_known
from .gpu.upload import put_on
from .kv_cache import KVCache, available_bytes
from .kv_layout import AXIS_ORDERS, KVLayout, KVMemory
from .kv_plan import layout_of, plan_num_blocks
from .launched import Compute, ComputeThread, Deferred
from .models.compiled import CompiledDecoder, read_weights
from .models.compiled_limits import why_torch
from .models.decoder import Decoder
from .models.expert_placement import IN_ORDER
from .models.families import load_spec
from .models.rope import Ropes, rope_tables
from .models.sharding import Share, share_of_first, spec_of
from .models.spec import ModelSpec
from .models.weight_bytes import check_fits
from .models.weights import DTYPES, Checkpoint, Progress, Reader, load_weights
from .parallel import Alone, Group
from .quant.formats import QUANTIZE, check_shares
from .rank import RankSettings, told_of
from .rank_processes import OnLoss, RankProcesses
from .request import SamplingParams
from .runner import Launched, LayerWatch, ModelInfo
from .sampler import Sampler, is_plain
from .sequence import Batch, SampledToken
from .torch_steps import TorchSteps

log = logging.getLogger("diptych.worker")


@dataclass(frozen=True, slots=True)
class ModelRunnerConfig:
    model_path: Path
    dtype: str = "bfloat16"
    device: str = "cpu"
    block_size: int = 16
    kv_axis_order: str = "block"  # or "layer"
    kv_memory_bytes: int | None = None  # None: kv_memory_fraction of what is free once the weights are read
    kv_memory_fraction: float = 0.3
    max_context_tokens: int | None = None  # None: all that the model was made for
    served_model_name: str | None = None  # None: the name of the checkpoint's directory
    num_threads: int | None = None  # of all ranks together; None: torch's own choice
    cores: tuple[int, ...] | None = None  # for the threads of all ranks; None: not bound
    tensor_parallel: int = 1  # ranks
    expert_parallel: int = 1  # as many: they have whole experts; see models/expert_placement.py for which
    expert_placement: str = IN_ORDER
    expert_copies: int = 0
    quantize: str | None = None  # "int8" or "int4": weights at load
    cpu_isa: str = "auto"  # of the compiled CPU kernels: "auto", the best; "none": compute with torch
    look_ahead: bool = False  # with those, of one rank: compute on a thread of its own, that is fed its own tokens
    cuda_graphs: bool = True  # of steps on cuda
    max_running: int = 256  # sequences in a batch on cuda

    def validate(self) -> None:
        """Raise ConfigError for a value outside its range."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kv_axis_order not in AXIS_ORDERS:
            raise ConfigError(f"kv_axis_order must be block or layer, got {self.kv_axis_order!r}")
        if not 1 <= self.block_size <= 1024:
            raise ConfigError(f"block_size must be in [1, 1024], got {self.block_size}")
        if not 0.0 < self.kv_memory_fraction < 1.0:
            raise ConfigError(f"kv_memory_fraction must be in (0, 1), got {self.kv_memory_fraction}")
        for name in ("kv_memory_bytes", "max_context_tokens", "num_threads", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.quantize is not None and self.quantize not in QUANTIZE:
            raise ConfigError(f"quantize must be {' or '.join(QUANTIZE)}, got {self.quantize!r}")
        if self.tensor_parallel < 1:
            raise ConfigError(f"tensor_parallel must be at least 1, got {self.tensor_parallel}")
        if self.tensor_parallel > 1 and not self.device.startswith("cpu"):
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel} works on cpu alone for now, not on {self.device}: use 1"
            )

        if self.expert_parallel not in (1, self.tensor_parallel):
            raise ConfigError(
                f"expert_parallel must be 1 or tensor_parallel={self.tensor_parallel}, got {self.expert_parallel}"
            )

    @property
    def threads_per_rank(self) -> int | None:
        if self.num_threads is None and self.tensor_parallel == 1:
            return None
        return max((self.num_threads or torch.get_num_threads()) // self.tensor_parallel, 1)


class Steps(Protocol):
    """How a batch is computed by this host's processor: TorchSteps or CompiledSteps. A GPU's are GpuSteps."""

    @property
    def expert_tokens(self) -> Tensor | None:
        """See models/moe.py's no_expert_tokens."""
        ...

    def prepare(self, batch: Batch, watch: LayerWatch | None) -> Compute:
        """What computes the batch, see Runner.launch. It may raise RankLost."""
        ...


class ModelRunner:
    """A Runner (see runner.py). Make it with `load`."""

    def __init__(
        self,
        info: ModelInfo,
        steps: Steps | GpuSteps,
        cache: KVCache,
        ranks: RankProcesses | None = None,
        thread: ComputeThread | None = None,
    ) -> None:
        """`thread`: computes every step, which must be CompiledSteps with room for two; GpuSteps need none."""
        self._info, self.steps, self._cache, self._ranks, self._thread = info, steps, cache, ranks, thread
        self._memory = cache.memory

    @classmethod
    def load(
        cls,
        config: ModelRunnerConfig,
        progress: Progress = lambda _done, _total: None,
        on_loss: OnLoss = lambda _error: None,
        *,
        gpu: Device | None = None,
    ) -> "ModelRunner":
        """Read the checkpoint and reserve KV memory; `progress` hears of bytes read. `on_loss` is called, on another
        thread, if a rank is lost later. `gpu`: computes, instead of what `config.device` names (for tests).

        Raises CheckpointError for what is wrong with the checkpoint, ConfigError for what is wrong with `config`,
        RankLost for a rank that ends.
        """
        config.validate()
        gpu = gpu or gpu_named(config.device)
        path, device = Path(config.model_path), gpu.torch_device if gpu is not None else torch.device(config.device)
        spec = load_spec(path)
        placement = config.expert_placement if config.expert_parallel > 1 else None
        share = share_of_first(spec, config.tensor_parallel, placement, config.expert_copies)
        check_shares(spec, config.quantize, share.size)
        max_context_tokens = _max_context_tokens(config, spec)
        threads = config.threads_per_rank
        if threads is not None:
            torch.set_num_threads(threads)
        choice = _kernels(config, spec, gpu)
        log.info("%s", choice.why)
        for rope, _ in spec.ropes:
            if rope.is_long(max_context_tokens):
                log.info(
                    "longrope: all contexts are rotated as long ones are; max_context_tokens=%d and less as short ones",
                    rope.original_max_position_embeddings,
                )
        quantize = config.quantize if choice.library is not None else None  # torch computes with them at full size
        with Checkpoint(path, spec) as checkpoint, ExitStack() as stack:
            check_fits(checkpoint.spec, share, config.dtype, quantize, available_bytes(device))
            layout = layout_of(
                spec,
                config.dtype,
                config.block_size,
                model_id=_model_id(checkpoint, config.quantize, max_context_tokens),
                axis_order=AXIS_ORDERS[config.kv_axis_order],
                tensor_parallel=config.tensor_parallel,
                packing=choice.packing,
            )
            ranks = _start_ranks(config, share, choice, max_context_tokens, on_loss)
            if ranks is not None:
                stack.callback(ranks.close)
            own = spec_of(spec, share)
            with put_on(gpu, config.quantize) as put:
                reader = checkpoint.reader(DTYPES[config.dtype], device, progress, share, config.quantize, put)
                to_cpu = partial(_read_weights, choice=choice, share=share, ranks=ranks)
                steps_with = _read_to_gpu(config, reader, own, gpu) if gpu else to_cpu(config, reader, own)
            group = ranks.join() if ranks is not None else Alone()
            num_blocks = _num_blocks(config, layout, max_context_tokens, device)
            memory_fd = ranks.memory_fd if ranks is not None else None
            cache = KVCache(layout, num_blocks, device, shared_fd=memory_fd, library=choice.library, gpu=gpu)
            if ranks is not None:
                ranks.begin(num_blocks)
            with needing_memory("the angles of all positions", "lower kv_memory_fraction or max_context_tokens"):
                cos_sin = rope_tables(spec, max_context_tokens, device)
            steps = steps_with(cache, cos_sin, group)
            stack.pop_all()
        info = ModelInfo(
            name=config.served_model_name or path.resolve().name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            max_context_tokens=max_context_tokens,
            eos_token_ids=spec.eos_token_ids,
            dtype=config.dtype,
            num_experts=spec.num_experts,
        )
        is_ahead = config.look_ahead and ranks is None and choice.library is not None
        return cls(info, steps, cache, ranks, ComputeThread((config.cores or ())[:1]) if is_ahead else None)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def layout(self) -> KVLayout:
        return self._cache.layout

    @property
    def memory(self) -> KVMemory:
        return self._memory

    def check(self) -> None:
        if isinstance(self.steps, GpuSteps):
            self.steps.check()

    def close(self) -> None:
        """End the other ranks, our thread, and what a GPU is at; what else is held is memory, which goes with the
        object. Idempotent."""
        if self._thread is not None:
            self._thread.close()
        if self._ranks is not None:
            self._ranks.close()
        if isinstance(self.steps, GpuSteps):
            self.steps.close()

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> Launched:
        steps = self.steps
        if isinstance(steps, GpuSteps):
            return steps.launch(batch, watch)

        def make(told: LayerWatch | None) -> Compute:
            return partial(self._compute, steps.prepare(batch, told))

        if self._thread is None:
            return Deferred(make(watch))
        return self._thread.launch(make(None)) if watch is None else self._thread.launch_watched(make, watch)

    @torch.inference_mode()
    def _compute(self, compute: Compute) -> list[SampledToken]:
        try:
            return compute()
        except Exception as e:
            if self._ranks is None:
                raise
            # The others are in the middle of a step, of which they would make the next one's beginning.
            error = e if isinstance(e, RankLost) else RankLost(f"rank 0 failed in a step ({e})")
            raise self._ranks.fail(error) from e

    def feeds(self, sampling: SamplingParams) -> bool:
        return (self._thread is not None or isinstance(self.steps, GpuSteps)) and is_plain(sampling)

    def expert_tokens(self) -> npt.NDArray[np.int64] | None:
        if isinstance(self.steps, GpuSteps):
            return self.steps.expert_tokens()
        counts = self.steps.expert_tokens
        return None if counts is None else counts.numpy()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        (self.steps if isinstance(self.steps, GpuSteps) else self._cache).copy_blocks(pairs)


def _kernels(config: ModelRunnerConfig, spec: ModelSpec, gpu: Device | None) -> Choice:
    if gpu is not None:
        check_known(spec)
        return Choice(None, f"Triton kernels compute, on {gpu.torch_device}")
    why = why_torch(spec, config.block_size, config.tensor_parallel, whole_experts=config.expert_parallel > 1)
    return choose(config.cpu_isa) if why is None else Choice(None, f"torch computes, slower: {why}")


def _read_weights(
    config: ModelRunnerConfig,
    reader: Reader,
    spec: ModelSpec,
    choice: Choice,
    share: Share,
    ranks: RankProcesses | None,
) -> Callable[[KVCache, Ropes, Group], Steps]:
    """What computes batches, once it has a cache, the rotary table and a group. spec: of rank 0's share."""
    if choice.library is None:
        weights, sampler = load_weights(reader), Sampler(spec.eos_token_ids)

        return lambda cache, cos_sin, group: TorchSteps(
            Decoder(spec, weights, group, share.experts), cache, cos_sin, sampler, ranks
        )
    cores = part_of(config.cores, 0, config.tensor_parallel)
    team = make_team(choice.library, torch.get_num_threads(), cores)
    packed, sampler = read_weights(team, reader), Sampler(spec.eos_token_ids, RowSampler(team))

    def steps_with(cache: KVCache, cos_sin: Ropes, group: Group) -> Steps:
        num_blocks = cache.layout.num_blocks_for(len(cos_sin[0]))
        tables = [BatchTables(config.block_size, num_blocks) for _ in range(2 if config.look_ahead else 1)]
        return CompiledSteps(CompiledDecoder(spec, packed, cache, cos_sin, team, group), tables, sampler, ranks)

    return steps_with


def _read_to_gpu(
    config: ModelRunnerConfig, reader: Reader, spec: ModelSpec, gpu: Device
) -> Callable[[KVCache, Ropes, Group], GpuSteps]:
    """See _read_weights. What the sampler needs is taken before what is free is reserved for KV."""
    weights = load_weights(reader)
    with needing_memory("the buffers that tokens are sampled with", "lower max_running"):
        sampler = DeviceSampler(spec.vocab_size, spec.eos_token_ids, config.max_running, gpu)
    graph_tokens = GRAPH_TOKENS if config.cuda_graphs else None

    def steps_with(cache: KVCache, cos_sin: Ropes, group: Group) -> GpuSteps:
        decoder = Decoder(spec, weights, group)
        return GpuSteps(gpu, decoder, cache, cos_sin, sampler, config.max_running, graph_tokens=graph_tokens)

    return steps_with


def _start_ranks(
    config: ModelRunnerConfig, share: Share, choice: Choice, max_context_tokens: int, on_loss: OnLoss
) -> RankProcesses | None:
    if config.tensor_parallel == 1:
        return None
    settings = RankSettings(
        model_path=str(config.model_path),
        dtype=config.dtype,
        block_size=config.block_size,
        axis_order=AXIS_ORDERS[config.kv_axis_order],
        packing=choice.packing,
        max_context_tokens=max_context_tokens,
        num_threads=torch.get_num_threads(),
        cpu_isa=choice.library.isa if choice.library is not None else "none",
        cores=config.cores,
        quantize=config.quantize,
        experts=told_of(share),
        size=config.tensor_parallel,
    )
    return RankProcesses(settings, on_loss, choose(config.cpu_isa).library)


def _model_id(checkpoint: Checkpoint, quantize: str | None, max_context_tokens: int) -> str:
    """Other weights and other ropes make other KV: what has them never continues what has not."""
    is_long = any(rope.is_long(max_context_tokens) for rope, _ in checkpoint.spec.ropes)
    return checkpoint.fingerprint() + (f"+{quantize}" if quantize else "") + ("+long" if is_long else "")


def _num_blocks(config: ModelRunnerConfig, layout: KVLayout, max_context_tokens: int, device: torch.device) -> int:
    available = available_bytes(device)
    wanted = config.kv_memory_bytes or int(available * config.kv_memory_fraction)
    num_blocks = plan_num_blocks(layout, max_context_tokens, wanted)
    if num_blocks * layout.block_bytes > available:
        raise ConfigError(f"kv_memory_bytes={wanted:,} exceeds the {available:,} bytes that are free: lower it")
    return num_blocks


def _max_context_tokens(config: ModelRunnerConfig, spec: ModelSpec) -> int:
    wanted = config.max_context_tokens or spec.max_position_embeddings
    if wanted > spec.max_position_embeddings:
        raise ConfigError(
            f"max_context_tokens={wanted} exceeds the model's {spec.max_position_embeddings} positions: lower it"
        )
    return wanted
