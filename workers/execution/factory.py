"""Chooses the backend of a worker's ranks: the only file that knows which backends there are."""

from dataclasses import dataclass

from ...kernels.cpu.library import Library
from ..common.cores import part_of
from ..config.worker_config import WorkerConfig
from ..device.cuda_device import gpu_named
from ..device.device import Device
from ..models.families.spec import ModelSpec
from ..models.plan.compiled_limits import why_torch
from ..models.plan.kv_plan import check_kv_dtype
from ..models.plan.rank_settings import RankSettings
from ..models.plan.sparse_plan import sparse_layers
from .common.backend import BackendConfig, BackendLoader
from .cpu.compiled_loader import CompiledLoader
from .cpu.cpu_kernels import choose
from .eager.eager_loader import EagerLoader
from .gpu.gpu_loader import GpuLoader, check_known, check_stored
from .gpu.rank_steps import graph_tokens_of


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """Rank 0's backend, and what the other ranks must know to choose the same."""

    loader: BackendLoader
    why: str  # one line for the log
    config: BackendConfig
    device: str = "cpu"
    cpu_isa: str = "none"  # of the compiled kernels that compute
    sums: Library | None = None  # compiled kernels by which several ranks add in shared memory


def choose_backend(
    config: WorkerConfig, spec: ModelSpec, max_context_tokens: int, gpu: Device | None = None
) -> ChosenBackend:
    """gpu: computes instead of the device that `config` names. Raises ConfigError."""
    ranks, is_shared = config.parallel.ranks_per_machine, config.parallel.peer_group is not None
    gpu = gpu or gpu_named(config.model.device, num_ranks=ranks, is_awaited=is_shared)
    own = BackendConfig(
        dtype=config.model.dtype,
        block_size=config.cache.block_size,
        max_context_tokens=max_context_tokens,
        kv_dtype=config.kv_dtype,
        quantize=config.model.quantize,
        cores=part_of(config.cores, 0, config.parallel.ranks_per_machine),
        share_cores=config.model.share_cores and config.parallel.tensor_parallel == config.parallel.data_parallel == 1,
        look_ahead=config.model.look_ahead,
        max_running=config.scheduler.max_running,
        max_draft_tokens=config.speculation.max_draft_tokens if config.speculation.speculation != "none" else 0,
        max_batch_tokens=config.device_scheduler.max_batch_tokens,
        graph_tokens=graph_tokens_of(spec) if config.model.cuda_graphs else None,
        sparse_budget=config.cache.sparse_budget if sparse_layers(spec, config.cache.sparse_budget) else 0,
    )
    check_kv_dtype(spec, config.kv_dtype, own.block_size, on_gpu=gpu is not None)
    if gpu is not None:
        check_known(spec)
        check_stored(config.kv_dtype, gpu)
        loader = GpuLoader(own, gpu, samples=True)
        return ChosenBackend(loader, f"Triton kernels compute, on {gpu.torch_device}", own, gpu.name)
    sums = choose(config.model.cpu_isa).library if config.parallel.tensor_parallel > 1 else None
    whole_experts = config.parallel.expert_parallel > 1 or config.parallel.peer_group is not None
    size, num_ranks = config.cache.block_size, config.parallel.tensor_parallel
    why = why_torch(spec, size, num_ranks, kv_dtype=config.kv_dtype, whole_experts=whole_experts)
    if why is not None:
        return ChosenBackend(EagerLoader(own), f"torch computes, slower: {why}", own, sums=sums)
    choice = choose(config.model.cpu_isa)
    if choice.library is None:
        return ChosenBackend(EagerLoader(own), choice.why, own, sums=sums)
    loader = CompiledLoader(own, choice.library)
    return ChosenBackend(loader, choice.why, own, cpu_isa=choice.library.isa, sums=sums)


def backend_of_rank(settings: RankSettings) -> BackendLoader:
    """The backend of a rank other than 0: the same as rank 0's."""
    own = BackendConfig(
        dtype=settings.dtype,
        block_size=settings.layout.block_size,
        max_context_tokens=settings.max_context_tokens,
        kv_dtype=settings.layout.dtype,
        quantize=settings.quantize,
        cores=part_of(settings.cores, *settings.place_on_machine),
        max_running=settings.max_running,
        max_draft_tokens=settings.max_draft_tokens,
        max_batch_tokens=settings.max_batch_tokens,
        graph_tokens=settings.graph_tokens,
        sparse_budget=settings.sparse_budget,
    )
    gpu = gpu_named(settings.device, settings.place_on_machine[0], is_awaited=True)
    if gpu is not None:
        return GpuLoader(own, gpu, samples=False)
    library = choose(settings.cpu_isa).library
    return EagerLoader(own) if library is None else CompiledLoader(own, library)
