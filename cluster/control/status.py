"""Status of a running cluster for persons and scripts. Plain data, the same in `diptych status` and its --json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..upgrade.progress import UpgradeStatus
from .decisions import DecisionStatus, ForecastStatus
from .plan import Failures, Phase


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """Tokens that one method of speculation drafted on a worker, since its start."""

    method: str
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    worker_id: str
    pool: str
    role: str  # that its prefill budget amounts to
    phase: str  # starting, ready, draining or stopping
    phase_s: float  # since when
    waiting_for: str = ""  # what must come before Ray can place it
    generation: int = 0  # of its settings, which an upgrade changes
    address: str | None = None
    node: str | None = None  # the machine's name
    rank_host_nodes: tuple[str, ...] = ()  # of the other machines that its ranks are on
    pid: int | None = None
    cores: tuple[int, ...] | None = None  # that its compute threads are bound to
    prefill_budget: int = 0  # prompt tokens that a step may compute beside running decodes
    target_prefill_budget: int | None = None  # that it was told, or will be; None while it has not reported
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or evictable
    num_leased_blocks: int = 0
    num_prefill_tokens: int = 0  # since its start
    num_decode_tokens: int = 0
    num_checksum_failures: int = 0  # pulls whose KV differed from the source's
    drafts: tuple[DraftStatus, ...] = ()  # empty: none yet
    draft_yields: tuple[int, ...] = ()  # verifications of drafts that yielded 1, 2, ... tokens
    num_draft_tokens_anew: int = 0  # whose KV in the model that drafts was computed later than in the model
    num_draft_failures: int = 0  # calls of the model that drafts in which an exception was raised
    is_draft_off: bool = False  # it failed so often that it drafts no more

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that was accepted; None: none were drafted."""
        num_drafted = sum(counts.num_drafted for counts in self.drafts)
        return sum(counts.num_accepted for counts in self.drafts) / num_drafted if num_drafted else None

    @property
    def mean_yield(self) -> float:
        """Tokens of a verification on average; 0 where there was none."""
        num = sum(self.draft_yields)
        return sum(n * times for n, times in enumerate(self.draft_yields, 1)) / num if num else 0.0

    @property
    def kv_use(self) -> float:
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """KV that `sink` pulled from `source`, since the sink's start."""

    sink: str  # worker ids; for a source that has ended, its incarnation
    source: str
    transport: str  # the last used
    num_bytes: int
    read_s: float  # in which at least one read was running
    num_reads: int
    num_failed: int  # pulls

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.read_s if self.read_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PoolStatus:
    name: str
    target: int
    num_ready: int
    num_starting: int
    num_draining: int
    min_replicas: int
    max_replicas: int
    start_s: float | None = None  # that a start of a worker takes at most, by the last ones
    needed: int | None = None  # workers by the forecast, when one that starts now would serve; None: not known
    num_failures: int = 0  # in a row; 0 once a worker has lived since
    last_error: str = ""
    retry_in_s: float = 0.0


def pool_status(
    name: str, target: int, bounds: tuple[int, int], phases: Sequence[Phase], failures: Failures | None, now: float
) -> PoolStatus:
    """`bounds`: least and most replicas. `phases`: of its gangs. `now`: monotonic seconds, as `failures` has them."""
    failures = failures or Failures()
    return PoolStatus(
        name=name,
        target=target,
        num_ready=phases.count(Phase.READY),
        num_starting=phases.count(Phase.STARTING),
        num_draining=phases.count(Phase.DRAINING) + phases.count(Phase.STOPPING),
        min_replicas=bounds[0],
        max_replicas=bounds[1],
        num_failures=failures.count,
        last_error=failures.last_error,
        retry_in_s=max(failures.retry_at - now, 0.0),
    )


@dataclass(frozen=True, slots=True)
class RouterStatus:
    router_id: str
    phase: str  # starting or ready
    host: str | None = None
    http_port: int | None = None
    grpc_port: int | None = None
    pid: int | None = None
    last_error: str = ""
    num_failures: int = 0  # in a row; 0 once it is ready
    waiting_for: str = ""  # what must come before Ray can place it


@dataclass(frozen=True, slots=True)
class StartFailure:
    """An error that starting again would not mend."""

    error: str  # its name in workers/common/errors.py
    message: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    name: str
    model: str
    supervisor_pid: int
    pools: tuple[PoolStatus, ...]
    workers: tuple[WorkerStatus, ...]
    routers: tuple[RouterStatus, ...]
    failure: StartFailure | None = None
    links: tuple[TransferStatus, ...] = ()
    decisions: tuple[DecisionStatus, ...] = ()  # of the controller, newest first
    num_decisions: Mapping[str, int] = field(default_factory=dict[str, int])  # by kind, since the supervisor's start
    num_verified_decisions: Mapping[str, int] = field(default_factory=dict[str, int])  # of which the result is good
    num_failed_decisions: Mapping[str, int] = field(default_factory=dict[str, int])  # that did nothing
    tls_until: str | None = None  # end of the certificate that processes show each other; None: TLS is off
    forecasts: tuple[ForecastStatus, ...] = ()  # of pools whose prefill budgets move
    upgrade: UpgradeStatus | None = None  # the last

    @property
    def state(self) -> str:
        if self.failure:
            return "failed"
        return "ready" if self.has_all_but({}) else "changing"

    def has_all_but(self, lacked: Mapping[str, int]) -> bool:
        """Return whether all routers are ready, and all workers but so many of each pool."""
        routers = all(r.phase == "ready" for r in self.routers)
        return routers and all(p.num_ready >= p.target - lacked.get(p.name, 0) for p in self.pools)

    @property
    def is_settled(self) -> bool:
        """Return whether every pool has its target size and nobody starts or leaves."""
        return self.state == "ready" and all(p.num_ready == p.target and not p.num_draining for p in self.pools)

    def to_json(self) -> dict[str, Any]:
        workers = [asdict(w) | {"kv_use": round(w.kv_use, 4)} for w in self.workers]
        links = [asdict(link) | {"bytes_per_s": round(link.bytes_per_s)} for link in self.links]
        return {"state": self.state} | asdict(self) | {"workers": workers, "links": links}
