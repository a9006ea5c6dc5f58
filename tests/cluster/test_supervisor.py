"""The supervisor over real workers (of the runner that a person can compute) in this process; only Ray is played."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from diptych.cluster.config_file import build
from diptych.cluster.deployment import first_worker_ids, make_router_id
from diptych.cluster.fleet import WorkerInfo
from diptych.cluster.handles import RouterStarted, WorkerStarted
from diptych.cluster.status import ClusterStatus
from diptych.cluster.supervisor import Supervisor
from diptych.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from diptych.workers.channel import auth_metadata, open_channel
from diptych.workers.errors import CheckpointError, ConfigError, DiptychError, WorkerLost
from diptych.workers.fake_runner import FakeRunner, fake_output
from diptych.workers.service import WorkerService
from diptych.workers.worker_config import WorkerConfig

TOKEN = "secret"
TIMEOUT_S = 60.0


class FakeProcess:
    """A worker that serves in this process, and can be made to die."""

    def __init__(self, pool: str, error: DiptychError | None, step_s: float) -> None:
        self._error = error
        self._config = WorkerConfig(model="fake", role=pool, transports=("grpc",), auth_token=TOKEN)
        self._step_s = step_s
        self._started: asyncio.Task[WorkerStarted] | None = None
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> WorkerStarted:
        if self._error:
            raise self._error
        if self._started is None:
            self._started = asyncio.create_task(self._serve())
        return await asyncio.shield(self._started)

    async def _serve(self) -> WorkerStarted:
        self._service = WorkerService(self._config, FakeRunner(step_s=self._step_s))
        at = await self._service.start()
        return WorkerStarted(at.address, at.incarnation, at.pid, "here")

    async def waiting_for(self) -> str:
        return ""

    async def wait(self) -> str:
        return await asyncio.shield(self._death)

    async def die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)
            if self._started:
                await self._started
                await self._service.stop(grace_s=0.0)

    async def kill(self) -> None:
        await self.die("killed")


class FakeRouter:
    def __init__(self, before: RouterStarted | None) -> None:
        self.before = before
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> RouterStarted:
        return RouterStarted("127.0.0.1", 1, 2, 3)

    async def wait(self) -> str:
        return await asyncio.shield(self.death)

    async def kill(self) -> None:
        pass


@dataclass
class FakeLauncher:
    step_s: float = 0.0
    errors: list[DiptychError | None] = field(default_factory=list[DiptychError | None])  # of the next starts
    processes: dict[str, FakeProcess] = field(default_factory=dict[str, FakeProcess])
    routers: list[FakeRouter] = field(default_factory=list[FakeRouter])
    kept: dict[str, int] | None = None
    num_started: int = 0

    async def worker(self, worker_id: str, pool: str) -> FakeProcess:
        if worker_id not in self.processes:
            self.num_started += 1
            error = self.errors.pop(0) if self.errors else None
            self.processes[worker_id] = FakeProcess(pool, error, self.step_s)
        return self.processes[worker_id]

    async def router(self, router_id: str, before: RouterStarted | None) -> FakeRouter:
        self.routers.append(FakeRouter(before))
        return self.routers[-1]

    def existing(self) -> list[tuple[str, str]]:
        return [(worker_id, worker_id.partition("-")[0]) for worker_id in self.processes]

    def remember(self, replicas: Mapping[str, int]) -> None:
        self.kept = dict(replicas)

    def recall(self) -> dict[str, int] | None:
        return self.kept


class World:
    """A supervisor that runs, and what a test asks of it."""

    def __init__(self, launcher: FakeLauncher, settings: Mapping[str, Any]) -> None:
        self.launcher = launcher
        self.supervisor = Supervisor(build({"model": "fake", **settings}), launcher, TOKEN)
        self._task = asyncio.create_task(self.supervisor.run())

    async def until(self, holds: Callable[[ClusterStatus], bool]) -> ClusterStatus:
        version = 0
        while not holds(status := self.supervisor.status()):
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


def run(
    test: Callable[[World], Coroutine[Any, Any, None]], launcher: FakeLauncher | None = None, **pools: object
) -> None:
    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            world = World(launcher or FakeLauncher(), {"pools": pools})
            try:
                await test(world)
            finally:
                await world.leave()

    asyncio.run(main())


def is_ready(status: ClusterStatus) -> bool:
    return status.state == "ready"


ONE_OF_EACH = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


def test_the_fleet_comes_up_and_routers_hear_of_it() -> None:
    async def test(world: World) -> None:
        status = await world.until(is_ready)
        assert [(p.name, p.num_ready) for p in status.pools if p.target] == [("prefill", 1), ("decode", 1)]
        infos = (await world.fleet()).values()
        assert sorted((i.role, i.pool) for i in infos) == [("decode", "decode"), ("prefill", "prefill")]
        assert {i.address for i in infos} == {w.address for w in status.workers}

    run(test, **ONE_OF_EACH)


def test_a_new_cluster_gives_the_names_that_its_processes_were_started_under() -> None:
    async def test(world: World) -> None:
        status = await world.until(is_ready)
        expected = first_worker_ids(build({"model": "fake", "pools": pools}).pools)
        assert sorted((w.worker_id, w.pool) for w in status.workers) == sorted(expected)
        assert [r.router_id for r in status.routers] == [make_router_id(0)]

    pools = {"prefill": {"replicas": 2}, "decode": {"replicas": 1}, "mixed": {"replicas": 1, "data_parallel": 2}}
    run(test, **pools)


def test_a_gang_counts_as_one_and_is_replaced_as_a_whole() -> None:
    async def test(world: World) -> None:
        status = await world.until(is_ready)
        assert [w.worker_id for w in status.workers] == ["prefill-1", "decode-2.0", "decode-2.1"]
        assert (status.pools[1].target, status.pools[1].num_ready) == (1, 1)
        before = {info.address for info in (await world.fleet()).values()}
        await world.launcher.processes["decode-2.1"].die("SIGKILL")
        status = await world.until(lambda s: is_ready(s) and "SIGKILL" in s.pools[1].last_error)
        assert sorted(w.worker_id for w in status.workers) == ["decode-3.0", "decode-3.1", "prefill-1"]
        assert status.pools[1].num_failures == 1
        assert status.pools[1].last_error == "decode-2.1: SIGKILL"
        assert len(before & {info.address for info in (await world.fleet()).values()}) == 1
        assert world.launcher.num_started == 5
        await world.launcher.processes["decode-2.0"].wait()  # it was ended

    run(test, prefill={"replicas": 1}, decode={"replicas": 1, "data_parallel": 2})


def test_gangs_are_scaled_as_a_whole_and_leave_when_all_of_one_are_done() -> None:
    async def test(world: World) -> None:
        await world.until(is_ready)
        world.supervisor.scale({"mixed": 2})
        status = await world.until(lambda s: s.is_settled and s.pools[2].num_ready == 2)
        assert sorted(w.worker_id for w in status.workers) == ["mixed-1.0", "mixed-1.1", "mixed-2.0", "mixed-2.1"]
        [address] = [w.address for w in status.workers if w.worker_id == "mixed-1.1"]
        [other] = [w.address for w in status.workers if w.worker_id == "mixed-2.0"]
        assert address and other
        tokens, more = (generate(each, [3, 4], max_tokens=8) for each in (address, other))
        answer, rest = [await anext(tokens)], [await anext(more)]
        world.supervisor.scale({"mixed": 1})
        status = await world.until(lambda s: s.pools[2].num_draining == 1)
        draining = sorted(w.worker_id for w in status.workers if w.phase == "draining")
        assert draining in (["mixed-1.0", "mixed-1.1"], ["mixed-2.0", "mixed-2.1"])
        answer += [token async for token in tokens]
        rest += [token async for token in more]
        assert answer == rest == fake_output([3, 4], 8)
        status = await world.until(lambda s: s.is_settled)
        assert not set(draining) & {w.worker_id for w in status.workers} and len(status.workers) == 2

    run(test, FakeLauncher(step_s=0.1), mixed={"replicas": 1, "data_parallel": 2})


def test_a_new_supervisor_takes_over_gangs_and_completes_them() -> None:
    async def test(world: World) -> None:
        await world.until(is_ready)
        before = await world.fleet()
        del world.launcher.processes["mixed-1.1"]
        successor = World(world.launcher, {"pools": {"mixed": {"replicas": 1, "data_parallel": 2}}})
        try:
            status = await successor.until(lambda s: s.is_settled and s.pools[2].num_ready == 1)
            assert [w.worker_id for w in status.workers] == ["mixed-1.0", "mixed-1.1"]
            assert len(set(before) & set(await successor.fleet())) == 1
            assert world.launcher.num_started == 3
        finally:
            await successor.leave(end=False)

    run(test, mixed={"replicas": 1, "data_parallel": 2})


def test_a_worker_that_died_is_replaced_at_once() -> None:
    async def test(world: World) -> None:
        await world.until(is_ready)
        before = await world.fleet()
        await world.launcher.processes["prefill-1"].die("SIGKILL")
        status = await world.until(lambda s: is_ready(s) and "SIGKILL" in s.pools[0].last_error)
        after = await world.fleet()
        assert len(after) == 2
        assert len(set(before) & set(after)) == 1
        assert status.pools[0].last_error == "prefill-1: SIGKILL"
        assert world.launcher.num_started == 3

    run(test, **ONE_OF_EACH)


def test_a_start_that_fails_by_its_settings_is_final_before_the_cluster_was_ready() -> None:
    launcher = FakeLauncher(errors=[CheckpointError("a shard is missing")])

    async def test(world: World) -> None:
        status = await world.until(lambda s: s.failure is not None)
        assert status.state == "failed"
        assert status.failure is not None
        assert (status.failure.error, status.failure.message) == ("CheckpointError", "a shard is missing")
        assert world.launcher.num_started == 1

    run(test, launcher, mixed={"replicas": 1})


def test_a_crash_loop_backs_off_and_shows_its_error() -> None:
    launcher = FakeLauncher(errors=[WorkerLost("boom"), WorkerLost("boom"), WorkerLost("bang")])

    async def test(world: World) -> None:
        status = await world.until(lambda s: s.pools[2].num_failures == 3)
        assert status.pools[2].retry_in_s > 0
        assert status.pools[2].last_error.endswith("bang")
        status = await world.until(is_ready)
        assert world.launcher.num_started == 4

    run(test, launcher, mixed={"replicas": 1})


def test_scaling_up_and_down_keeps_those_that_stay() -> None:
    async def test(world: World) -> None:
        await world.until(is_ready)
        first = set(await world.fleet())
        world.supervisor.scale({"mixed": 3})
        await world.until(lambda s: s.is_settled and s.pools[2].num_ready == 3)
        assert first < set(await world.fleet())
        world.supervisor.scale({"mixed": 1})
        await world.until(lambda s: s.is_settled and s.pools[2].num_ready == 1)
        assert len(await world.fleet()) == 1
        assert world.launcher.kept == {"prefill": 0, "decode": 0, "mixed": 1}

    run(test, mixed={"replicas": 1})


async def generate(address: str, prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
    """One request over a stream of its own, as a router would."""
    sampling = inference_pb2.SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens)
    submit = worker_pb2.Submit(
        handle=1, request_id=uuid.uuid4().hex, prompt_token_ids=prompt, sampling=sampling, timeout_s=TIMEOUT_S
    )
    channel = open_channel(address)
    stream = worker_pb2_grpc.WorkerStub(channel).Link(metadata=auth_metadata(TOKEN))
    await stream.write(worker_pb2.RouterMessage(submit=submit))
    finished = False
    while not finished:
        message = await stream.read()
        assert isinstance(message, worker_pb2.WorkerMessage)
        assert not message.HasField("failed"), message.failed
        for token_id in message.step.token_ids:
            yield token_id
        finished = any(message.step.finish_reasons)
    stream.cancel()
    await channel.close()


def test_the_idle_worker_leaves_and_the_busy_one_stays() -> None:
    async def test(world: World) -> None:
        status = await world.until(is_ready)
        busy = status.workers[0]
        assert busy.address
        tokens = generate(busy.address, [3, 4], max_tokens=20)
        answer = [await anext(tokens)]
        while not any(w.num_running for w in world.supervisor.status().workers):
            answer.append(await anext(tokens))
        world.supervisor.scale({"mixed": 1})
        after = await world.until(lambda s: s.is_settled)
        assert [w.worker_id for w in after.workers] == [busy.worker_id]
        answer += [token async for token in tokens]
        assert answer == fake_output([3, 4], 20)

    run(test, FakeLauncher(step_s=0.1), mixed={"replicas": 2})


def test_a_drained_worker_stays_in_the_fleet_until_it_is_done() -> None:
    async def test(world: World) -> None:
        status = await world.until(is_ready)
        worker = next(w for w in status.workers if w.pool == "prefill")
        assert worker.address
        tokens = generate(worker.address, [3, 4], max_tokens=8)
        answer = [await anext(tokens)]
        world.supervisor.scale({"prefill": 0})
        await world.until(lambda s: s.pools[0].num_draining == 1)
        assert worker.address in {info.address for info in (await world.fleet()).values()}
        answer += [token async for token in tokens]
        assert answer == fake_output([3, 4], 8)
        await world.until(lambda s: s.is_settled)
        assert worker.address not in {info.address for info in (await world.fleet()).values()}

    run(test, FakeLauncher(step_s=0.1), prefill={"replicas": 1, "chunk_tokens": 8}, decode={"replicas": 1})


def test_a_worker_changes_its_pool_without_a_restart() -> None:
    async def test(world: World) -> None:
        await world.until(is_ready)
        before = await world.fleet()
        world.supervisor.scale({"prefill": 1, "decode": 2})
        await world.until(lambda s: s.is_settled and s.pools[1].num_ready == 2)
        after = await world.fleet()
        assert set(after) == set(before)
        assert sorted(info.role for info in after.values()) == ["decode", "decode", "prefill"]
        while sorted(w.role for w in world.supervisor.status().workers) != ["decode", "decode", "prefill"]:
            await asyncio.sleep(0.01)  # until the workers themselves have said so

    run(test, prefill={"replicas": 2}, decode={"replicas": 1})


def test_a_new_supervisor_takes_over_what_lives() -> None:
    async def test(world: World) -> None:
        await world.until(is_ready)
        world.supervisor.scale({"mixed": 2})
        await world.until(lambda s: s.is_settled and s.pools[2].num_ready == 2)
        before = await world.fleet()
        old_version, _ = await world.supervisor.watch_fleet(0)
        successor = World(world.launcher, {"pools": {"mixed": {"replicas": 1}}})
        try:
            version, infos = await successor.supervisor.watch_fleet(old_version)
            assert version > old_version
            assert {info.incarnation for info in infos} == set(before)
            await successor.until(lambda s: s.is_settled and s.pools[2].num_ready == 2)
            assert world.launcher.num_started == 2
        finally:
            await successor.leave(end=False)

    run(test, mixed={"replicas": 1})


def test_a_lost_router_is_started_again() -> None:
    async def test(world: World) -> None:
        await world.until(is_ready)
        world.launcher.routers[0].death.set_result("SIGKILL")
        status = await world.until(lambda s: bool(s.routers[0].last_error) and is_ready(s))
        assert status.routers[0].last_error == "SIGKILL"
        first, second = world.launcher.routers
        assert first.before is None
        assert second.before == await first.start()

    run(test, mixed={"replicas": 1})


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ({"embed": 1}, "no pool 'embed'"),
        ({"decode": -1}, "between 0 and"),
        ({"decode": 0}, "both empty"),
        ({"mixed": 2}, "scales by itself between 0 and 3"),
    ],
)
def test_targets_that_cannot_be_are_refused(replicas: dict[str, int], expected: str) -> None:
    async def test(world: World) -> None:
        with pytest.raises(ConfigError, match=expected):
            world.supervisor.scale(replicas)

    run(test, decode={"replicas": 1}, mixed={"replicas": 0, "min_replicas": 0, "max_replicas": 3})
