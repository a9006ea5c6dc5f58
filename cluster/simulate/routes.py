"""The router of a simulation: the production fleet, prefix index and policy. All that the simulator asks of routing is
asked here."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from ...proto import worker_pb2
from ...workers.common.wire import ROLE_TO_PROTO
from ...workers.core.runner import ModelInfo
from ...workers.kv.layout import KVLayout
from ..common.config import ClusterConfig
from ..routing.actions import RequestFacts, Route
from ..routing.fleet import Fleet, RequestLoad, WorkerInfo
from ..routing.policy import RoutingConfig, choose
from ..routing.prefix_index import PrefixIndex
from .worker import SimulatedWorker


class SimulatedRouter:
    def __init__(self, config: ClusterConfig, model: ModelInfo, layout: KVLayout) -> None:
        settings = config.router
        self._config = routing = replace(RoutingConfig.of(config), migrate=False, split_prompts=False)
        self.max_requests = settings.max_requests * max(settings.replicas, 1)
        self.no_worker_wait_s = routing.no_worker_wait_s
        self.max_context_tokens = model.max_context_tokens
        self.layout = layout
        self._model = model
        self._fleet = Fleet(routing.level)
        self._infos: dict[str, WorkerInfo] = {}
        self._prefixes = PrefixIndex()
        self._num_routed = 0
        self._num_handles = 0

    def add(self, worker: SimulatedWorker) -> None:
        """Take a worker that is ready."""
        role = worker.scheduler.config.role_of(worker.scheduler.prefill_budget)
        self._infos[worker.name] = WorkerInfo(worker.name, "", role.value, worker.setup.pool, worker.name)
        self._fleet.update(self._infos.values())
        hello = worker_pb2.Hello(
            incarnation=worker.name,
            role=ROLE_TO_PROTO[role],
            model=self._model.to_proto(""),
            layout=self.layout.to_proto(),
            num_blocks=worker.manager.num_blocks,
        )
        self._fleet.register(worker.name, hello)

    def drain(self, name: str) -> None:
        """Send a worker nothing new."""
        self._fleet.drains(name)

    def remove(self, name: str) -> None:
        """Forget a worker that has ended; none of its requests is under way."""
        del self._infos[name]
        self._fleet.update(self._infos.values())
        self._fleet.forget(name)
        self._prefixes.drop(name)

    def report(self, worker: SimulatedWorker, links: SequenceOf[worker_pb2.PeerLink], now: float) -> None:
        """Take a worker's load report, with what it has read over its links, and the changes of its prefix cache."""
        load = worker.load_report(now)
        load.links.extend(links)
        self._fleet.report(worker.name, load)
        self._fleet.view(worker.name).reported_at = now
        stored, removed = worker.cache.take_events()
        if stored or removed:
            events = worker_pb2.BlockEvents(stored=stored, removed=removed)
            self._prefixes.apply(worker.name, events, worker.manager.num_blocks)

    def set_prefill_budget(self, worker: SimulatedWorker) -> None:
        """Note its prefill budget at once, as its own report would soon."""
        config, budget = worker.scheduler.config, worker.scheduler.prefill_budget
        self._fleet.view(worker.name).set_prefill_budget(config.role_of(budget), budget, config.step_tokens)

    def route(self, num_input: int, num_output: int, names: SequenceOf[bytes]) -> tuple[Route, RequestFacts]:
        """Choose a route for a new request. `names`: of its prompt's blocks. Raises Unavailable."""
        cached: dict[str, int] = {}
        if names and self._prefixes:
            size = self.layout.block_size
            cached = {worker: num * size for worker, num in self._prefixes.match(names).items()}
        self._num_routed += 1
        facts = RequestFacts(num_input, num_output, cached, sample=self._num_routed)
        return choose(self._fleet.by_incarnation(), facts, self._config, self._fleet.costs), facts

    def submit(self, worker: str, facts: RequestFacts, *, prefills: bool, decodes: bool) -> int:
        """Count a worker request; returns its handle."""
        self._num_handles += 1
        num_tokens = facts.uncached_tokens(worker) if prefills else 0
        num_blocks = facts.num_blocks(self._fleet.view(worker))
        self._fleet.add_request(self._num_handles, RequestLoad(worker, num_tokens, num_blocks, decodes))
        return self._num_handles

    def is_used(self, name: str) -> bool:
        return self._fleet.view(name).num_in_flight > 0

    def end_prefill(self, handle: int) -> None:
        self._fleet.end_prefill(handle)

    def end(self, handle: int) -> None:
        self._fleet.remove_request(handle)
