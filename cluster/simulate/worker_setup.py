"""Settings of a simulated worker, and the report of what it made of them."""

from dataclasses import dataclass, field

from ...proto import worker_pb2
from ...workers.common.wire import ROLE_TO_PROTO
from ...workers.core.block_manager import BlockManager
from ...workers.core.scheduler import Scheduler
from ...workers.core.scheduler_config import SchedulerConfig
from ...workers.costs.step_cost import StepCost
from .noise import Noise
from .speculation import SpeculationSetup
from .timing import StepTimer


@dataclass(frozen=True, slots=True)
class TransitTimes:
    """Time of a request, and its first token, on the way between client and worker. `busy_s`: so much more where all
    workers compute when it comes, and share cores with what serves."""

    idle_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Parts and sizes of a simulated worker. `num_gpus`: that it takes, for utilisation and price; `per_machine`:
    number of workers on a machine, `contention`: share by which a step takes longer while another of them computes;
    `noise`: of its steps' time."""

    pool: str
    scheduler: SchedulerConfig
    num_blocks: int
    block_size: int
    prefix_cache: bool
    timer: StepTimer
    cost: StepCost
    num_gpus: float = 1.0
    per_machine: int = 1
    contention: float = 0.0
    noise: Noise | None = None
    transit: TransitTimes = field(default_factory=TransitTimes)
    speculation: SpeculationSetup | None = None


def report_of(scheduler: Scheduler, manager: BlockManager, step_cost: worker_pb2.StepCost) -> worker_pb2.LoadReport:
    """Make the part of a worker's report that its scheduler and blocks say, as in workers/engine/load.py."""
    return worker_pb2.LoadReport(
        num_running=scheduler.num_running,
        num_decoding=scheduler.num_decoding,
        num_waiting=scheduler.num_waiting,
        num_blocks=manager.num_blocks,
        num_free_blocks=manager.num_free,
        num_leased_blocks=manager.num_leased,
        role=ROLE_TO_PROTO[scheduler.config.role_of(scheduler.prefill_budget)],
        prefill_budget=scheduler.prefill_budget,
        step_tokens=scheduler.config.step_tokens,
        decode_role_tokens=scheduler.config.decode_role_prefill_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_prompts=scheduler.prompts.num_prompts,
        num_prompt_tokens=scheduler.prompts.num_tokens,
        num_cached_tokens=scheduler.prompts.num_cached,
        num_waiting_tokens=scheduler.num_waiting_tokens,
        num_late_tokens=scheduler.num_late_tokens,
        step_cost=step_cost,
    )
