"""Makes a simulation of a cluster's settings, of a worker's profile or a GPU, and of a link."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from ...workers.common.errors import ConfigError
from ...workers.config.worker_config import KV_FRACTIONS, WorkerConfig
from ...workers.core.runner import ModelInfo
from ...workers.models.families.spec import ModelSpec
from ...workers.models.head_specs.head_bytes import head_weight_bytes
from ...workers.models.plan.kv_plan import layout_of
from ...workers.models.plan.number_layouts import planned_layouts
from ...workers.models.plan.sharding import WHOLE
from ...workers.models.plan.skipped_layers import read_skipped_layers
from ...workers.models.plan.weight_bytes import weight_bytes
from ..common.config import ClusterConfig
from ..common.deployment import step_tpot_s
from ..preflight.checks import check_model, resolve_model
from ..preflight.memory_plan import Parallelism
from .figures import SimulationFigures, figures_of
from .gpus import Gpu
from .load import SimulatedRequest
from .noise import Noise
from .profile import LinkProfile, Profile
from .roofline import Efficiency, RooflineTimer, kv_blocks
from .routes import SimulatedRouter
from .scaling import Scaler
from .simulation import Simulation
from .speculation import SpeculationSetup
from .timing import KnownCost, StepTimer, fit_timer
from .transfers import AUTO_GROUPS, Links, LinkSetup
from .worker_setup import TransitTimes, WorkerSetup

LINK_BYTES_S = 50e9  # 400 Gbit/s
LINK_LATENCY_S = 0.001


@dataclass(frozen=True, slots=True)
class Hardware:
    """Hardware of a simulated cluster. `steps`: a measured profile, or a GPU; `start_s`: until a new worker serves;
    `transit`: of requests between client and worker, instead of the profile's; `seed`: of the variation of steps, where
    a profile knows it, and of which drafts are accepted; `acceptance`: probability that a drafted token is accepted if
    those before it are, where pools speculate; `draft_share`: time of a pass of a model that drafts, by that of a step
    that decodes; None: by the bytes of their weights."""

    steps: Profile | Gpu
    link_bytes_s: float = LINK_BYTES_S
    reached: Efficiency = field(default_factory=Efficiency)
    link_latency_s: float = LINK_LATENCY_S
    start_s: float = 60.0
    transit: TransitTimes | None = None
    seed: int = 0
    acceptance: float | None = None
    draft_share: float | None = None

    @classmethod
    def of(cls, measured: Profile) -> Self:
        """The hardware that a profile was measured on."""
        link = measured.link or LinkProfile(LINK_BYTES_S, LINK_LATENCY_S)
        return cls(measured, link.bytes_s, link_latency_s=link.latency_s)


def build_simulation(config: ClusterConfig, hardware: Hardware, *, shares_blocks: bool) -> Simulation:
    """`shares_blocks`: some requests of the load share KV blocks; else workers keep no prefix caches. Raises
    ConfigError."""
    spec = check_model(Path(resolve_model(config.shared.model.model)))
    setups = {
        name: _setup(name, config, spec, hardware, shares_blocks=shares_blocks)
        for name, pool in config.pools.items()
        if pool.bounds[1] > 0
    }
    sizes = {setup.block_size for setup in setups.values()}
    if len(sizes) > 1:
        raise ConfigError(f"the pools have blocks of {sorted(sizes)} tokens, but the simulator needs one block_size")
    shared = config.shared
    layout = layout_of(spec, shared.kv_dtype, sizes.pop(), tensor_parallel=shared.parallel.tensor_parallel)
    fits = min(setup.num_blocks * setup.block_size for setup in setups.values())
    longest = min(shared.model.max_context_tokens or spec.max_position_embeddings, fits)
    model = ModelInfo(
        shared.model.name, spec.architecture, spec.vocab_size, longest, spec.eos_token_ids, shared.model.dtype
    )
    groups = shared.handoff.layer_groups or AUTO_GROUPS
    links = Links(LinkSetup(hardware.link_bytes_s, hardware.link_latency_s, groups))
    router = SimulatedRouter(config, model, layout)
    return Simulation(router, links, setups, Scaler(config, hardware.start_s))


def simulate(
    config: ClusterConfig,
    hardware: Hardware,
    load: Sequence[SimulatedRequest],
    levels: Mapping[str, float] | None = None,
    price: float | None = None,
) -> SimulationFigures:
    """Simulate a load, in order of time. `levels`: see `level_of`; `price`: of a GPU, or worker, for an hour. The same
    arguments give the same figures. Raises ConfigError."""
    simulation = build_simulation(config, hardware, shares_blocks=any(request.ids for request in load))
    simulation.run(load)
    return figures_of(simulation, level_of(config, levels or {}), price)


def _setup(
    pool: str, config: ClusterConfig, spec: ModelSpec, hardware: Hardware, *, shares_blocks: bool
) -> WorkerSetup:
    worker, steps = config.worker(pool), hardware.steps
    size = worker.cache.block_size
    parallel = worker.parallel
    ranks, experts = parallel.tensor_parallel, parallel.expert_parallel
    weights, kv = worker.model, worker.kv_dtype
    how = Parallelism(weights.dtype, weights.quantize, ranks, size, experts, on_gpus=True, kv_dtype=kv)
    per_machine, contention, noise, transit = 1, 0.0, None, TransitTimes()
    if isinstance(steps, Profile):
        measured = steps.of_threads(worker.threads)
        num_blocks = measured.worker.num_blocks * measured.worker.block_size // size
        timer: StepTimer = measured.timer(pool)
        cost = KnownCost(measured.weights_of(pool))
        per_machine, contention = measured.per_machine, measured.contention
        noise, transit = Noise.of(measured.residuals, hardware.seed), measured.transit
    else:
        layouts = planned_layouts(Path(resolve_model(worker.model.model)), spec)
        num_blocks = kv_blocks(spec, how, steps, worker.cache.kv_memory_fraction or KV_FRACTIONS["cuda"], layouts)
        timer = RooflineTimer.of(spec, how, steps, hardware.reached, layouts)
        cost = KnownCost(fit_timer(timer))
    layout = layout_of(spec, worker.kv_dtype, size, tensor_parallel=how.tensor_parallel)
    if worker.cache.kv_memory_bytes is not None:
        num_blocks = int(worker.cache.kv_memory_bytes // layout.block_bytes)
    if num_blocks < 1:
        raise ConfigError(
            f"pools.{pool}: the model's weights leave no memory for KV on that GPU: raise tensor_parallel or "
            "kv_memory_fraction"
        )
    return WorkerSetup(
        pool=pool,
        scheduler=replace(worker.device_scheduler, ttft_s=config.service_level.ttft_s, tpot_s=step_tpot_s(config)),
        num_blocks=num_blocks,
        block_size=size,
        prefix_cache=worker.cache.prefix_cache and shares_blocks,
        timer=timer,
        cost=cost,
        num_gpus=float(how.tensor_parallel),
        per_machine=per_machine,
        contention=contention,
        noise=noise,
        transit=hardware.transit or transit,
        speculation=_speculation(pool, worker, spec, hardware),
    )


def _speculation(pool: str, worker: WorkerConfig, spec: ModelSpec, hardware: Hardware) -> SpeculationSetup | None:
    """Raises ConfigError without an acceptance, and what reading a draft's files raises."""
    of, share = worker.speculation, hardware.draft_share
    if of.speculation == "none":
        return None
    if hardware.acceptance is None:
        raise ConfigError(
            f"pools.{pool}: its workers speculate ({of.speculation}): give --acceptance, the share of the drafted "
            "tokens that is accepted (`diptych status` shows it), or set speculation to none"
        )
    if of.has_model and share is None:
        share = pass_share(worker, spec)
    return SpeculationSetup(
        of.speculation,
        hardware.acceptance,
        of.max_draft_tokens,
        of.min_draft_acceptance,
        pass_share=share if of.has_model else None,
        computes_prompts=of.has_model and of.speculation != "self",
        seed=hardware.seed,
    )


def pass_share(worker: WorkerConfig, spec: ModelSpec) -> float:
    """Share of the bytes of the served model's weights that what drafts reads: where bytes are what a step waits for,
    of its time, too. Raises ConfigError or CheckpointError for what is wrong with a draft's files."""
    of, dtype = worker.speculation, worker.model.dtype
    target = sum(weight_bytes(spec, WHOLE, dtype).values())
    folder = Path(resolve_model(worker.model.model))
    if of.skipped_layers is not None:
        return 1 - len(read_skipped_layers(Path(of.skipped_layers), folder, spec)) / spec.num_layers
    draft = Path(resolve_model(of.draft_model)) if of.draft_model is not None else folder
    if of.has_head:
        return head_weight_bytes(draft, spec, dtype) / target
    return sum(weight_bytes(check_model(draft), WHOLE, dtype).values()) / target


def level_of(config: ClusterConfig, given: Mapping[str, float]) -> Mapping[str, float]:
    """The service level, in seconds by metric: the given one, or the cluster's."""
    return given or {"ttft": config.service_level.ttft_s, "tpot": config.service_level.tpot_s}
