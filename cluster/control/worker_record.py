"""Worker as the supervisor knows it, from its start to its end, and what it tells others of it."""

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ...proto.worker_pb2 import LoadReport
from ...workers.common.errors import DiptychError, InternalError
from ...workers.common.role import Role
from ...workers.common.wire import ROLE_FROM_PROTO
from ..common.expert_loads import add_up
from ..common.gang import gang_of
from ..common.handles import WorkerStarted
from ..routing.fleet import WorkerInfo
from .plan import Phase, PlannedWorker
from .status import DraftStatus, TransferStatus, WorkerStatus
from .worker_control import WorkerControl

PLACE_S = 600.0  # a new worker that finds no place for so long ends an upgrade: machines may have to come first
SERVING = (Phase.READY, Phase.DRAINING)


@dataclass(slots=True, eq=False)
class WorkerRecord:
    worker_id: str
    pool: str
    phase: Phase = Phase.STARTING
    is_new: bool = True  # no earlier supervisor started it
    generation: int = 0  # of its settings
    since: float = field(default_factory=time.monotonic)  # of the phase
    ready_at: float | None = None
    waiting_for: str = ""  # what must come before it can be placed
    unplaced_at: float = 0.0  # when it last waited for that
    started: WorkerStarted | None = None
    control: WorkerControl | None = None
    prefill_budget: int | None = None  # tokens, as the controller decided; None: that of its pool's role
    task: "asyncio.Task[None] | None" = None  # exists as long as the process

    def enter(self, phase: Phase) -> None:
        self.phase, self.since = phase, time.monotonic()

    def wait_for(self, what: str) -> None:
        self.waiting_for = what
        if what:
            self.unplaced_at = time.monotonic()

    @property
    def load(self) -> LoadReport:
        return self.control.load if self.control else LoadReport()

    @property
    def wanted_budget(self) -> int | None:
        """Prefill budget that it should have; None while it has not reported."""
        if self.control is None:
            return None
        return self.control.budget_of(Role(self.pool)) if self.prefill_budget is None else self.prefill_budget

    def keep_budget(self) -> None:
        """Tell it its prefill budget again, if it reports another one."""
        wanted = self.wanted_budget
        if self.control and self.phase is Phase.READY and wanted is not None and wanted != self.load.prefill_budget:
            self.control.set_prefill_budget(wanted)

    def transfers(self, worker_ids: Mapping[str, str]) -> list[TransferStatus]:
        """Return the worker's transfers, as a person reads them. `worker_ids`: names of the live workers by
        incarnation."""
        transfers = self.control.transfer_stats if self.control else ()
        return [
            TransferStatus(
                self.worker_id,
                worker_ids.get(stats.source, stats.source),
                stats.transport,
                stats.num_bytes,
                stats.read_s,
                stats.num_reads,
                stats.num_failed,
            )
            for stats in transfers
        ]

    def view(self, *, is_outdated: bool = False) -> PlannedWorker:
        """Return the worker as the plan sees it. `is_outdated`: workers shall have other settings."""
        num_requests = self.load.num_running + self.load.num_waiting
        is_silent = self.phase is Phase.STARTING and not (self.is_new or self.waiting_for)
        return PlannedWorker(
            worker_id=self.worker_id,
            pool=self.pool,
            phase=self.phase,
            num_requests=num_requests,
            is_draining=self.load.draining,
            is_silent=is_silent,
            is_outdated=is_outdated and not is_silent,
            waits=bool(self.waiting_for),
        )

    def info(self) -> WorkerInfo | None:
        """Return the worker as routers see it; None while it has no requests to take or to finish."""
        if self.started is None or self.phase not in SERVING:
            return None
        return WorkerInfo(
            self.started.incarnation, self.started.address, self.pool, self.pool, self.worker_id, self.generation
        )

    def status(self, now: float) -> WorkerStatus:
        """Return the worker as a person sees it, at `now` (monotonic s)."""
        started, load = self.started, self.load
        role = ROLE_FROM_PROTO.get(load.role)
        return WorkerStatus(
            worker_id=self.worker_id,
            pool=self.pool,
            role=role.value if role else self.pool,
            prefill_budget=load.prefill_budget,
            target_prefill_budget=self.wanted_budget,
            phase=self.phase.value,
            phase_s=now - self.since,
            waiting_for=self.waiting_for,
            generation=self.generation,
            address=started.address if started else None,
            node=started.node if started else None,
            rank_host_nodes=started.rank_host_nodes if started else (),
            pid=started.pid if started else None,
            cores=started.cores if started else None,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_blocks=load.num_blocks,
            num_free_blocks=load.num_free_blocks,
            num_leased_blocks=load.num_leased_blocks,
            num_prefill_tokens=load.num_prefill_tokens,
            num_decode_tokens=load.num_decode_tokens,
            num_checksum_failures=load.num_checksum_failures,
            drafts=tuple(DraftStatus(each.method, each.num_drafted, each.num_accepted) for each in load.drafts),
            draft_yields=tuple(load.draft_yields),
            num_draft_tokens_anew=load.num_draft_tokens_anew,
            num_draft_failures=load.num_draft_failures,
            is_draft_off=load.is_draft_off,
        )


def newest_reports(workers: Collection[WorkerRecord]) -> dict[str, list[tuple[str, LoadReport]]]:
    """Return the newest reports of the ready workers of each pool, by worker; of gangs, those that have all of their
    members."""
    by_pool: dict[str, list[tuple[str, LoadReport]]] = {}
    incomplete = _incomplete(workers)
    for worker in workers:
        if worker.phase is Phase.READY and worker.control and gang_of(worker.worker_id) not in incomplete:
            by_pool.setdefault(worker.pool, []).append((worker.worker_id, worker.control.load))
    return by_pool


async def audit(workers: Iterable[WorkerRecord]) -> dict[str, str]:
    """Return, for each worker that is ready, what is wrong with its block bookkeeping; empty where nothing is."""
    ready = [(w.worker_id, w.control) for w in workers if w.phase is Phase.READY and w.control]
    found = await asyncio.gather(*(control.audit() for _, control in ready))
    return dict(zip((worker_id for worker_id, _ in ready), found, strict=True))


async def experts(workers: Iterable[WorkerRecord], pool: str | None) -> dict[int, list[int]]:
    """Return, for each layer, each expert's token count on all of these that are ready, or on those of one pool. Raises
    InternalError, WorkerLost."""
    ready = (w for w in workers if w.phase is Phase.READY and pool in {None, w.pool})
    return add_up(await asyncio.gather(*(w.control.state() for w in ready if w.control)))


def waiting_pools(workers: Iterable[WorkerRecord]) -> set[str]:
    """Return the pools of which a worker waits for a place."""
    return {worker.pool for worker in workers if worker.waiting_for}


def unplaced(workers: Iterable[WorkerRecord], generation: int) -> dict[str, DiptychError]:
    """Return what is wrong with the workers of that generation that have waited for a place longer than PLACE_S."""
    now = time.monotonic()
    late = (w for w in workers if w.waiting_for and w.generation == generation and now - w.since > PLACE_S)
    remedy = "add a node, scale a pool down, or use --in-place"
    return {w.worker_id: InternalError(f"it waited {PLACE_S:g} s for {w.waiting_for}: {remedy}") for w in late}


def announced(workers: Collection[WorkerRecord]) -> list[WorkerInfo]:
    """Return the workers that routers learn of: those of gangs that have all of their members."""
    incomplete = _incomplete(workers)
    infos = (worker.info() for worker in workers if gang_of(worker.worker_id) not in incomplete)
    return [info for info in infos if info]


def _incomplete(workers: Iterable[WorkerRecord]) -> set[str]:
    """Return the gangs of which a member starts."""
    return {gang_of(worker.worker_id) for worker in workers if worker.phase is Phase.STARTING}
