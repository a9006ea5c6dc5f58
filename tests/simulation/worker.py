"""A worker process: the real WorkerService with its real engine, hand-offs and gRPC transport; a simulated thread,
server and RDMA. Its memory is checked: what a sequence reads back must be what it wrote, and freed blocks are poisoned.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from diptych.proto import kv_pb2
from diptych.workers.batch_tables import BatchTables
from diptych.workers.engine import Engine
from diptych.workers.engine_events import HandoffOpened, StepOutput
from diptych.workers.engine_thread import IDLE_WAIT_S, EngineThread
from diptych.workers.errors import TransportError, WorkerLost
from diptych.workers.fake_runner import FakeRunner
from diptych.workers.handoff_pull import Errand, Pull
from diptych.workers.kv_layout import Copies, Region
from diptych.workers.runner import LayerWatch
from diptych.workers.sequence import Batch, SampledToken
from diptych.workers.transport.base import Reader, Source, Transport

from .clock import ProcessLoop, SimFuture, Timer

if TYPE_CHECKING:
    from diptych.workers.service import WorkerService

    from .world import World

VOCAB_SIZE = 997
POISON = 777_777
MOMENT_S = 0.4


class CheckedRunner(FakeRunner):
    """Raises AssertionError as soon as a token would be made from KV that is not the sequence's own; a provisional one
    may be, for nobody must ever see it."""

    def __init__(self, **shape: int) -> None:
        super().__init__(**shape)  # type: ignore[arg-type]
        self._tables = BatchTables(self.layout.block_size, self.memory.num_blocks)

    def _compute(self, batch: Batch, watch: LayerWatch | None) -> list[SampledToken]:
        sampled = super()._compute(batch, watch)
        for entry, row in zip(batch.entries, self._tables.update(batch.entries), strict=True):
            num_blocks = (entry.sequence.num_computed + entry.num_new - 1) // self.layout.block_size + 1
            kept = self._tables.array[row, :num_blocks].tolist()
            assert kept == entry.sequence.block_table[:num_blocks], "a compiled step would use other blocks"
        for entry in batch.entries:
            if entry.samples:
                sequence = entry.sequence
                end = sequence.num_computed + entry.num_new
                held = self._kv[sequence.block_table].transpose(1, 2, 0, 3)  # [layers, kv, blocks, slots]
                held = held.reshape(self.layout.num_layers, 2, -1)[:, :, :end]
                wrong = (held[:, 0] != sequence.token_ids[:end]) | (held[:, 1] != np.arange(end))
                assert not wrong.any() or sequence.provisional is not None, (
                    f"a token made from wrong KV: {sequence.request.request_id} at positions {np.flatnonzero(wrong)}"
                )
        return sampled

    def poison(self, block: int) -> None:
        self._kv[block] = POISON


class PoisonedList(list[int]):
    """Free blocks: what they held is gone at once."""

    def __init__(self, blocks: list[int], runner: CheckedRunner) -> None:
        super().__init__(blocks)
        self._runner = runner

    def append(self, block: int) -> None:
        self._runner.poison(block)
        super().append(block)


class _Commands:
    """queue.SimpleQueue, as far as EngineThread needs it; a command wakes an idle engine."""

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
        self._begun: dict[str, Errand] = {}  # by sequence
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
        self._is_stopping = True

    def begin(self, key: str, *args: Any, **kwargs: Any) -> None:
        self._begun[key] = self._errand_of(key)
        super().begin(key, *args, **kwargs)

    async def commit(self, key: str, *args: Any, **kwargs: Any) -> None:
        """Only what its source has released to this very attempt."""
        self._check_released(self._errand_of(key), "commits")
        await super().commit(key, *args, **kwargs)

    def _errand_of(self, key: str) -> Errand:
        worker = self._world.workers[self._process.name]
        assert worker is not None
        return next(p._errand for p in worker.pulls if p._errand.key == key)

    def _check_released(self, errand: Errand, what: str) -> None:
        if self._world.released.get(errand.source.handoff_id) != errand.sink:
            self._world.bug(f"{errand.sink} {what} {errand.source.handoff_id}, which was not released to it")

    def _check_and_tell(self, output: StepOutput) -> None:
        for key in output.tokens.keys:
            if key in self._begun:
                self._check_released(self._begun[key], "tells a token of")
        self._world.num_live_offers += sum(isinstance(e, HandoffOpened) and e.is_live for e in output.handoffs)
        self._real_listener(output)

    def _check_provisional(self) -> None:
        engine = self._engine
        for key, incoming in engine.handoffs._incoming.items():
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
        if process.is_dead or self._is_stopping:
            return
        if process.is_stalled:
            self._schedule(process.stalled_until)
            return
        waiting, self._sim_commands.waiting = self._sim_commands.waiting, []
        for command in waiting:
            command()
        output = self._engine.step(self._listener)
        self._check_provisional()
        world = self._world
        busy_s = world.step_s(process.name) if output.ran else 0.0
        if output:
            world.clock.after(busy_s, self._tell, output)
        if output.ran or self._sim_commands.waiting:
            self._is_busy = True
            self._schedule(world.clock.now + busy_s)
            return
        self._is_busy = False
        deadline = self._engine.next_deadline()
        self._schedule(min(world.clock.now + IDLE_WAIT_S, deadline if deadline is not None else float("inf")))

    def _tell(self, output: Any) -> None:
        if not self._process.is_dead:
            self._listener(output)


# -- RDMA -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Read:
    """One read under way: pieces are fetched and land one by one, whatever the two processes do."""

    incarnation: str
    num_left: int
    done: SimFuture
    is_cut: bool = False


class SimRdma(Transport):
    """Called "nixl": the sink's hardware reads the source's memory, and asks nobody. A read that failed or was given
    up lands for a while yet."""

    name = "nixl"

    def __init__(self, world: "World", region: Region, runner: CheckedRunner) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        self.world = world
        self.process = loop
        self.region = region
        self.runner = runner
        self.reads: dict[_Read, None] = {}

    def endpoint(self) -> kv_pb2.NixlEndpoint:
        return kv_pb2.NixlEndpoint(agent_name=self.process.name, num_bytes=self.region.num_bytes, memory="DRAM")

    async def connect(self, source: Source) -> Reader:
        world, incarnation = self.world, source.opened.source_incarnation
        await asyncio.sleep(world.rng.random() * world.network.latency_s)
        if world.rng.random() < world.weather.read_error or world.worker_of(incarnation) is None:
            raise TransportError("the source's agent cannot be reached")
        return SimReader(self, incarnation)

    def forget(self, incarnation: str) -> None:
        for read in list(self.reads):
            if read.incarnation == incarnation:
                self.cut(read, WorkerLost("the connection was cut"))

    def cut(self, read: _Read, error: Exception) -> None:
        """Nothing of it lands from here on."""
        read.is_cut = True
        self.reads.pop(read, None)
        if not read.done.done():
            read.done.set_exception(error)


class SimReader(Reader):
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
            self._fetch_later(read, remote, local, length)
        if world.rng.random() < world.weather.read_error:
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

    def _fetch_later(self, read: _Read, remote: int, local: int, length: int) -> None:
        """Layer by layer of each block, each at a time of its own."""
        transport = self._transport
        layout = transport.runner.layout
        world, step = transport.world, layout.layer_bytes
        manager = world.manager_of(transport.process)
        read.num_left -= 1
        for at in range(0, length, step):
            read.num_left += 1
            target = (local + at) // layout.block_bytes
            landing = _Landing(remote + at, local + at, min(step, length - at), target, manager.generations[target])
            delay = world.read_delay(self._incarnation, transport.process.name)
            world.clock.after(delay, self._fetch, read, landing)

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
        world.clock.after(world.rng.random() * world.network.latency_s / 4, self._land, read, landing, data)

    def _land(self, read: _Read, landing: "_Landing", data: bytes) -> None:
        transport = self._transport
        if read.is_cut or transport.process.is_dead:
            return
        manager = transport.world.manager_of(transport.process)
        if manager.generations[landing.block] != landing.generation or not manager._references[landing.block]:
            transport.world.bug(f"{transport.process.name}: a read landed in block {landing.block} after its end")
        view = transport.region.view
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
    block: int
    generation: int


@dataclass(eq=False)
class Worker:
    """One process, from its start to its end."""

    process: ProcessLoop
    incarnation: str
    pool: str
    runner: CheckedRunner
    service: "WorkerService | None" = None
    wrong_since: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    @property
    def has_started(self) -> bool:
        return self.service is not None and hasattr(self.service, "_ticker")

    def check_for(self, names: set[str], now: float, what: str) -> None:
        """What may be so for a moment."""
        before = self.wrong_since.get(what, {})
        self.wrong_since[what] = {name: before.get(name, now) for name in names}
        for name, since in self.wrong_since[what].items():
            age_s = now - max(since, self.process.stalled_until)
            assert age_s <= MOMENT_S, f"{self.incarnation}: {name} {what}, for {age_s:.1f} s"

    @property
    def pulls(self) -> list[Pull]:
        assert self.service is not None
        return list(self.service._handoffs._sink._pulls.values())

    @property
    def address(self) -> str:
        return f"{self.process.name}:1"

    @property
    def engine(self) -> Engine:
        assert self.service is not None
        return self.service._engine._engine
