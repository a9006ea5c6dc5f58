"""The live workers as one router sees them: state, role and load of each. Pure; knows no socket and no clock.

    listed ──hello fits──> up ──stream breaks──> down ──hello again──> up
      └── another model: refused (stays down)  unlisted: gets no new request; removed once its requests have ended

While the cluster is upgraded, workers of two revisions may be up: of one vocabulary, with other weights. A request is
on workers of one revision at a time, so that no KV of one is continued by another.

A worker request is the part of a request that one worker computes. Workers report their load about ten times a
second; the requests that this router sent lately, which a report may not count yet, are counted here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ...proto import worker_pb2
from ...workers.common.errors import ConfigError, InternalError, Unavailable
from ...workers.common.role import Role
from ...workers.common.wire import ROLE_FROM_PROTO
from ...workers.core.runner import ModelInfo
from ...workers.core.scheduler_config import SchedulerConfig
from ...workers.kv.layout import KVLayout
from ...workers.kv.layout_check import check_bridge
from ..common.expert_loads import check_counts
from ..common.prediction import FleetCosts, Level, WorkerState, WorkerTimes, check_step_cost
from ..common.worker_stats import LinkSpeeds, RecentSpeed, TransferStats, check_drafts, read_transfer_stats
from .token_source import Health

_DEFAULTS = SchedulerConfig()
PROMISE = 1 << 32


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Worker as the supervisor lists it. `role`: value of a Role; the worker's own report replaces it."""

    incarnation: str
    address: str  # host:port of its gRPC server
    role: str
    pool: str
    name: str = ""  # given by the supervisor, as `decode-2`; empty without one
    generation: int = 0  # of its settings, which an upgrade changes


@dataclass(slots=True)
class ReportedLoad:
    """Load of a worker by its last report, copied from the message once: a decision looks at many workers, and reading
    a message's field takes longer than reading an attribute."""

    role: Role | None = None  # None: not reported yet
    step_tokens: int = 0  # 0: not reported yet
    prefill_budget: int = 0
    prefill_share: float = 0.0
    num_sequences: int = 0  # these four: of other routers only
    num_decoding: int = 0
    waiting_tokens: int = 0
    used_blocks: int = 0


@dataclass(slots=True, eq=False)
class FleetWorker:
    """State and load of one worker, which the Fleet keeps current. Counts are of blocks and tokens."""

    info: WorkerInfo
    is_listed: bool = True
    is_up: bool = False
    is_draining: bool = False  # stays true: a worker that drains ends soon
    problem: str = ""  # reason why there is no connection to it
    revision: str = ""  # of its weights: KVLayout.model_id; empty before its hello
    num_blocks: int = 0
    block_size: int = 1  # tokens in a block
    kv_token_bytes: float = 0.0  # bytes of KV for each token, over all ranks
    max_context_tokens: int = 0
    load: worker_pb2.LoadReport = field(default_factory=worker_pb2.LoadReport)  # replaced by `take` only
    reported: ReportedLoad = field(default_factory=ReportedLoad)  # of that report
    transfer_stats: tuple[TransferStats, ...] = ()  # in that report
    num_in_flight: int = 0  # worker requests of this router
    num_decoding: int = 0  # of those, that decode there or will
    pending_tokens: int = 0  # tokens to prefill of those requests that its report may not count yet, see `take`
    told: tuple[int, ...] = (0,) * 5  # by its report: what differs if a step has ended or a request has come
    num_news: int = 0  # reports that told of a step or a request
    earlier_pending: int = 0  # of pending_tokens, sent before the last of those; they end with the next
    held_blocks: int = 0  # blocks that the tokens of those requests fill
    num_promised: int = 0  # of num_decoding, those with a TPOT of their own
    promises: int = 0  # sum of PROMISE / TPOT ** 4 (s) over those; an integer, so that what was added can be taken back
    known_times: WorkerTimes | None = None  # None: its state has changed since
    reported_at: float = 0.0  # s, by the clock of whoever passes its reports on, and notes it then
    link_speeds: dict[str, float] | None = None  # see kv_costs.py; None: the report has not been asked yet
    recent_links: LinkSpeeds = field(default_factory=LinkSpeeds)
    recent_prefill: RecentSpeed = field(default_factory=RecentSpeed)

    def take(self, load: worker_pb2.LoadReport) -> None:
        """Take a load report. What it counts beyond this router's requests of now is other routers'. The first report
        after a request was sent may have been made before it came; the second one says how much of it is left. While a
        long step runs, a worker repeats its last report: that is no news."""
        counts = load.num_prefill_tokens, load.num_decode_tokens, load.num_running, load.num_waiting
        if (told := (*counts, load.num_waiting_tokens)) != self.told:
            self.told = told
            self.num_news += 1
            self.pending_tokens -= self.earlier_pending
            self.earlier_pending = self.pending_tokens
        self.load = load
        self.reported = ReportedLoad(
            ROLE_FROM_PROTO.get(load.role),
            load.step_tokens,
            load.prefill_budget,
            load.prefill_share,
            max(load.num_running + load.num_waiting - self.num_in_flight, 0),
            max(load.num_decoding - self.num_decoding, 0),
            max(load.num_waiting_tokens - self.pending_tokens, 0),
            max(self.num_blocks - load.num_free_blocks - self.held_blocks, 0),
        )
        self.known_times = self.link_speeds = None

    def set_prefill_budget(self, role: Role, prefill_budget: int, step_tokens: int) -> None:
        """Note a budget that its next report will name."""
        self.reported = replace(self.reported, role=role, prefill_budget=prefill_budget, step_tokens=step_tokens)
        self.known_times = None

    def end_pending(self, num_tokens: int, num_news: int) -> None:
        """Take a request's tokens to prefill off those pending; `num_news`: as it was when the request was sent."""
        age = self.num_news - num_news
        self.pending_tokens -= num_tokens if age < 2 else 0
        self.earlier_pending -= num_tokens if age == 1 else 0

    def times(self, costs: FleetCosts, level: Level) -> WorkerTimes:
        """Return its times, as `state` stands."""
        times = self.known_times
        if times is None:
            state = self.state
            goal = Level(level.ttft_s, self._goal_s(state.num_decodes, level.tpot_s)) if self.num_promised else level
            self.known_times = times = WorkerTimes.of(state, costs.of(self.info.incarnation), goal)
        return times

    def _goal_s(self, num_decodes: int, usual_s: float) -> float:
        """Return the one TPOT that would be missed as often as those of all sequences that decode there, as long as few
        are missed: miss_probability of a small ratio is its fourth power."""
        all_promises = self.promises / PROMISE + (num_decodes - self.num_promised) * usual_s**-4
        return (all_promises / num_decodes) ** -0.25

    def promise(self, tpot_s: float, sign: int) -> None:
        """Count a TPOT that was promised to a sequence there (1), or that has ended (-1)."""
        self.num_promised += sign
        self.promises += sign * round(PROMISE / tpot_s**4)

    def idle_times(self, costs: FleetCosts, level: Level) -> WorkerTimes:
        """Return its times as they would be with nothing to do."""
        state = WorkerState(self.prefill_budget, self.step_tokens, 0, 0, 0, 0.0)
        return WorkerTimes.of(state, costs.of(self.incarnation), level)

    @property
    def incarnation(self) -> str:
        return self.info.incarnation

    @property
    def role(self) -> Role:
        """Role that its prefill budget amounts to."""
        return self.reported.role or Role(self.info.role)

    @property
    def step_tokens(self) -> int:
        """Token budget of its steps; a prefill budget of so many has no time target."""
        return self.reported.step_tokens or _DEFAULTS.step_tokens

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens that a step may compute beside running decodes; before its first report that of its role."""
        return self.reported.prefill_budget if self.reported.step_tokens else _DEFAULTS.budget_of(self.role)

    @property
    def is_available(self) -> bool:
        return self.is_up and self.is_listed and not self.is_draining

    @property
    def waiting_tokens(self) -> int:
        return self.reported.waiting_tokens + self.pending_tokens

    @property
    def state(self) -> WorkerState:
        """Load in the terms in which routes are judged."""
        reported, num_decodes = self.reported, self.reported.num_decoding + self.num_decoding
        return WorkerState(
            reported.prefill_budget if reported.step_tokens else self.prefill_budget,
            reported.step_tokens or self.step_tokens,
            num_decodes,
            (reported.used_blocks + self.held_blocks) * self.block_size if num_decodes else 0,
            reported.waiting_tokens + self.pending_tokens,
            reported.prefill_share,
            reported.role is Role.DECODE,
            self.load.num_late_tokens,
        )

    @property
    def num_sequences(self) -> int:
        return self.reported.num_sequences + self.num_in_flight

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens since its start that came from its prefix cache; 0 before the first."""
        return self.load.num_cached_tokens / self.load.num_prompt_tokens if self.load.num_prompt_tokens else 0.0

    @property
    def used_blocks(self) -> int:
        return self.reported.used_blocks + self.held_blocks

    def is_full(self, num_tokens: int) -> bool:
        """Return whether it lacks blocks for so many tokens and the next one."""
        return self.reported.used_blocks + self.held_blocks - (-(num_tokens + 1) // self.block_size) > self.num_blocks


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Load that a worker request puts on its worker."""

    worker: str
    num_tokens: int  # that it has to prefill
    num_blocks: int
    decodes: bool = True  # there
    tpot_s: float | None = None  # that it asked for itself


class Fleet:
    """The workers, by incarnation. level: the usual service level. With it, a worker's times are computed when its
    state changes, so that a decision finds them."""

    def __init__(self, level: Level | None = None) -> None:
        self._level = level
        self._views: dict[str, FleetWorker] = {}
        self._model: ModelInfo | None = None
        self._layouts: dict[int, KVLayout] = {}  # the first of each generation of workers
        self._has_revisions = False  # more than one
        self._requests: dict[int, RequestLoad] = {}
        self._pending: dict[int, tuple[int, int]] = {}  # what `end_pending` takes, of those that prefill
        self.costs = FleetCosts()

    def update(self, infos: Iterable[WorkerInfo]) -> list[WorkerInfo]:
        """Take the supervisor's list. Returns the new workers in it. A missing one is unlisted until `forget`."""
        listed = {info.incarnation: info for info in infos}
        for incarnation, view in self._views.items():
            view.is_listed = incarnation in listed
            if view.is_listed:
                view.info = listed[incarnation]
        new = [info for incarnation, info in listed.items() if incarnation not in self._views]
        self._views |= {info.incarnation: FleetWorker(info) for info in new}
        return new

    def forget(self, incarnation: str) -> None:
        self._views.pop(incarnation, None)
        generations = {view.info.generation for view in self._views.values() if view.revision}
        self._layouts = {number: layout for number, layout in self._layouts.items() if number in generations}
        self._count_revisions()
        self.costs.forget(incarnation)

    def views(self) -> list[FleetWorker]:
        return list(self._views.values())

    def by_incarnation(self) -> Mapping[str, FleetWorker]:
        """Its workers, as they are at any time."""
        return self._views

    def of_revision(self, revision: str) -> Mapping[str, FleetWorker]:
        """Its workers of one revision, by incarnation."""
        if not self._has_revisions:
            return self._views
        return {name: v for name, v in self._views.items() if v.revision == revision}

    def candidates(self, revision: str, num_tokens: int, sample: int, beside: str = "") -> Mapping[str, FleetWorker]:
        """Its workers, by incarnation, among which the route of a request with a context of `num_tokens` is chosen: all
        of one revision. `revision`: the one of its tokens so far, which another takes the place of only where none of
        its workers is left; empty: that of worker `beside`, or any. `sample`: differs from request to request."""
        if not self._has_revisions:
            return self._views
        if not revision and beside in self._views:
            revision = self._views[beside].revision
        able = [v.revision for v in self._views.values() if v.is_available and v.max_context_tokens >= num_tokens]
        if able and revision not in able:
            revision = able[sample % len(able)]
        return self.of_revision(revision)

    def view(self, incarnation: str) -> FleetWorker:
        return self._views[incarnation]

    def block_sizes(self) -> set[int]:
        """Numbers of tokens in a block, of the workers that are up."""
        return {v.block_size for v in self._views.values() if v.is_up}

    def model(self) -> ModelInfo:
        """Served model, with the smallest context of the workers that are up. Raises Unavailable before the
        first worker."""
        if self._model is None:
            raise Unavailable("no worker has joined yet: try again in a moment")
        contexts = [v.max_context_tokens for v in self._views.values() if v.is_up]
        if not contexts or (least := min(contexts)) == self._model.max_context_tokens:
            return self._model
        return replace(self._model, max_context_tokens=least)

    def health(self, num_requests: int) -> Health:
        views = {name: v for name, v in self._views.items() if v.is_available}
        roles = [v.role for v in views.values()]
        return Health(
            ready=bool(roles),
            num_prefill_workers=roles.count(Role.PREFILL),
            num_decode_workers=roles.count(Role.DECODE),
            num_mixed_workers=roles.count(Role.MIXED),
            num_requests=num_requests,
            decode_tokens={name: v.load.num_decode_tokens for name, v in views.items()},
        )

    def register(self, incarnation: str, hello: worker_pb2.Hello) -> None:
        """Take the first message of a worker. Raises ConfigError where it serves another model than the first worker,
        LayoutMismatch where its KV cannot be converted to that of the first one of its generation, as long as one is
        there: of another, it may have other weights."""
        model, layout = ModelInfo.from_proto(hello.model), KVLayout.from_proto(hello.layout)
        if min(hello.num_blocks, layout.block_size, model.vocab_size, model.max_context_tokens) < 1:
            raise ConfigError("the worker's hello has a count of 0 that must be at least 1")
        (self._model or model).check_same(model)
        view = self._views[incarnation]
        generation = view.info.generation
        check_bridge(self._layouts.get(generation, layout), layout)
        self._model = self._model or model
        self._layouts.setdefault(generation, layout)
        view.is_up, view.problem, view.revision = True, "", layout.model_id
        self._count_revisions()
        view.num_blocks, view.block_size = hello.num_blocks, layout.block_size
        view.kv_token_bytes = layout.block_bytes / layout.block_size
        view.max_context_tokens = model.max_context_tokens
        view.transfer_stats = ()
        view.take(worker_pb2.LoadReport(num_blocks=hello.num_blocks, num_free_blocks=hello.num_blocks, role=hello.role))

    def report(self, incarnation: str, load: worker_pb2.LoadReport) -> None:
        """Take a load report. Raises InternalError for impossible counts and statistics."""
        view = self._views[incarnation]
        if load.num_blocks != view.num_blocks or load.num_free_blocks > load.num_blocks:
            raise InternalError(
                f"a load report has {load.num_free_blocks} free blocks of {load.num_blocks}; "
                f"the worker has {view.num_blocks}"
            )
        check_counts(load)
        check_drafts(load)
        check_step_cost(load)
        view.transfer_stats = read_transfer_stats(load)
        view.take(load)
        self.costs.report(incarnation, load.step_cost)
        self._changed(view)
        view.is_draining = view.is_draining or load.draining

    def drains(self, incarnation: str) -> None:
        self._views[incarnation].is_draining = True

    def is_draining(self, incarnation: str) -> bool:
        """Return whether it drains; False for a worker that was removed."""
        return incarnation in self._views and self._views[incarnation].is_draining

    def down(self, incarnation: str, reason: str) -> None:
        """Note that its link broke. Ignored for a worker that was removed."""
        if (view := self._views.get(incarnation)) is not None:
            view.is_up, view.problem = False, reason

    def add_request(self, handle: int, load: RequestLoad) -> None:
        view = self._views[load.worker]
        self._requests[handle] = load
        if load.num_tokens:
            self._pending[handle] = load.num_tokens, view.num_news
        view.num_in_flight += 1
        view.num_decoding += load.decodes
        if load.decodes and load.tpot_s is not None:
            view.promise(load.tpot_s, 1)
        view.pending_tokens += load.num_tokens
        view.held_blocks += load.num_blocks
        view.known_times = None  # for the next decision: this one has just been made

    def end_prefill(self, handle: int) -> None:
        """Take its tokens off the tokens to prefill."""
        view = self._views[self._requests[handle].worker]
        if handle in self._pending:
            view.end_pending(*self._pending.pop(handle))
        self._changed(view)

    def remove_request(self, handle: int) -> None:
        """Take its load off its worker. Idempotent."""
        if (load := self._requests.pop(handle, None)) is None:
            return
        view = self._views[load.worker]
        view.num_in_flight -= 1
        view.num_decoding -= load.decodes
        if load.decodes and load.tpot_s is not None:
            view.promise(load.tpot_s, -1)
        if handle in self._pending:
            view.end_pending(*self._pending.pop(handle))
        view.held_blocks -= load.num_blocks
        self._changed(view)

    def _changed(self, view: FleetWorker) -> None:
        """Compute its times anew. Where it has not measured all its costs, the next decision does: others' count."""
        view.known_times = None
        if self._level is not None and self.costs.has_measured(view.incarnation):
            view.times(self.costs, self._level)

    def _count_revisions(self) -> None:
        self._has_revisions = len({v.revision for v in self._views.values() if v.revision}) > 1
