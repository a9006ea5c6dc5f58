"""A cluster on a virtual clock: requests come, the policy routes them, workers compute them, KV moves between workers.

    arrival ─> route (routes.py) ─> worker(s) (worker.py) ─> first token ─> ... ─> end ─> next turn
    every REPORT_S: load reports to the router      every PLAN_S: controller and plan (scaling.py)

An event is a time and a call; those of one time happen in the order in which they were made. Nothing is random here.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ...workers.common.errors import Unavailable
from ...workers.common.request import Request, SamplingParams
from ...workers.common.role import Role
from ...workers.core.sequence import Sequence
from ..control.decisions import DecisionLog
from ..routing.actions import RequestFacts, Route
from .load import SimulatedRequest
from .request_columns import RequestColumns
from .routes import SimulatedRouter
from .scaling import Scaler
from .transfers import Import, Links
from .worker import SimulatedWorker
from .worker_setup import WorkerSetup

REPORT_S = 0.1
PLAN_S = 1.0
TIMEOUT_S = 600.0
_REQUEST = Request("simulated", (), SamplingParams(), TIMEOUT_S)  # of all sequences: only its time matters


class Job:
    """A request under way."""

    __slots__ = ("handles", "is_granted", "num_sent", "request", "row", "sequence", "sink", "there_at")

    def __init__(self, request: SimulatedRequest, row: int) -> None:
        self.request = request
        self.row = row
        self.handles: list[int] = []  # of its worker requests: of the prefill worker, of the one that decodes
        self.sequence: Sequence | None = None  # at the sink of its hand-off
        self.sink: SimulatedWorker | None = None
        self.is_granted = False  # the sink has blocks
        self.num_sent = 0  # tokens that were sent to the sink, or need not be
        self.there_at = 0.0  # when the last of those are there


class Simulation:
    """`setups`: by pool. What happened is in `columns`,
    `num_refused` (too many requests), `num_too_long` and `num_unserved` (no worker in time)."""

    def __init__(
        self,
        router: SimulatedRouter,
        links: Links,
        setups: Mapping[str, WorkerSetup],
        scaler: Scaler,
    ) -> None:
        self.now = 0.0
        self.columns = RequestColumns()
        self.num_refused = self.num_too_long = self.num_unserved = 0
        self.num_events = 0
        self.alive: dict[str, SimulatedWorker] = {}
        self.retired: list[tuple[SimulatedWorker, float]] = []  # and when
        self.links = links
        self._router = router
        self._setups = setups
        self._scaler = scaler
        self._draining: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._num_made = 0
        self._jobs: dict[Sequence, Job] = {}
        self._unrouted: list[Job] = []
        self._sources: dict[Sequence, SimulatedWorker] = {}  # of hand-offs that are announced
        self._num_open = 0
        self._num_turns = 0  # later turns that will come
        self._num_sequences = 0
        self._token_bytes = router.layout.block_bytes / router.layout.block_size

    @property
    def decisions(self) -> DecisionLog:
        """Decisions of the controller."""
        return self._scaler.log

    def run(self, load: Iterable[SimulatedRequest]) -> None:
        """Run until every request has ended. `load`: in order of time."""
        self._scaler.begin(self)
        arrivals = iter(load)
        coming = next(arrivals, None)
        self._at(REPORT_S, self._report)
        if self._scaler.moves:
            self._at(PLAN_S, self._plan)
        events = self._events
        while coming is not None or self._num_open or self._num_turns:
            if coming is not None and (not events or coming.at_s < events[0][0]):
                self.now = coming.at_s
                self._arrive(coming)
                coming = next(arrivals, None)
            else:
                self.now, _, call = heapq.heappop(events)
                call()
            self.num_events += 1

    def _arrive(self, request: SimulatedRequest) -> None:
        row = self.columns.add(self.now, request.num_input, request.num_output)
        if request.num_input + request.num_output > self._router.max_context_tokens:
            self.num_too_long += 1
        elif self._num_open >= self._router.max_requests:
            self.num_refused += 1
        else:
            self._num_open += 1
            self._route(Job(request, row))

    def _route(self, job: Job) -> None:
        request = job.request
        names = request.block_names(self._router.layout.block_size)
        prompt_names = names[: request.num_input // self._router.layout.block_size]
        try:
            route, facts = self._router.route(request.num_input, request.num_output, prompt_names)
        except Unavailable:
            self._unrouted.append(job)
            return
        self._count(job, route, facts)
        if way_s := self._way_s(self.alive[route.prefill or route.decode]):
            self._after(way_s, partial(self._submit, job, route, names))
        else:
            self._submit(job, route, names)

    def _way_s(self, worker: SimulatedWorker) -> float:
        """Time until a worker has a request that came now."""
        times = worker.setup.transit
        is_busy = times.busy_s > 0 and all(each.computes for each in self.alive.values())
        return times.idle_s + times.busy_s * is_busy

    def _count(self, job: Job, route: Route, facts: RequestFacts) -> None:
        is_alone = route.prefill is None
        job.handles = [self._router.submit(route.prefill or route.decode, facts, prefills=True, decodes=is_alone)]
        if not is_alone:
            job.handles.append(self._router.submit(route.decode, facts, prefills=False, decodes=True))

    def _submit(self, job: Job, route: Route, names: list[bytes]) -> None:
        worker = self.alive[route.prefill or route.decode]
        first = self._sequence(job, names)
        if route.prefill is not None:
            job.sink = self.alive[route.decode]
            job.sequence = self._sequence(job, names)
            first.handoff_id = str(job.row)
            self.columns.was_handed_off[job.row] = 1
            coming = Import(job.sequence, job.request.num_input, False, partial(self._granted, job, first))
            job.sink.expect(coming, self.now)
        if route.prefix is not None and not worker.cache.holds_most(first):
            holder, num_tokens = route.prefix.holder, route.prefix.num_tokens
            granted = partial(self._pull_prefix, worker, holder, first, num_tokens)
            worker.expect(Import(first, num_tokens, True, granted), self.now)
        else:
            worker.submit(first, self.now)

    def _sequence(self, job: Job, names: list[bytes]) -> Sequence:
        request = job.request
        self._num_sequences += 1
        last_id = request.ids[-1] if request.ids else job.row
        sequence = Sequence(
            key=str(self._num_sequences),
            request=_REQUEST,
            token_ids=[last_id] * request.num_input,
            num_prompt=request.num_input,
            deadline=self.now + _REQUEST.timeout_s,
            arrival=self._num_sequences,
            due=self.now,
            end=request.num_input + request.num_output,
            block_hashes=list(names),
        )
        self._jobs[sequence] = job
        return sequence

    def _pull_prefix(self, worker: SimulatedWorker, holder: str, sequence: Sequence, num: int, num_held: int) -> None:
        num_bytes = max(num - num_held, 0) * self._token_bytes
        there = self.links.read(holder, worker.name, num_bytes, self.now) + self.links.setup.latency_s
        self._at(there, lambda: worker.imported(sequence, self.now))

    def _granted(self, job: Job, first: Sequence, num_held: int) -> None:
        """The sink has blocks: what was computed meanwhile is read at once."""
        job.is_granted, job.num_sent = True, num_held
        source = self._sources.get(first)
        if source is not None:
            self._send(job, source, first, self.now)
            if first.num_output:
                self._read_all(job, source, first)

    def offered(self, worker: SimulatedWorker, sequence: Sequence, began: float) -> None:
        job = self._jobs[sequence]
        assert job.sink is not None and job.sequence is not None
        job.sink.source_begins(job.sequence, self.now)
        self._sources[sequence] = worker
        if job.is_granted:
            self._send(job, worker, sequence, began)

    def _send(self, job: Job, source: SimulatedWorker, first: Sequence, began: float) -> None:
        num_tokens = min(first.num_computed, job.request.num_input) - job.num_sent
        if num_tokens > 0:
            assert job.sink is not None
            num_bytes = num_tokens * self._token_bytes
            job.num_sent += num_tokens
            job.there_at = self.links.send(source.name, job.sink.name, num_bytes, (began, self.now), self.now)

    def sealed(self, worker: SimulatedWorker, sequence: Sequence) -> None:
        job = self._jobs[sequence]
        if job.is_granted:
            self._read_all(job, worker, sequence)

    def _read_all(self, job: Job, source: SimulatedWorker, first: Sequence) -> None:
        there = max(job.there_at, self.now) + self.links.setup.latency_s
        self._at(there, partial(self._commit, job, source, first))

    def _commit(self, job: Job, source: SimulatedWorker, first: Sequence) -> None:
        assert job.sink is not None and job.sequence is not None
        del self._sources[first], self._jobs[first]
        source.end_lease(first, self.now)
        job.sink.imported(job.sequence, self.now)

    def step_begins(self, worker: SimulatedWorker, ends: float) -> None:
        self._at(ends, partial(self._step_ends, worker, worker.step_number))

    def _step_ends(self, worker: SimulatedWorker, number: int) -> None:
        worker.step_ends(number, self.now)

    def first_token(self, worker: SimulatedWorker, sequence: Sequence) -> None:
        job = self._jobs[sequence]
        self.columns.first[job.row] = self.now
        self.columns.num_cached[job.row] = sequence.num_cached
        if job.sequence is None:
            self._router.end_prefill(job.handles[0])
        else:
            self._router.end(job.handles[0])

    def finished(self, worker: SimulatedWorker, sequence: Sequence) -> None:
        job = self._jobs.pop(sequence)
        self.columns.ended[job.row] = self.now
        self._router.end(job.handles[-1])
        self._num_open -= 1
        following = job.request.next_turn
        if following is not None:
            self._num_turns += 1
            self._after(job.request.think_s, partial(self._next_turn, following))

    def _next_turn(self, request: SimulatedRequest) -> None:
        self._num_turns -= 1
        self._arrive(request)

    @property
    def num_unrouted(self) -> int:
        return len(self._unrouted)

    def ready_workers(self) -> Mapping[str, SimulatedWorker]:
        return self.alive

    def start_later(self, pool: str, name: str, start_s: float) -> None:
        if start_s:
            self._after(start_s, partial(self._ready, pool, name))
        else:
            self._ready(pool, name)

    def drain(self, name: str) -> None:
        self._router.drain(name)
        self._draining.add(name)

    def set_prefill_budget(self, name: str, num_tokens: int) -> None:
        worker = self.alive[name]
        worker.set_prefill_budget(num_tokens, self.now)
        self._router.set_prefill_budget(worker)

    def _ready(self, pool: str, name: str) -> None:
        if self._scaler.became_ready(name):
            worker = SimulatedWorker(name, self._setups[pool], Role(pool), self, self.now)
            self._settle(worker)
            self.alive[name] = worker
            self._router.add(worker)
            self._router.report(worker, self.links.stats(worker.name), self.now)

    def _settle(self, worker: SimulatedWorker) -> None:
        """Give a worker its place: on a machine that has room."""
        num = worker.setup.per_machine
        if num > 1:
            hosts = (each for each in self.alive.values() if len(each.neighbours) < each.setup.per_machine - 1)
            host = next(hosts, None)
            worker.neighbours = [] if host is None else [host, *host.neighbours]
            for neighbour in worker.neighbours:
                neighbour.neighbours.append(worker)

    def _report(self) -> None:
        for worker in self.alive.values():
            if worker.must_report():
                self._router.report(worker, self.links.stats(worker.name), self.now)
        jobs, self._unrouted = self._unrouted, []
        for job in jobs:
            if self.now - self.columns.came[job.row] >= self._router.no_worker_wait_s:
                self.num_unserved += 1
                self._num_open -= 1
            else:
                self._route(job)
        for name in [name for name in self._draining if self.alive[name].is_empty and not self._router.is_used(name)]:
            self._retire(name)
        self._after(REPORT_S, self._report)

    def _retire(self, name: str) -> None:
        self._draining.remove(name)
        self._router.remove(name)
        self._scaler.ended(name)
        self.links.forget(name)
        worker = self.alive.pop(name)
        for neighbour in worker.neighbours:
            neighbour.neighbours.remove(worker)
        self.retired.append((worker, self.now))

    def _plan(self) -> None:
        self._scaler.look(self, self.now)
        self._after(PLAN_S, self._plan)

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        self._at(self.now + seconds, call)

    def _at(self, at: float, call: Callable[[], object]) -> None:
        self._num_made += 1
        heapq.heappush(self._events, (at, self._num_made, call))
