"""Small simulated clusters whose steps take times that a person can compute."""

from dataclasses import replace
from typing import Any

from diptych.cluster.common.config_file import build
from diptych.cluster.simulate.load import SimulatedRequest
from diptych.cluster.simulate.noise import Noise
from diptych.cluster.simulate.routes import SimulatedRouter
from diptych.cluster.simulate.scaling import Scaler
from diptych.cluster.simulate.simulation import Simulation
from diptych.cluster.simulate.timing import FittedTimer, KnownCost
from diptych.cluster.simulate.transfers import Links, LinkSetup
from diptych.cluster.simulate.worker_setup import TransitTimes, WorkerSetup
from diptych.workers.core.runner import ModelInfo
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.kv.layout import KVLayout

LAYOUT = KVLayout("bfloat16", 16, 2, 2, 8, "m")  # 128 bytes of KV a token
TIMER = FittedTimer((0.01, 0.0, 0.0, 0.001, 0.0, 0.0))  # 10 ms a step and 1 ms a prompt token


def cluster(
    pools: dict[str, Any],
    *,
    timer: FittedTimer = TIMER,
    num_blocks: int = 1000,
    prefix_cache: bool = False,
    link: LinkSetup | None = None,
    start_s: float = 5.0,
    scheduler: SchedulerConfig | None = None,
    level: dict[str, float] | None = None,
    per_machine: int = 1,
    contention: float = 0.0,
    noise: Noise | None = None,
    request_times: TransitTimes | None = None,
    dial: bool = False,
    **router_settings: Any,
) -> Simulation:
    """`pools`: as in YAML; `router_settings`: as in YAML."""
    settings = {"model": "tiny", "pools": pools, "dial": dial, "router": {"predict": False} | router_settings}
    config = build(settings | ({"service_level": level} if level else {}))
    steps = scheduler or SchedulerConfig(max_batch_tokens=512, target_step_s=0)
    cost = KnownCost(timer.weights)
    setup = WorkerSetup("", steps, num_blocks, 16, prefix_cache, timer, cost, 1.0, per_machine, contention, noise)
    setup = replace(setup, transit=request_times or TransitTimes())
    setups = {pool: replace(setup, pool=pool) for pool in pools}
    model = ModelInfo("m", "LlamaForCausalLM", 1000, 8192, (), "bfloat16")
    links = Links(link or LinkSetup(128_000.0, 0.002, 1))  # 1 ms a token, and 2 ms
    router = SimulatedRouter(config, model, LAYOUT)
    return Simulation(router, links, setups, Scaler(config, start_s))


def requests(*shapes: tuple[float, int, int]) -> list[SimulatedRequest]:
    """Requests of (at_s, num_input, num_output) that share nothing."""
    return [SimulatedRequest(i, *shape) for i, shape in enumerate(shapes)]
