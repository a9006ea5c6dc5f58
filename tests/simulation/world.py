"""A whole cluster in one thread: real routers and real workers, over a simulated network, clock and memory.

Replaced are sockets (network.py, rpc.py), time and event loops (clock.py), the engine's thread and RDMA (worker.py),
Ray's supervisor and the clients (here). All else is the code that is shipped, drivers included. A seed decides
everything; `simulate` runs one and raises a Violation or a Crash for whatever must never happen.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial

from diptych.cluster.routing.policy import RoutingConfig
from diptych.proto import worker_pb2
from diptych.workers.common.errors import DiptychError
from diptych.workers.common.request import Request
from diptych.workers.core.block_manager import BlockManager
from diptych.workers.handoff.types import SourceState
from diptych.workers.kv import bridge as kv_bridge

from .checks.invariants import check_end, check_running, check_worker, is_able, may_fail_on_a_calm_day, what_is_held
from .checks.reasons import TTFT_S, Turns, WatchedState, fleet_of
from .checks.violation import Crash, Hang, Violation, demand
from .faults.faults import Fault, Weather, choose_weather
from .faults.step_faults import StepFaults
from .machines.clock import Clock, ProcessLoop, dispose
from .machines.hosts import Host
from .machines.memory import PoisonedList
from .machines.network import Network
from .machines.seams import replaced
from .processes import dials, sleeps
from .processes.clients import Client, forge_a_pull, plan_clients
from .processes.constraints import constrain
from .processes.levels import give_levels
from .processes.routers import RouterProcess, Routers, WatchedService
from .processes.scripted import Scripted
from .processes.supervised import Supervised, is_supervised
from .processes.worker import Worker

CHECK_S = 0.25
NUM_TOKENS = (72, 120)  # that a worker's KV memory holds


class World:
    def __init__(self, seed: int, weather: Weather | None = None, *, trace: bool = False) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.weather = weather or choose_weather(rng)
        self.clock = Clock()
        self.network = Network(self.clock, rng)
        self.network.straggle = self.weather.straggle
        self.network.latency_s = self.weather.latency_s
        self.network.flip = self.weather.flip
        self.lease_s = rng.uniform(*self.weather.lease_s)
        self.network.on_delivery = self._on_delivery
        self.bugs: list[Exception] = []
        self.schedule: list[str] = []
        self.is_tracing = trace
        self.is_over = False
        self.workers: dict[str, Worker | None] = {}
        self.processes: list[ProcessLoop] = []
        self.moves: set[str] = set()  # hand-offs of running sequences
        self.no_worker_wait_s = 10.0
        self.prefill_tokens_s = rng.choice((50.0, 50.0, 1e6))  # for the policy: moving KV is cheap, or is not
        self.has_fabric = rng.random() < 0.5  # RDMA has a separate network
        self.read_timeout_s = rng.uniform(1.0, 3.0)
        self._num_incarnations = itertools.count(1)
        self.is_supervised = is_supervised(seed)
        self.supervision = Supervised(self) if self.is_supervised else Scripted(self)
        self._faults = self.supervision.plan_faults(rng)
        self.hosts: dict[str, Host] = {}
        self.chunk_bytes = self.supervision.plan_hosts(rng).largest_layer * 3 // 4  # less than a block
        self.part_bytes = rng.choice((self.chunk_bytes, 4 * self.chunk_bytes, kv_bridge.PART_BYTES))
        self.clients = plan_clients(rng, self.weather)
        give_levels(self.clients, seed)
        constrain(self.clients, seed)
        if self.is_supervised:
            self.clients += dials.load_of(seed) + sleeps.load_of(seed)
            self.no_worker_wait_s = sleeps.WAIT_S if sleeps.is_sleepy(seed) else self.no_worker_wait_s
        self.step_faults = StepFaults(self, self.weather.step_fault)
        self.routers = Routers(self)
        self._faults = sorted([*self._faults, *self.routers.plan()], key=lambda f: f.at_packet)
        self.outsider = self.add_process("outsider")
        self.released: dict[str, str] = {}  # hand-off -> the sink that it was released to
        self.states: dict[str, WatchedState] = {}
        self.turns = Turns(c.request.request_id for c in sorted(self.clients, key=lambda c: c.arrives_at))

    def add_host(self, host: Host) -> None:
        self.hosts[host.name] = host
        self.workers.setdefault(host.name, None)
        if host.config.handoff.verify_kv:
            self.network.verifying.add(host.name)

    def add_process(self, name: str) -> ProcessLoop:
        process = ProcessLoop(self.clock, self.rng, name, self.crash)
        self.processes.append(process)
        return process

    def step_s(self, host: str) -> float:
        return self.hosts[host].step_s * self.rng.uniform(0.5, 1.5)

    def read_delay(self, incarnation: str, sink: str) -> float:
        source = self.worker_of(incarnation)
        return self.network.delay(source.process.name if source else "", sink) * 2

    def worker_of(self, incarnation: str) -> Worker | None:
        return next((w for w in self.workers.values() if w is not None and w.incarnation == incarnation), None)

    def manager_of(self, process: ProcessLoop) -> BlockManager:
        worker = self.workers[process.name]
        assert worker is not None and worker.process is process
        return worker.engine.manager

    @property
    def predicts(self) -> bool:
        """True where routes are chosen by predicted times."""
        return self.seed % 5 == 4

    @property
    def num_living(self) -> int:
        return sum(w is not None for w in self.workers.values())

    def living(self) -> Iterator[Worker]:
        return (w for w in self.workers.values() if w is not None)

    def make_worker(self, host: str) -> Worker:
        """A new process, which is to `serve`."""
        of, process = self.hosts[host], self.add_process(host)
        looks_ahead = (self.seed + list(self.workers).index(host)) % 2 == 0
        runner = of.make_runner(random.Random(self.seed) if looks_ahead else None)
        worker = Worker(process, f"{host}.{next(self._num_incarnations)}", of.config.role, runner)
        runner.may_fail = partial(self.step_faults.strike, host, worker.incarnation)
        runner.launch_failed = self.step_faults.launch_failed
        self.note(f"start {worker.incarnation}")
        self.workers[host] = worker
        return worker

    async def serve(self, worker: Worker) -> None:
        """Serve in the worker's process."""
        watched = worker.service = WatchedService(self.hosts[worker.process.name].config, worker.runner)
        watched.world = self
        manager = worker.engine.manager
        manager._free = PoisonedList(manager._free, worker.runner)
        if self.predicts:
            host, is_dialled = self.hosts[worker.process.name], self.is_supervised and dials.is_dialled(self.seed)
            host.teach(worker.engine.scheduler.cost, dials.STEP_S if is_dialled else host.step_s)
        try:
            await watched.start()
        except Exception as e:
            self.crash(f"{worker.incarnation} does not start: {e!r}", e)

    def kill(self, host: str) -> None:
        worker = self.workers.get(host)
        if worker is None:
            return
        self.note(f"kill {worker.incarnation}")
        self.workers[host] = None
        worker.process.kill()
        self.network.servers.pop(host, None)
        self.network.on_kill(worker.process)
        self.supervision.on_kill(host)

    def terminate(self, host: str) -> None:
        worker = self.workers.get(host)
        if worker is None or worker.service is None:
            return
        self.note(f"terminate {worker.incarnation}")
        self.network.troubles.add(self.clock.now, self.clock.now, host)

        async def stop() -> None:
            assert worker.service is not None
            await worker.service.stop(0.2)
            self.clock.after(0.0, self.kill, host)

        worker.process.call_soon(lambda: worker.process.create_task(stop()))

    def stall(self, process: ProcessLoop, seconds: float) -> None:
        self.note(f"stop {process.name} for {seconds:.2f} s")
        if router := self.routers.of(process):
            router.stall_s += seconds
        process.stall(self.clock.now + seconds)
        self.network.on_stall(process)

    def on_release(self, handoff_id: str, sink: str) -> None:
        """A source reported that it held the lease for `sink` without interruption."""
        machine = next(
            found.machine
            for worker in self.living()
            if worker.service is not None and (found := worker.service._source._find(handoff_id)) is not None
        )
        if machine.state is not SourceState.RELEASED or machine.sink != sink:
            self.bug(f"{handoff_id} is {machine.state.value} for {machine.sink}, and was said to be held for {sink}")
        first = self.released.setdefault(handoff_id, sink)
        if first != sink:
            self.bug(f"{handoff_id} was released to {first} and to {sink}")

    def on_failed_handoff(self, request_id: str, source: worker_pb2.HandoffSource) -> None:
        """A sink that still needed it had to give it up."""
        self.note(f"{request_id}: its hand-off {source.handoff_id} failed")
        if self.weather.name == "calm" and not may_fail_on_a_calm_day(self, request_id, source):
            self.bug(f"{request_id}: the hand-off {source.handoff_id} failed on a calm day")

    def _arrive(self, client: Client) -> None:
        at = self.routers.admit(client)
        at.process.call_soon(self._admit, client, at)

    def _admit(self, client: Client, at: RouterProcess) -> None:
        task = at.process.create_task(self._ask(client, at))
        if client.leaves_at is not None:
            self.clock.at(client.leaves_at, at.process.call_soon, task.cancel)

    async def _ask(self, client: Client, at: RouterProcess) -> None:
        assert at.router is not None
        try:
            async with aclosing(at.router.stream(client.request)) as deltas:
                async for delta in deltas:
                    client.tokens += delta.token_ids
                    client.logprobs += delta.logprobs
                    client.finish = delta.finish_reason
                    if client.stops_after is not None and len(client.tokens) >= client.stops_after:
                        client.stops_after = None
                        await asyncio.sleep(client.stops_s)
                    self.note(f"{client.request.request_id} +{len(delta.token_ids)} = {len(client.tokens)}")
        except DiptychError as e:
            client.error = e
        except asyncio.CancelledError:
            client.has_left = True
        except Exception as e:
            self.crash(f"{client.request.request_id}: {e!r}", e)
        client.ended_at = self.clock.now
        self.note(f"{client.request.request_id} ends: {client.outcome} {client.error or ''}")

    def make_state(self, request: Request, max_attempts: int) -> WatchedState:
        return self.states.setdefault(request.request_id, WatchedState(self, request, max_attempts))

    def note(self, what: str) -> None:
        if self.is_tracing:
            self.schedule.append(f"{self.clock.now:9.4f}  {what}")

    def bug(self, what: str) -> None:
        if not self.is_over:
            self.note(f"BUG {what}")
            self.bugs.append(Violation(what))

    def crash(self, what: str, error: object) -> None:
        """Nobody handled it: a crash, unless an invariant raised it."""
        if not self.is_over:
            self.note(f"BUG {what}")
            self.bugs.append(error if isinstance(error, Violation) else Crash(what))

    def _on_delivery(self) -> None:
        faults = self._faults
        while faults and faults[0].at_packet <= self.network.num_delivered:
            faults.pop(0).strike(self)
        if self.network.num_delivered % 8 == 0 and self.rng.random() < self.weather.forge:
            forge_a_pull(self)

    def _strike_late(self, fault: Fault) -> None:
        if fault in self._faults:
            self._faults.remove(fault)
            fault.strike(self)

    def run(self) -> None:
        """Run until every client has its answer, and then until all is quiet."""
        with replaced(self):
            try:
                self._start()
                self._wait_for_clients()
                self._settle()
            finally:
                self.is_over = True
                dispose(self.processes)

    def _start(self) -> None:
        rng = self.rng
        config = RoutingConfig(
            worker_timeout_s=3.0,
            hello_timeout_s=3.0,
            no_worker_wait_s=self.no_worker_wait_s,
            max_attempts=rng.randint(3, 5),
            predict=self.predicts,
            ttft_s=TTFT_S,
            tpot_s=0.05,
        )
        self.routers.start(config)
        self.supervision.start()
        for client in self.clients:
            self.clock.at(client.arrives_at, self._arrive, client)
        for fault in self._faults:
            self.clock.at(fault.at_s, self._strike_late, fault)

    def _wait_for_clients(self) -> None:
        last = max(c.arrives_at + c.request.timeout_s + c.stops_s for c in self.clients)
        while any(c.ended_at is None for c in self.clients):
            if self.clock.now > last + max(router.stall_s for router in self.routers.living()) + 1.0:
                raise Hang(self._late())
            self.clock.run_until(self.clock.now + CHECK_S)
            for router in self.routers.living():
                if not any(is_able(self, router, worker) for worker in self.living()):
                    fleet = fleet_of(router.name)
                    self.network.troubles.add(self.clock.now - CHECK_S, self.clock.now, fleet)
            self._check()

    def _late(self) -> str:
        late = [c.request.request_id for c in self.clients if c.ended_at is None]
        return f"{late} have neither ended nor failed at {self.clock.now:.2f} s"

    def _check(self) -> None:
        if self.bugs:
            raise self.bugs[0]
        self.supervision.check()
        for client in self.clients:
            check_running(self, client)
        for worker in self.living():
            if not worker.process.is_stalled and worker.has_started:
                check_worker(self, worker)

    def _settle(self) -> None:
        """All is well again: everything that was held must come back."""
        self._faults.clear()
        self.network.heal()
        self.supervision.settle()
        began = self.clock.now
        while held := what_is_held(self):
            demand(self.clock.now <= began + self.supervision.quiet_limit_s, f"never given back: {held}")
            self.clock.run_until(self.clock.now + 0.1)
            self._check()
        self.quiet_after_s = self.clock.now - began
        while left := self.supervision.what_is_left():
            demand(self.clock.now <= began + self.supervision.quiet_limit_s, f"never settled: {left}")
            self.clock.run_until(self.clock.now + CHECK_S)
            self._check()
        self._check()


def simulate(seed: int, weather: Weather | None = None, *, trace: bool = False) -> World:
    world = World(seed, weather, trace=trace)
    world.run()
    check_end(world)
    return world
