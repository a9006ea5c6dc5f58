"""Runner that computes a model: loads it with the backend that factory.py chooses, then passes each batch to it.

Life: load (check config and weights, read them, reserve KV memory) -> launch, once a step -> close.

With `tensor_parallel` above 1 this is rank 0 of as many: the others are processes of their own (rank_processes.py)
that compute each step with it. With a `peer_group` it shares its experts with workers that it steps with
(data_parallel.py). If one of either is lost, a step raises RankLost and the runner is of no more use.
"""

import hashlib
import logging
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..common.errors import ConfigError, RankLost
from ..common.request import SamplingParams
from ..config.worker_config import WorkerConfig
from ..core.draft import GuardedProposer
from ..core.embedding import EmbeddingSpec
from ..core.runner import InFlightStep, LayerWatch, ModelInfo
from ..core.sequence import Batch
from ..device.device import Device
from ..device.device_errors import needing_memory
from ..device.joined_memory import granularity_of
from ..device.kv_cache import KVCache, available_bytes
from ..handoff.machine_link import MachineLink
from ..handoff.spread_kv import SpreadKV
from ..kv.layout import AXIS_ORDERS, KVLayout
from ..kv.memory import KVMemory
from ..kv.pool_file import SHARED_MEMORY, PoolFile, anonymous_has_huge_pages
from ..models.checkpoint.weights import Checkpoint, Progress
from ..models.families.pooling import read_embedding_spec
from ..models.families.registry import load_spec
from ..models.families.spec import ModelSpec
from ..models.layers.rope import rope_tables
from ..models.plan.formats import DECODED_ON_GPUS, check_shares
from ..models.plan.kept_numbers import NONE
from ..models.plan.kv_plan import blocks_at_once, layout_of, packing_of, plan_num_blocks, tail_bytes
from ..models.plan.rank_settings import RankSettings, told_of
from ..models.plan.sharding import Share, share_of
from ..models.plan.sparse_plan import why_of
from ..models.plan.weight_bytes import check_fits
from ..parallel.groups import Alone
from ..parallel.rendezvous import PeerSockets, connect_peers
from ..parallel.stores import NetworkStore
from ..ranks.rank_processes import OnLoss, OtherMachines, RankProcesses
from .common.backend import Backend, BackendLoader, StepResources, no_progress
from .common.draft_turns import DraftTurns
from .common.halves import are_wanted
from .draft.draft_source import DraftSource
from .draft.drafted_step import DraftedStep
from .draft.guarded_draft import ComputingProposer, GuardedDraft
from .factory import ChosenBackend, choose_backend

log = logging.getLogger("diptych.worker")


class ModelRunner:
    """A Runner (see runner.py) that computes a model with one backend. Make it with `load`."""

    def __init__(
        self,
        info: ModelInfo,
        backend: Backend,
        cache: KVCache,
        draft: ComputingProposer | None = None,
        rank_links: Sequence[socket.socket] = (),
        spread: SpreadKV | None = None,
    ) -> None:
        """cache: the one in which `backend` computes, and the model that drafts. rank_links: see KVMemory. spread: the
        KV of all ranks, where some are on other machines."""
        self._info, self.backend, self._cache, self._spread = info, backend, cache, spread
        self._draft = GuardedDraft(draft, backend.turns) if draft is not None else None
        self._memory = replace(cache.memory, rank_links=rank_links) if spread is None else spread.memory
        self._computed = self._draft.computed if self._draft and cache.layout.num_draft_layers else None

    @classmethod
    def load(
        cls,
        config: WorkerConfig,
        progress: Progress = no_progress,
        on_loss: OnLoss = lambda _error: None,
        *,
        gpu: Device | None = None,
    ) -> "ModelRunner":
        """Read the checkpoint and reserve KV memory; `progress` is called with bytes read. `on_loss` is called, on
        another thread, if a rank is lost later. `gpu`: computes, instead of what `config` names (for tests).

        Raises CheckpointError for what is wrong with the checkpoint, ConfigError for what is wrong with `config`,
        RankLost for a rank that ends.
        """
        path = Path(config.model.model)
        spec = load_spec(path)
        embedding = read_embedding_spec(path, spec.hidden_size)
        share = share_of(config, spec)
        check_shares(spec, config.model.quantize, share.size)
        max_context_tokens = _max_context_tokens(config, spec)
        threads = _threads_per_rank(config)
        if threads is not None:
            torch.set_num_threads(threads)
        chosen = choose_backend(config, spec, max_context_tokens, gpu)
        _log_choice(chosen.why, spec, max_context_tokens, config.cache.sparse_budget)
        loader = chosen.loader
        packing = packing_of(config.kv_dtype, loader.packing, on_gpu=loader.gpu is not None)
        with Checkpoint(path, spec) as checkpoint, ExitStack() as stack:
            drafts = DraftSource.open(config, spec, max_context_tokens, packing, stack)
            draft_bytes = _check_memory(config, checkpoint, share, loader, drafts)
            peer_sockets = _connect_peers(config, share, checkpoint, chosen, drafts.skipped)
            if peer_sockets is not None:
                stack.callback(peer_sockets.close)
            layout = _layout(config, checkpoint, drafts, packing, max_context_tokens)
            ranks = _start_ranks(config, share, chosen, layout, drafts.skipped, on_loss)
            if ranks is not None:
                stack.callback(ranks.close)
            built = stack.enter_context(ExitStack())  # it closes after an error of the ranks has got its name
            if ranks is not None:
                stack.enter_context(ranks.naming())
            weights = loader.load(checkpoint, share, progress)
            needed_bytes = draft_bytes + weights.step_bytes()  # before ranks wait for one another: it compiles kernels
            group = ranks.join(loader.gpu) if ranks is not None else Alone()
            cache = _cache(config, layout, max_context_tokens, loader, ranks, needed_bytes)
            with needing_memory("the angles of all positions", "lower kv_memory_fraction or max_context_tokens"):
                cos_sin = rope_tables(spec, max_context_tokens, loader.torch_device)
            resources = StepResources(
                cache, cos_sin, group, ranks, peer_sockets, on_loss, taken=drafts.taken, later_bytes=draft_bytes
            )
            backend = weights.build(resources)
            built.callback(backend.close)
            draft = drafts.load(config, checkpoint, weights, replace(resources, turns=backend.turns), loader)
            if draft is not None:
                built.callback(draft.close)
            _begin(loader, cache, ranks, backend.turns)
            info = _info(config, spec, max_context_tokens, embedding, chosen.config.sparse_budget)
            links, spread = ((), None) if ranks is None else (ranks.kv_links, _spread(cache, ranks))
            runner = cls(info, backend, cache, draft, links, spread)
            stack.pop_all()
        return runner

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def layout(self) -> KVLayout:
        return self._cache.layout

    @property
    def memory(self) -> KVMemory:
        return self._memory

    @property
    def proposer(self) -> GuardedProposer | None:
        return self._draft

    def launch(self, batch: Batch, watch: LayerWatch | None = None) -> InFlightStep:
        step = self.backend.launch(batch, watch)
        return step if self._computed is None else DraftedStep(step, batch, self._computed)

    @property
    def has_borrowed_cores(self) -> bool:
        return self.backend.has_borrowed_cores

    def takes_input_from_previous(self, sampling: SamplingParams) -> bool:
        return self.backend.takes_input_from_previous(sampling)

    def expert_tokens(self) -> npt.NDArray[np.int64] | None:
        return self.backend.expert_tokens()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.backend.copy_blocks(pairs)
        if self._spread is not None and not self._cache.is_on_gpu:  # ranks with GPUs hear of it as of a step
            self._spread.copy_blocks(pairs)

    def check(self) -> None:
        self.backend.check()

    def close(self) -> None:
        """End what the backend runs; what else is held is memory, which is freed with this object. Idempotent."""
        self.backend.close()
        if self._draft is not None:
            self._draft.close()
        if self._spread is not None:
            self._spread.close()


def _begin(loader: BackendLoader, cache: KVCache, ranks: RankProcesses | None, turns: DraftTurns | None) -> None:
    """Begin to serve, with the other ranks or workers: all is loaded."""
    if ranks is not None:
        ranks.meet()
    cache.seal()
    if loader.gpu is not None:
        loader.gpu.loaded()
    if turns is not None:
        turns.begin()


def _spread(cache: KVCache, ranks: RankProcesses) -> SpreadKV | None:
    """Make the KV of all ranks, where some are on other machines."""
    links = [MachineLink(link, of) for of, link in ranks.machine_links]
    for link in links:
        link.lost.add_done_callback(lambda lost: None if lost.cancelled() else ranks.fail(RankLost(str(lost.result()))))
    return SpreadKV(cache.memory, links) if links else None


def _log_choice(why: str, spec: ModelSpec, max_context_tokens: int, sparse_budget: int) -> None:
    log.info("%s", why)
    if sparse_budget:
        log.info("sparse_attention: %s", why_of(spec, sparse_budget))
    for rope, _ in spec.ropes:
        if rope.is_long(max_context_tokens):
            log.info(
                "longrope: all contexts are rotated as long ones are; max_context_tokens=%d and less as short ones",
                rope.original_max_position_embeddings,
            )


def _check_memory(
    config: WorkerConfig, checkpoint: Checkpoint, share: Share, loader: BackendLoader, drafts: DraftSource
) -> int:
    """Return the bytes of rank 0's weights of what drafts, which it loads last: other ranks load theirs first. Raises
    InsufficientMemory where the weights of the ranks that share its memory do not fit."""
    stored_as = config.model.dtype, loader.quantize
    num_here = config.parallel.ranks_per_machine if loader.torch_device.type == "cpu" else 1  # ranks in this memory
    shares = [replace(share, rank=rank) for rank in range(num_here)]
    available = available_bytes(loader.torch_device)
    draft_bytes = drafts.weight_bytes(checkpoint.spec, *stored_as, keeps=loader.keeps_numbers)
    layouts = checkpoint.layouts if loader.keeps_numbers else NONE
    decoded = () if loader.gpu is None else DECODED_ON_GPUS
    check_fits(checkpoint.spec, shares, *stored_as, available, sum(draft_bytes[:num_here]), layouts, decoded)
    return draft_bytes[0]


def _info(
    config: WorkerConfig, spec: ModelSpec, max_context_tokens: int, embedding: EmbeddingSpec, sparse_budget: int
) -> ModelInfo:
    return ModelInfo(
        name=config.model.name,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_context_tokens=max_context_tokens,
        eos_token_ids=spec.eos_token_ids,
        dtype=config.model.dtype,
        num_experts=spec.num_experts,
        embedding=embedding,
        sparse_budget=sparse_budget,
        sparse_by_default=config.cache.sparse_by_default,
    )


def _layout(
    config: WorkerConfig, checkpoint: Checkpoint, drafts: DraftSource, packing: str, max_context_tokens: int
) -> KVLayout:
    def id_of(checkpoint: Checkpoint) -> str:
        return _model_id(checkpoint, config.model.quantize, max_context_tokens)

    model_id = id_of(checkpoint)
    return layout_of(
        checkpoint.spec,
        config.kv_dtype,
        config.cache.block_size,
        model_id=model_id,
        axis_order=AXIS_ORDERS[config.cache.kv_axis_order],
        tensor_parallel=config.parallel.tensor_parallel,
        packing=packing,
        draft=drafts.kv_shape(model_id, id_of),
    )


def _threads_per_rank(config: WorkerConfig) -> int | None:
    if config.threads is None and config.parallel.tensor_parallel == 1:
        return None
    return max((config.threads or torch.get_num_threads()) // config.parallel.ranks_per_machine, 1)


def _connect_peers(
    config: WorkerConfig, share: Share, checkpoint: Checkpoint, chosen: ChosenBackend, skipped: Sequence[int]
) -> PeerSockets | None:
    group, own = config.parallel.peer_group, chosen.config
    if group is None:
        return None
    held = hashlib.blake2b(repr(share.experts).encode(), digest_size=8).hexdigest()
    terms = f"checkpoint {checkpoint.fingerprint()}, {config.model.dtype}, placement {held}"
    if chosen.loader.gpu is not None:  # all capture the same graphs, and have memory for each other's rows
        kind, graphs = config.model.device_kind, "graphs" if config.model.cuda_graphs else "no graphs"
        terms += f", {kind}, max_running {own.max_running}, max_batch_tokens {own.max_batch_tokens}, {graphs}"
        terms += f", max_draft_tokens {own.max_draft_tokens}, sparse_budget_tokens {own.sparse_budget}"
        terms += f", drafts without layers {skipped}" if skipped else ""
        terms += ", large steps in halves" if are_wanted() else ""
    return connect_peers(group, terms)


def _start_ranks(
    config: WorkerConfig,
    share: Share,
    chosen: ChosenBackend,
    layout: KVLayout,
    skipped: Sequence[int],
    on_loss: OnLoss,
) -> RankProcesses | None:
    if config.parallel.tensor_parallel == 1:
        return None
    own = chosen.config
    settings = RankSettings(
        model_path=config.model.model,
        layout=layout,
        dtype=own.dtype,
        max_context_tokens=own.max_context_tokens,
        num_threads=torch.get_num_threads(),
        cpu_isa=chosen.cpu_isa,
        cores=config.cores,
        quantize=own.quantize,
        experts=told_of(share),
        draft_model=config.speculation.draft_model if config.num_draft_ranks > 1 else None,
        skipped_layers=tuple(skipped),
        device=chosen.device,
        max_running=own.max_running,
        max_draft_tokens=own.max_draft_tokens,
        max_batch_tokens=own.max_batch_tokens,
        graph_tokens=own.graph_tokens,
        sparse_budget=own.sparse_budget,
        size=config.parallel.tensor_parallel,
        num_machines=config.parallel.machines_per_worker,
    )
    return RankProcesses(settings, on_loss, chosen.sums, _other_machines(config))


def _other_machines(config: WorkerConfig) -> OtherMachines | None:
    """Raises ConfigError where `host` is no address of this machine."""
    hosts = config.parallel.rank_hosts
    return OtherMachines(hosts, NetworkStore(config.host), config.auth_token) if hosts else None


def _model_id(checkpoint: Checkpoint, quantize: str | None, max_context_tokens: int) -> str:
    """Other weights and other ropes make other KV: what has them never continues what has not."""
    is_long = any(rope.is_long(max_context_tokens) for rope, _ in checkpoint.spec.ropes)
    return checkpoint.fingerprint() + (f"+{quantize}" if quantize else "") + ("+long" if is_long else "")


def _cache(
    config: WorkerConfig,
    layout: KVLayout,
    max_context_tokens: int,
    loader: BackendLoader,
    ranks: RankProcesses | None,
    needed_bytes: int,
) -> KVCache:
    """Make the KV cache, as large as memory and settings allow; other ranks make theirs at the same time.
    needed_bytes: of free memory, by something else."""
    sizes = config.scheduler.max_running, config.device_scheduler.max_batch_tokens
    num_here = layout.tensor_parallel if loader.gpu is not None else 1  # ranks that have memory of their own
    needed_bytes += tail_bytes(layout, config.model.dtype, *sizes) // num_here
    available, shared, multiple = max(available_bytes(loader.torch_device) - needed_bytes, 0), None, 1
    if ranks is not None:
        available, shared = ranks.available_bytes(available), ranks.shared(loader.gpu)
        multiple = blocks_at_once(layout, granularity_of(shared))
    wanted = config.cache.kv_memory_bytes or int(available * config.kv_memory_fraction)
    num_blocks = plan_num_blocks(layout, max_context_tokens, wanted, multiple)
    if num_blocks * layout.block_bytes > available:
        raise ConfigError(f"kv_memory_bytes={wanted:,} exceeds the {available:,} bytes that are free: lower it")
    if ranks is not None:
        ranks.begin(num_blocks)
    if ranks is None and loader.torch_device.type == "cpu" and loader.gpu is None:
        shared = _pool_file(config, num_blocks * layout.block_bytes)
    return loader.make_cache(layout, num_blocks, 0, shared, range(config.parallel.ranks_per_machine))


def _pool_file(config: WorkerConfig, num_bytes: int) -> PoolFile | None:
    """Make the memory file by which other workers may read the pool, or none: if nobody may, or if it cannot have the
    huge pages that private memory gets. The transport's name in the settings outweighs the pages."""
    names = config.handoff.transports
    if names != "auto" and SHARED_MEMORY not in names:
        return None
    return PoolFile.make(num_bytes, small_pages=names != "auto" or not anonymous_has_huge_pages())


def _max_context_tokens(config: WorkerConfig, spec: ModelSpec) -> int:
    wanted = config.model.max_context_tokens or spec.max_position_embeddings
    if wanted > spec.longest_context:
        raise ConfigError(f"max_context_tokens={wanted} exceeds the model's {spec.longest_context} positions: lower it")
    return wanted
