"""Batch -> tokens: the Runner that computes a model, by the compiled CPU kernels or by torch.

Life: load (config and weights checked, then read; KV memory reserved) -> launch, once a step -> close.

With `tensor_parallel` above 1 this is rank 0 of as many: the others are processes of their own (rank_processes.py)
that compute each step with it. With a `peer_group` it shares its experts with workers that it steps with
(data_parallel.py). If one of either is lost, a step raises RankLost and the runner is of no more use.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.cpu.sample import RowSampler
from ..common.cores import part_of
from ..common.errors import ConfigError, RankLost
from ..common.request import SamplingParams
from ..core.batch_tables import BatchTables
from ..core.runner import InFlightStep, LayerWatch, ModelInfo
from ..core.sequence import Batch, SampledToken
from ..core.step_executor import Compute, DeferredStep, StepExecutor, ThreadExecutor, submit_step
from ..device.cuda_device import gpu_named
from ..device.device import Device
from ..device.device_errors import needing_memory
from ..device.joined_memory import Joining
from ..device.kv_cache import KVCache, available_bytes
from ..device.upload import put_on
from ..kv.layout import AXIS_ORDERS, KVLayout
from ..kv.memory import KVMemory
from ..models.checkpoint.weights import DTYPES, Checkpoint, Progress, WeightReader, load_weights
from ..models.families.registry import load_spec
from ..models.families.spec import ModelSpec
from ..models.layers.decoder import Decoder
from ..models.layers.rope import Ropes, rope_tables
from ..models.plan.compiled_limits import why_torch
from ..models.plan.formats import check_shares
from ..models.plan.kv_plan import blocks_at_once, layout_of, plan_num_blocks
from ..models.plan.rank_settings import RankSettings, told_of
from ..models.plan.sharding import Share, share_of_first, share_of_worker, spec_of
from ..models.plan.weight_bytes import check_fits
from ..parallel.groups import Alone, Group
from ..parallel.rendezvous import PeerSockets, connect_peers
from ..ranks.data_parallel import DataParallelLoop, join
from ..ranks.rank_processes import OnLoss, RankProcesses
from ..sampling.sampler import Sampler, is_plain
from .cpu.compiled import CompiledDecoder, read_weights
from .cpu.compiled_steps import CompiledSteps
from .cpu.cpu_kernels import Choice, choose, make_team
from .gpu.device_sampler import DeviceSampler
from .gpu.gpu_steps import GpuSteps, check_known
from .gpu.rank_steps import GRAPH_TOKENS, RankSteps
from .model_runner_config import ModelRunnerConfig
from .torch_steps import TorchSteps

log = logging.getLogger("diptych.worker")


class Steps(Protocol):
    """How a batch is computed by this host's processor: TorchSteps or CompiledSteps. A GPU's are GpuSteps."""

    @property
    def expert_tokens(self) -> Tensor | None:
        """See layers/moe.py's no_expert_tokens."""
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
        lane: StepExecutor | None = None,
    ) -> None:
        """`lane`: computes every step; those are CompiledSteps, with room for two where it runs ahead. GpuSteps need
        none."""
        self._info, self.steps, self._cache, self._ranks, self._lane = info, steps, cache, ranks, lane
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
        gpu = gpu or gpu_named(config.device, num_ranks=config.tensor_parallel)
        path, device = Path(config.model_path), gpu.torch_device if gpu is not None else torch.device(config.device)
        spec = load_spec(path)
        share = _share(config, spec)
        check_shares(spec, config.quantize, share.size)
        max_context_tokens = _max_context_tokens(config, spec)
        threads = config.threads_per_rank
        if threads is not None:
            torch.set_num_threads(threads)
        choice = _kernels(config, spec, gpu)
        _log_choice(choice, spec, max_context_tokens)
        quantize = config.quantize if choice.library is not None else None  # torch computes with them at full size
        with Checkpoint(path, spec) as checkpoint, ExitStack() as stack:
            check_fits(checkpoint.spec, share, config.dtype, quantize, available_bytes(device))
            peer_sockets = _connect_peers(config, share, checkpoint)
            if peer_sockets is not None:
                stack.callback(peer_sockets.close)
            layout = _layout(config, checkpoint, choice, max_context_tokens)
            ranks = _start_ranks(config, share, choice, max_context_tokens, on_loss, gpu)
            if ranks is not None:
                stack.callback(ranks.close)
                stack.enter_context(ranks.naming())
            own = spec_of(spec, share)
            with put_on(gpu, config.quantize) as put:
                reader = checkpoint.reader(DTYPES[config.dtype], device, progress, share, config.quantize, put)
                to_cpu = partial(_read_weights, choice=choice, share=share, peer_sockets=peer_sockets)
                read = partial(_read_to_gpu, share=share, gpu=gpu) if gpu is not None else to_cpu
                steps_with = read(config, reader, own, ranks=ranks)
                del reader  # and the memory it converts in: KV takes of what is free
            group = ranks.join(gpu) if ranks is not None else Alone()
            cache = _cache(config, layout, max_context_tokens, choice, device, gpu, ranks)
            with needing_memory("the angles of all positions", "lower kv_memory_fraction or max_context_tokens"):
                cos_sin = rope_tables(spec, max_context_tokens, device)
            steps = steps_with(cache, cos_sin, group)
            if ranks is not None:
                ranks.meet()
            stack.pop_all()
        lane, first_core = None, (config.cores or ())[:1]
        if peer_sockets is not None:
            assert isinstance(steps, TorchSteps)
            lane = DataParallelLoop(peer_sockets, steps, on_loss, first_core)
        elif config.look_ahead and ranks is None and choice.library is not None:
            lane = ThreadExecutor(first_core)
        return cls(_info(config, spec, max_context_tokens), steps, cache, ranks, lane)

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
        if self._lane is not None:
            self._lane.check()
        if isinstance(self.steps, GpuSteps):
            self.steps.check()

    def close(self) -> None:
        """End the other ranks, our thread, and what a GPU is at, and leave whom we share experts with; what else is
        held is memory, which goes with the object. Idempotent."""
        if self._lane is not None:
            self._lane.close()
        if self._ranks is not None:
            self._ranks.close()
        if isinstance(self.steps, GpuSteps):
            self.steps.close()

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> InFlightStep:
        steps = self.steps
        if isinstance(steps, GpuSteps):
            return steps.launch(batch, watch)

        def make(told: LayerWatch | None) -> Compute:
            return partial(self._compute, steps.prepare(batch, told))

        return DeferredStep(make(watch)) if self._lane is None else submit_step(self._lane, make, watch)

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

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        is_ahead = isinstance(self.steps, GpuSteps) or (self._lane is not None and self._lane.runs_ahead)
        return is_ahead and is_plain(sampling)

    def expert_tokens(self) -> npt.NDArray[np.int64] | None:
        if isinstance(self.steps, GpuSteps):
            return self.steps.expert_tokens()
        counts = self.steps.expert_tokens
        return None if counts is None else counts.numpy()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        (self.steps if isinstance(self.steps, GpuSteps) else self._cache).copy_blocks(pairs)


def _log_choice(choice: Choice, spec: ModelSpec, max_context_tokens: int) -> None:
    log.info("%s", choice.why)
    for rope, _ in spec.ropes:
        if rope.is_long(max_context_tokens):
            log.info(
                "longrope: all contexts are rotated as long ones are; max_context_tokens=%d and less as short ones",
                rope.original_max_position_embeddings,
            )


def _info(config: ModelRunnerConfig, spec: ModelSpec, max_context_tokens: int) -> ModelInfo:
    return ModelInfo(
        name=config.served_model_name or Path(config.model_path).resolve().name,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_context_tokens=max_context_tokens,
        eos_token_ids=spec.eos_token_ids,
        dtype=config.dtype,
        num_experts=spec.num_experts,
    )


def _layout(config: ModelRunnerConfig, checkpoint: Checkpoint, choice: Choice, max_context_tokens: int) -> KVLayout:
    return layout_of(
        checkpoint.spec,
        config.dtype,
        config.block_size,
        model_id=_model_id(checkpoint, config.quantize, max_context_tokens),
        axis_order=AXIS_ORDERS[config.kv_axis_order],
        tensor_parallel=config.tensor_parallel,
        packing=choice.packing,
    )


def _kernels(config: ModelRunnerConfig, spec: ModelSpec, gpu: Device | None) -> Choice:
    if gpu is not None:
        check_known(spec)
        return Choice(None, f"Triton kernels compute, on {gpu.torch_device}")
    whole_experts = config.expert_parallel > 1 or config.peer_group is not None
    why = why_torch(spec, config.block_size, config.tensor_parallel, whole_experts=whole_experts)
    return choose(config.cpu_isa) if why is None else Choice(None, f"torch computes, slower: {why}")


def _read_weights(
    config: ModelRunnerConfig,
    reader: WeightReader,
    spec: ModelSpec,
    choice: Choice,
    share: Share,
    ranks: RankProcesses | None,
    peer_sockets: PeerSockets | None,
) -> Callable[[KVCache, Ropes, Group], Steps]:
    """What computes batches, once it has a cache, the rotary table and a group. spec: of rank 0's share."""
    if choice.library is None:
        weights, sampler = load_weights(reader), Sampler(spec.eos_token_ids)

        def torch_steps(cache: KVCache, cos_sin: Ropes, group: Group) -> TorchSteps:
            peers = join(peer_sockets) if peer_sockets is not None else None
            decoder = Decoder(spec, weights, group, share.experts, peers)
            return TorchSteps(decoder, cache, cos_sin, sampler, ranks, peers)

        return torch_steps
    cores = part_of(config.cores, 0, config.tensor_parallel)
    team = make_team(choice.library, torch.get_num_threads(), cores)
    packed, sampler = read_weights(team, reader), Sampler(spec.eos_token_ids, RowSampler(team))

    def steps_with(cache: KVCache, cos_sin: Ropes, group: Group) -> Steps:
        num_blocks = cache.layout.num_blocks_for(len(cos_sin[0]))
        tables = [BatchTables(config.block_size, num_blocks) for _ in range(2 if config.look_ahead else 1)]
        return CompiledSteps(CompiledDecoder(spec, packed, cache, cos_sin, team, group), tables, sampler, ranks)

    return steps_with


def _read_to_gpu(
    config: ModelRunnerConfig,
    reader: WeightReader,
    spec: ModelSpec,
    share: Share,
    gpu: Device,
    ranks: RankProcesses | None,
) -> Callable[[KVCache, Ropes, Group], GpuSteps]:
    """See _read_weights. What the sampler needs is taken before what is free is reserved for KV."""
    weights = load_weights(reader)
    with needing_memory("the buffers that tokens are sampled with", "lower max_running"):
        sampler = DeviceSampler(spec.vocab_size, spec.eos_token_ids, config.max_running, gpu)

    def steps_with(cache: KVCache, cos_sin: Ropes, group: Group) -> GpuSteps:
        decoder = Decoder(spec, weights, group, share.experts)
        rows, graph_tokens = config.max_running, _graph_tokens(config)
        own = RankSteps(gpu, decoder, cache, cos_sin, sampler, rows, graph_tokens=graph_tokens)
        return GpuSteps(own, sampler, ranks)

    return steps_with


def _graph_tokens(config: ModelRunnerConfig) -> int | None:
    return GRAPH_TOKENS if config.cuda_graphs else None


def _share(config: ModelRunnerConfig, spec: ModelSpec) -> Share:
    peer_group, placement = config.peer_group, config.expert_placement
    if peer_group is not None:
        return share_of_worker(spec, peer_group.rank, peer_group.size, placement, config.expert_copies)
    is_whole = config.expert_parallel > 1
    return share_of_first(spec, config.tensor_parallel, placement if is_whole else None, config.expert_copies)


def _connect_peers(config: ModelRunnerConfig, share: Share, checkpoint: Checkpoint) -> PeerSockets | None:
    if config.peer_group is None:
        return None
    held = hashlib.blake2b(repr(share.experts).encode(), digest_size=8).hexdigest()
    return connect_peers(config.peer_group, f"checkpoint {checkpoint.fingerprint()}, {config.dtype}, placement {held}")


def _start_ranks(
    config: ModelRunnerConfig,
    share: Share,
    choice: Choice,
    max_context_tokens: int,
    on_loss: OnLoss,
    gpu: Device | None,
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
        device=gpu.name if gpu is not None else "cpu",
        max_running=config.max_running,
        graph_tokens=_graph_tokens(config),
        size=config.tensor_parallel,
    )
    return RankProcesses(settings, on_loss, choose(config.cpu_isa).library if gpu is None else None)


def _model_id(checkpoint: Checkpoint, quantize: str | None, max_context_tokens: int) -> str:
    """Other weights and other ropes make other KV: what has them never continues what has not."""
    is_long = any(rope.is_long(max_context_tokens) for rope, _ in checkpoint.spec.ropes)
    return checkpoint.fingerprint() + (f"+{quantize}" if quantize else "") + ("+long" if is_long else "")


def _cache(
    config: ModelRunnerConfig,
    layout: KVLayout,
    max_context_tokens: int,
    choice: Choice,
    device: torch.device,
    gpu: Device | None,
    ranks: RankProcesses | None,
) -> KVCache:
    """As large as memory and settings allow; other ranks make theirs at the same time."""
    available, shared = available_bytes(device), None
    if ranks is not None:
        available, shared = ranks.available_bytes(available), ranks.shared(gpu)
    multiple = blocks_at_once(layout, shared.memory.granularity) if isinstance(shared, Joining) else 1
    wanted = config.kv_memory_bytes or int(available * config.kv_memory_fraction)
    num_blocks = plan_num_blocks(layout, max_context_tokens, wanted, multiple)
    if num_blocks * layout.block_bytes > available:
        raise ConfigError(f"kv_memory_bytes={wanted:,} exceeds the {available:,} bytes that are free: lower it")
    if ranks is not None:
        ranks.begin(num_blocks)
    return KVCache(layout, num_blocks, device, shared=shared, library=choice.library, gpu=gpu)


def _max_context_tokens(config: ModelRunnerConfig, spec: ModelSpec) -> int:
    wanted = config.max_context_tokens or spec.max_position_embeddings
    if wanted > spec.longest_context:
        raise ConfigError(f"max_context_tokens={wanted} exceeds the model's {spec.longest_context} positions: lower it")
    return wanted
