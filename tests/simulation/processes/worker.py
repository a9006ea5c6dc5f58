"""A worker process: the real WorkerService with its real engine, hand-offs and gRPC transport; a simulated thread,
server and RDMA, over a memory that is checked (memory.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diptych.proto import kv_pb2
from diptych.workers.common.errors import TransportError, WorkerLost
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.events import StepOutput
from diptych.workers.engine.thread import IDLE_WAIT_S, EngineThread
from diptych.workers.handoff.pull import Pull, PullJob
from diptych.workers.kv.bridge import Bridge
from diptych.workers.kv.layout import Copies, Region
from diptych.workers.kv.segment import Segment
from diptych.workers.kv.staging import GRAIN_BYTES
from diptych.workers.transport.base import KVReader, Source, Transport

from ..checks.violation import demand
from ..faults.step_faults import StepFault
from ..machines.clock import ProcessLoop, SimFuture, Timer
from ..machines.memory import CheckedRunner, CountedStaging, layer_sizes

if TYPE_CHECKING:
    from ..world import World
    from .routers import WatchedService

MOMENT_S = 0.4


class _Commands:
    """Stands for queue.SimpleQueue in EngineThread; a command wakes an idle engine."""

    def __init__(self, on_put: Callable[[], None]) -> None:
        self._on_put = on_put
        self.waiting: list[Callable[[], object]] = []

    def put(self, command: Callable[[], object]) -> None:
        self.waiting.append(command)
        self._on_put()


class SimEngineThread(EngineThread):
    """EngineThread._run as events: commands, a step, and its output when the step's time has passed."""

    def __init__(
        self,
        world: "World",
        engine: Engine,
        listener: Callable[[Any], None],
        on_broken: Callable[[Any], object],
        cores: Sequence[int] | None,
    ) -> None:
        assert cores is None, "simulated workers have no cores"
        super().__init__(engine, self._check_and_tell, on_broken)
        self._real_listener = listener
        self._begun: dict[str, PullJob] = {}  # by sequence
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self._world = world
        self._process = loop
        self._sim_commands = _Commands(self._on_put)
        self._commands = self._sim_commands  # type: ignore[assignment]
        self._step_timer: Timer | None = None
        self._is_busy = False
        self._is_started = False

    def start(self) -> None:
        self._is_started = True
        self._process.on_go_on.append(self._step)
        self._on_put()

    def stop(self) -> None:
        self._end()

    def begin(self, key: str, *args: Any, **kwargs: Any) -> None:
        self._begun[key] = self._job_of(key)
        super().begin(key, *args, **kwargs)

    async def commit(self, key: str, *args: Any, **kwargs: Any) -> None:
        """Commit only what the source has released to this attempt."""
        self._check_released(self._job_of(key), "commits")
        await super().commit(key, *args, **kwargs)

    async def fail(self, key: str, quarantine: bool) -> None:
        incoming = self._engine.incoming._incoming.get(key)
        if incoming is not None and incoming.gone is None and not incoming.is_prefix:
            self._world.on_failed_handoff(incoming.sequence.request.request_id, self._job_of(key).source)
        await super().fail(key, quarantine)

    def _job_of(self, key: str) -> PullJob:
        worker = self._world.workers[self._process.name]
        assert worker is not None
        return next(p._job for p in worker.pulls if p._job.key == key)

    def _check_released(self, job: PullJob, what: str) -> None:
        if self._world.released.get(job.source.handoff_id) != job.sink:
            self._world.bug(f"{job.sink} {what} {job.source.handoff_id}, which was not released to it")

    def _check_and_tell(self, output: StepOutput) -> None:
        for key in output.tokens.keys:
            if key in self._begun:
                self._check_released(self._begun[key], "tells a token of")
        self._real_listener(output)

    def _check_provisional(self) -> None:
        engine = self._engine
        for key, incoming in engine.incoming._incoming.items():
            own = incoming.sequence.block_table[incoming.num_held :]
            if incoming.sequence.provisional is not None and any(engine.manager._is_cached[b] for b in own):
                self._world.bug(f"{self._process.name} shares the KV of {key}, which was not released to it yet")

    def _on_put(self) -> None:
        if self._is_started and not self._is_busy:
            self._is_busy = True
            self._schedule(self._world.clock.now + self._world.rng.random() * 1e-4)

    def _schedule(self, when: float) -> None:
        if self._step_timer is not None:
            self._step_timer.cancel()
        self._step_timer = self._world.clock.at(when, self._step)

    def _step(self) -> None:
        process = self._process
        if process.is_dead or self._has_ended:
            return
        if process.is_stalled:
            self._schedule(process.stalled_until)
            return
        waiting, self._sim_commands.waiting = self._sim_commands.waiting, []
        for command in waiting:
            command()
        engine = self._engine
        may_speak = {*engine._sequences, *engine._output.tokens.keys}
        running = [s.request_id for s in engine.scheduler._running]
        try:
            output = engine.step(self._listener)
        except StepFault as e:
            self._step_failed(e)
            return
        for key in output.tokens.keys:
            if key not in may_speak:
                self._world.bug(f"{process.name} tells a token of {key}, which is not there any more")
        self._check_provisional()
        world = self._world
        busy_s = world.step_s(process.name) if output.ran else 0.0
        running += [s.request_id for s in engine.scheduler._running]
        world.turns.add(world.clock.now, world.clock.now + busy_s, process.name, running)
        if output:
            world.clock.after(busy_s, self._tell, output)
        if output.ran or self._sim_commands.waiting:
            self._is_busy = True
            self._schedule(world.clock.now + busy_s)
            return
        self._is_busy = False
        self._schedule(min(world.clock.now + IDLE_WAIT_S, process.world_time(self._engine.next_deadline())))

    def _step_failed(self, error: StepFault) -> None:
        world, host = self._world, self._process.name
        try:
            self._engine.step_failed(error)
        except StepFault:  # it computes nothing any more: its process ends, and its supervisor starts another
            self._end()
            world.clock.after(0.0, world.kill, host)
            world.supervision.replace(host, 0.5, 2.0)
        else:
            self._is_busy = True
            self._schedule(world.clock.now + world.step_s(host))

    def _tell(self, output: Any) -> None:
        if not self._process.is_dead:
            self._listener(output)


class WatchedBridge(Bridge):
    """A conversion writes only to allocated blocks."""

    def __init__(self, world: "World", *args: Any) -> None:
        super().__init__(*args)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self._world, self._process = world, loop

    def convert(self, data: memoryview, part: Segment, table: Sequence[int], first_token: int) -> None:
        manager = self._world.manager_of(self._process)
        first = max(first_token, part.first_block * self.source.block_size) // self._ours.layout.block_size
        last = (part.first_block + len(part.block_ids)) * self.source.block_size - 1
        blocks = table[first : last // self._ours.layout.block_size + 1]
        if not all(manager._references[block] for block in blocks):
            self._world.bug(f"{self._process.name}: a conversion writes after its pull's end")
        super().convert(data, part, table, first_token)


@dataclass(eq=False)
class _Read:
    """A running read: pieces are fetched and arrive one by one, independently of the two processes."""

    incarnation: str
    num_left: int
    done: SimFuture
    is_cut: bool = False


class SimRdma(Transport):
    """Called "nixl": the sink's hardware reads the source's memory, and asks nobody. A read that failed or was given
    up lands for a while yet."""

    name = "nixl"

    def __init__(self, world: "World", runner: CheckedRunner, staging: CountedStaging) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self.world = world
        self.process = loop
        self.runner = runner
        self.staging = staging
        self.reads: dict[_Read, None] = {}

    async def connect(self, source: Source) -> KVReader:
        world, incarnation = self.world, source.opened.source_incarnation
        await asyncio.sleep(world.rng.random() * world.network.latency_s)
        if world.rng.random() < world.weather.read_error or world.worker_of(incarnation) is None:
            world.network.trouble(self.process.name, incarnation.partition(".")[0])
            raise TransportError("the source's agent cannot be reached")
        return SimReader(self, incarnation)

    def forget(self, incarnation: str) -> None:
        for read in list(self.reads):
            if read.incarnation == incarnation:
                self.cut(read, WorkerLost("the connection was cut"))

    def cut(self, read: _Read, error: Exception) -> None:
        """End a read: no piece of it lands from here on."""
        read.is_cut = True
        self.reads.pop(read, None)
        if not read.done.done():
            read.done.set_exception(error)


class SimReader(KVReader):
    def __init__(self, transport: SimRdma, incarnation: str) -> None:
        self._transport = transport
        self._incarnation = incarnation
        self._mine: list[_Read] = []

    async def read(self, segment: kv_pb2.Segment, copies: Copies, into: Region) -> None:
        transport = self._transport
        world = transport.world
        read = _Read(self._incarnation, len(copies.lengths), transport.process.create_future())
        read.done.add_done_callback(lambda f: f.exception())
        transport.reads[read] = None
        self._mine.append(read)
        for remote, local, length in zip(
            copies.remote.tolist(), copies.local.tolist(), copies.lengths.tolist(), strict=True
        ):
            self._fetch_later(read, remote, local, length, into)
        if world.rng.random() < world.weather.read_error:
            world.network.trouble(transport.process.name, self._incarnation.partition(".")[0])
            await asyncio.sleep(world.rng.random() * world.network.latency_s)
            raise TransportError("the read went wrong", may_still_land=True)
        try:
            await asyncio.wait_for(asyncio.shield(read.done), world.read_timeout_s)
        except TimeoutError as e:
            raise TransportError("the read did not end in time", may_still_land=True) from e

    async def settled(self) -> None:
        mine = [read for read in self._mine if read in self._transport.reads]
        if mine:
            _, late = await asyncio.wait([read.done for read in mine], timeout=self._transport.world.read_timeout_s)
            if late:
                self._transport.forget(self._incarnation)

    def _fetch_later(self, read: _Read, remote: int, local: int, length: int, into: Region) -> None:
        """Layer by layer of each block, each at a different time."""
        transport = self._transport
        world, step = transport.world, min(layer_sizes(transport.runner.layout))
        read.num_left -= 1
        for at in range(0, length, step):
            read.num_left += 1
            landing = _Landing(remote + at, local + at, min(step, length - at), into, self._owner(into, local + at))
            delay = world.read_delay(self._incarnation, transport.process.name)
            world.clock.after(delay, self._fetch, read, landing)

    def _owner(self, into: Region, local: int) -> int:
        """The number changes when the memory belongs to another sequence."""
        transport = self._transport
        if into is transport.staging.region:
            return transport.staging.times_returned[local // GRAIN_BYTES]
        manager, block = transport.world.manager_of(transport.process), transport.runner.block_at(local)
        return manager.generations[block] if manager._references[block] else -1

    def _fetch(self, read: _Read, landing: "_Landing") -> None:
        transport = self._transport
        world = transport.world
        if read.is_cut or transport.process.is_dead:
            return
        source = world.worker_of(self._incarnation)
        if source is None or source.process.is_dead:
            world.network.deliver(transport.process, transport.cut, read, WorkerLost("the source's memory is gone"))
            return
        name = source.process.name
        blocked_until = 0.0 if world.has_fabric else world.network.blocked.get((name, transport.process.name), 0.0)
        if blocked_until > world.clock.now:
            world.clock.after(blocked_until - world.clock.now + world.rng.random() * 0.1, self._fetch, read, landing)
            return
        view = source.runner.memory.region.view
        assert view is not None
        data = bytes(view[landing.remote : landing.remote + landing.length])
        data = world.network.carry(data, name, transport.process.name)
        world.clock.after(world.rng.random() * world.network.latency_s / 4, self._land, read, landing, data)

    def _land(self, read: _Read, landing: "_Landing", data: bytes) -> None:
        transport = self._transport
        if read.is_cut or transport.process.is_dead:
            return
        if landing.owner != self._owner(landing.into, landing.local):
            transport.world.bug(f"{transport.process.name}: a read landed at {landing.local} after its end")
        view = landing.into.view
        assert view is not None
        view[landing.local : landing.local + landing.length] = data
        read.num_left -= 1
        if read.num_left == 0:
            transport.world.network.deliver(transport.process, self._finish, read)

    def _finish(self, read: _Read) -> None:
        self._transport.reads.pop(read, None)
        if not read.done.done():
            read.done.set_result(None)


@dataclass(frozen=True, slots=True)
class _Landing:
    remote: int
    local: int
    length: int
    into: Region
    owner: int


@dataclass(eq=False)
class Worker:
    """Worker process, from its start to its end."""

    process: ProcessLoop
    incarnation: str
    pool: str
    runner: CheckedRunner
    staging: CountedStaging = field(default_factory=CountedStaging)
    service: "WatchedService | None" = None
    wrong_since: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    @property
    def has_started(self) -> bool:
        return self.service is not None and hasattr(self.service, "_ticker")

    def check_for(self, names: set[str], now: float, what: str) -> None:
        """Check that `what` holds of the same name for a moment at most."""
        before = self.wrong_since.get(what, {})
        self.wrong_since[what] = {name: before.get(name, now) for name in names}
        for name, since in self.wrong_since[what].items():
            age_s = now - max(since, self.process.stalled_until)
            demand(age_s <= MOMENT_S, f"{self.incarnation}: {name} {what}, for {age_s:.1f} s")

    @property
    def pulls(self) -> list[Pull]:
        assert self.service is not None
        return list(self.service._pulls._sink._pulls.values())

    @property
    def address(self) -> str:
        return f"{self.process.name}:1"

    @property
    def engine(self) -> Engine:
        assert self.service is not None
        return self.service._engine._engine
