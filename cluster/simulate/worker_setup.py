"""Settings of a simulated worker."""

from dataclasses import dataclass, field

from ...workers.core.scheduler_config import SchedulerConfig
from ...workers.costs.step_cost import StepCost
from .noise import Noise
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
