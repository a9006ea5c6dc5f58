"""A supervisor over real workers (of the runner that a person can compute) in this process; only Ray is played."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from diptych.cluster.common.config_file import build
from diptych.cluster.common.gang import gang_of
from diptych.cluster.common.handles import RouterStarted, SettingsGeneration, WorkerStarted
from diptych.cluster.control.status import ClusterStatus
from diptych.cluster.control.supervisor import Supervisor
from diptych.cluster.routing.fleet import WorkerInfo
from diptych.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from diptych.workers.common.channel import auth_metadata, each_of, open_channel
from diptych.workers.common.errors import DiptychError, WorkerLost
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.server.service import WorkerService
from diptych.workers.testing.fake_runner import FakeRunner

TOKEN = "secret"
SETTINGS = SettingsGeneration(0, build({"model": "fake"}))
TIMEOUT_S = 60.0
LOOK_S = 0.1
NO_LIMIT = 1 << 30


class FakeProcess:
    """A worker that serves in this process, and can be made to die."""

    def __init__(
        self,
        pool: str,
        error: DiptychError | None,
        runner: Callable[[SettingsGeneration], FakeRunner],
        settings: SettingsGeneration,
    ) -> None:
        self._error, self._settings = error, settings
        self._config = WorkerConfig.of(model="fake", role=pool, transports=("grpc",), auth_token=TOKEN)
        self._runner = runner
        self._started: asyncio.Task[WorkerStarted] | None = None
        self.is_stopped = False  # as by SIGSTOP
        self.waits_for = ""  # and is not placed
        self.rank_host_nodes: tuple[str, ...] = ()
        self._death: asyncio.Future[DiptychError] = asyncio.get_running_loop().create_future()

    async def start(self) -> WorkerStarted:
        if self._error:
            raise self._error
        if self.is_stopped:
            await asyncio.Event().wait()
        while self.waits_for:
            await asyncio.sleep(LOOK_S)
        if self._started is None:
            self._started = asyncio.create_task(self._serve())
        return await asyncio.shield(self._started)

    async def _serve(self) -> WorkerStarted:
        self.service = WorkerService(self._config, self._runner(self._settings))
        at = await self.service.start()
        number, others = self._settings.number, self.rank_host_nodes
        return WorkerStarted(at.address, at.incarnation, at.pid, "here", generation=number, rank_host_nodes=others)

    @property
    def is_dead(self) -> bool:
        return self._death.done()

    async def alive(self) -> None:
        if self.is_stopped:
            await asyncio.Event().wait()

    async def waiting_for(self) -> str:
        return self.waits_for

    async def wait(self) -> DiptychError:
        return await asyncio.shield(self._death)

    async def die(self, error: DiptychError) -> None:
        if not self._death.done():
            self._death.set_result(error)
            if self._started:
                await self._started
                await self.service.stop(grace_s=0.0)

    async def kill(self) -> None:
        await self.die(WorkerLost("killed"))


class FakeRouter:
    def __init__(self, before: RouterStarted | None, error: DiptychError | None) -> None:
        self.before = before
        self._error = error
        self.is_stopped = False  # as by SIGSTOP
        self.is_killed = False
        self.death: asyncio.Future[DiptychError] = asyncio.get_running_loop().create_future()

    async def start(self) -> RouterStarted:
        if self._error:
            raise self._error
        return RouterStarted("127.0.0.1", 1, 2, 3)

    async def alive(self) -> None:
        if self.is_stopped:
            await asyncio.Event().wait()

    async def waiting_for(self) -> str:
        return ""

    async def wait(self) -> DiptychError:
        return await asyncio.shield(self.death)

    async def kill(self) -> None:
        self.is_killed = True


@dataclass
class FakeLauncher:
    step_s: float = 0.0
    num_blocks: int = 256
    num_places: int = NO_LIMIT  # what finds none waits for the end of another; of gangs, none is asked for
    errors: list[DiptychError | None] = field(default_factory=list[DiptychError | None])  # of the next starts
    runner: type[FakeRunner] = FakeRunner  # of the workers that start
    router_errors: list[DiptychError] = field(default_factory=list[DiptychError])
    processes: dict[str, FakeProcess] = field(default_factory=dict[str, FakeProcess])
    rank_host_nodes: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # by worker
    places: set[str] = field(default_factory=set[str])  # by gang: what Ray has reserved
    routers: list[FakeRouter] = field(default_factory=list[FakeRouter])
    kept: dict[str, int] | None = None
    kept_upgrade: str | None = None
    used: list[SettingsGeneration] = field(default_factory=list[SettingsGeneration])  # by routers
    num_started: int = 0

    async def worker(self, worker_id: str, pool: str, settings: SettingsGeneration = SETTINGS) -> FakeProcess:
        self.places.add(gang_of(worker_id))
        if worker_id not in self.processes:
            self.num_started += 1
            error = self.errors.pop(0) if self.errors else None
            self.processes[worker_id] = FakeProcess(pool, error, self._runner, settings)
            self.processes[worker_id].rank_host_nodes = self.rank_host_nodes.get(worker_id, ())
            num_placed = sum(not each.waits_for and not each.is_dead for each in self.processes.values())
            if num_placed > self.num_places:
                self.processes[worker_id].waits_for = "a node with CPU: 1"
        return self.processes[worker_id]

    def _runner(self, settings: SettingsGeneration) -> FakeRunner:
        """A model is its name: `fake`, or `fake-N` with the weights N."""
        weights = int(settings.config.shared.model.model.partition("-")[2] or 0)
        runner = type("RunnerOfWeights", (self.runner,), {"weights": weights})
        return runner(num_blocks=self.num_blocks, step_s=self.step_s)

    def vacate(self, gang_id: str) -> None:
        assert all(each.is_dead for name, each in self.processes.items() if gang_of(name) == gang_id)
        self.places.discard(gang_id)
        living = [each for each in self.processes.values() if not each.is_dead]
        num_free = self.num_places - sum(not each.waits_for for each in living)
        for process in [each for each in living if each.waits_for][: max(num_free, 0)]:
            process.waits_for = ""

    async def router(self, router_id: str, before: RouterStarted | None) -> FakeRouter:
        self.routers.append(FakeRouter(before, self.router_errors.pop(0) if self.router_errors else None))
        return self.routers[-1]

    def existing(self) -> list[tuple[str, str]]:
        return [
            (worker_id, worker_id.partition("-")[0])
            for worker_id, process in self.processes.items()
            if not process.is_dead
        ]

    def remember(self, replicas: Mapping[str, int]) -> None:
        self.kept = dict(replicas)

    def recall(self) -> dict[str, int] | None:
        return self.kept

    def use(self, settings: SettingsGeneration) -> None:
        self.used.append(settings)

    def keep_upgrade(self, text: str) -> None:
        self.kept_upgrade = text

    def recall_upgrade(self) -> str | None:
        return self.kept_upgrade


class World:
    """A running supervisor, and queries of a test to it."""

    def __init__(self, launcher: FakeLauncher, settings: Mapping[str, Any]) -> None:
        self.launcher = launcher
        self.supervisor = Supervisor(build({"model": "fake", **settings}), launcher, TOKEN)
        self._task = asyncio.create_task(self.supervisor.run())

    async def until(self, holds: Callable[[ClusterStatus], bool]) -> ClusterStatus:
        version = 0
        while not holds(status := self.supervisor.status()):
            with suppress(TimeoutError):  # workers' load reports change the status and not the fleet's version
                async with asyncio.timeout(LOOK_S):
                    version, _ = await self.supervisor.watch_fleet(version)
        return status

    async def fleet(self) -> dict[str, WorkerInfo]:
        _, infos = await self.supervisor.watch_fleet(0)
        return {info.incarnation: info for info in infos}

    async def leave(self, *, end: bool = True) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if end:
            await self.supervisor.stop()
        else:
            await self._die()

    async def _die(self) -> None:
        """End all that it does, as the end of its process would: none of its tasks ends or says anything more."""
        supervisor = self.supervisor
        setattr(supervisor, "_bury", _do_nothing)  # noqa: B010 - not a method for the type checker to compare
        for router in self.launcher.routers:
            setattr(router, "kill", _do_nothing)  # noqa: B010
        tasks = [*supervisor._tasks, *supervisor._burials, *supervisor._routers._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in supervisor._workers.values():
            if worker.control:
                await worker.control.close()


async def _do_nothing(*_: object) -> None: ...


@asynccontextmanager
async def supervising(launcher: FakeLauncher | None = None, **pools: object) -> AsyncIterator[World]:
    world = World(launcher or FakeLauncher(), {"pools": pools})
    try:
        yield world
    finally:
        await world.leave()


def is_ready(status: ClusterStatus) -> bool:
    return status.state == "ready"


async def generate(address: str, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
    """Send a request over a separate stream, as a router would; yield its tokens."""
    sampling = inference_pb2.SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)
    submit = worker_pb2.Submit(
        handle=1, request_id=uuid.uuid4().hex, prompt_token_ids=prompt, sampling=sampling, timeout_s=TIMEOUT_S
    )
    channel = open_channel(address)
    stream = worker_pb2_grpc.WorkerStub(channel).Link(metadata=auth_metadata(TOKEN))
    await stream.write(worker_pb2.RouterMessage(submit=submit))
    finished = False
    while not finished:
        received = await stream.read()
        assert isinstance(received, worker_pb2.WorkerMessage)
        for message in each_of(received):
            assert not message.HasField("failed"), message.failed
            for token_id in message.step.token_ids:
                yield token_id
            finished = finished or any(message.step.finish_reasons)
    stream.cancel()
    await channel.close()
