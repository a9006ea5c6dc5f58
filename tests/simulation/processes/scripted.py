"""A supervisor of which only the word is simulated: a world without a real one starts workers on fixed hosts, and tells
its routers of them in a while. The real one is in supervised.py.
"""

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.workers.core.sequence import Sequence

from ..faults import faults
from ..faults.faults import Fault, Kinds, Weather
from ..machines.hosts import Hosts
from ..machines.rpc import SimChannel

if TYPE_CHECKING:
    from ..world import World


class Scripted:
    """The part of a World that starts, ends and announces its workers."""

    quiet_limit_s = 60.0  # after the last request has ended and all is well again: by then nothing is held any more

    def __init__(self, world: "World") -> None:
        self._world = world
        self._back_at = 0.0

    def plan_faults(self, rng: random.Random) -> list[Fault]:
        weather = self._world.weather
        return faults.plan(rng, weather, FOG_KINDS if weather is faults.FOG else KINDS)

    def plan_hosts(self, rng: random.Random) -> Hosts:
        world = self._world
        pools = ["prefill"] * rng.randint(1, 2) + ["decode"] * rng.randint(1, 3) + ["mixed"] * (rng.random() < 0.2)
        hosts = Hosts(rng, world.lease_s, world.seed)
        for number, pool in enumerate(pools):
            world.add_host(hosts.make(rng, f"{pool}{pools[:number].count(pool)}", pool))
        return hosts

    def start(self) -> None:
        world, rng = self._world, self._world.rng
        for host in world.workers:
            self.start_worker(host)
        if world.weather.name == "calm":
            for _ in range(rng.randint(0, 2)):
                a, b = rng.sample(list(world.workers), 2)
                world.network.slowness[a, b] = 10 ** rng.uniform(0, 0.8)
            if rng.random() < 0.7 and [h.config.role for h in world.hosts.values()].count("decode") > 1:
                world.clock.at(rng.uniform(0.5, 1.5), drain, world)

    def names(self) -> list[str]:
        """Hosts, for faults to choose from."""
        return list(self._world.workers)

    def peers(self) -> list[str]:
        """Return the routers, whose packets may be lost."""
        return self.names()

    def start_worker(self, host: str) -> None:
        if self._world.workers[host] is None:
            worker = self._world.make_worker(host)
            worker.process.call_soon(lambda: worker.process.create_task(self._world.serve(worker)))
            self.tell_fleet()

    def replace(self, host: str, low_s: float, high_s: float) -> None:
        """Start another process on the host, after a random time between `low_s` and `high_s`."""
        self._world.clock.after(self._world.rng.uniform(low_s, high_s), self.start_worker, host)

    def on_kill(self, host: str) -> None:
        self.tell_fleet()

    def on_router_kill(self, name: str, again: Callable[[], None]) -> None:
        self._world.clock.after(self._world.routers.rng.uniform(0.05, 3.0), again)

    def on_router_start(self, name: str) -> None:
        self.tell_fleet()

    def drain(self, host: str) -> None:
        """Drain a worker on a separate Link; later end the process, and start another."""
        world, rng = self._world, self._world.rng
        worker = world.workers[host]
        if worker is None:
            return
        world.note(f"drain {worker.incarnation}")
        world.network.troubles.add(world.clock.now, float("inf"), host)

        async def tell() -> None:
            channel = SimChannel(world.network, Weather(), worker.address)
            call = worker_pb2_grpc.WorkerStub(channel).Link()  # type: ignore[arg-type]
            await call.write(worker_pb2.RouterMessage(drain=worker_pb2.Drain()))
            await asyncio.sleep(stay_s)
            call.cancel()
            await channel.close()

        stay_s = rng.uniform(0.3, 4.0)
        world.outsider.call_soon(lambda: world.outsider.create_task(tell()))
        if world.weather.name != "calm":
            world.clock.after(stay_s, world.terminate, host)
            world.clock.after(stay_s + rng.uniform(0.5, 2.0), self.start_worker, host)

    def go_away(self) -> None:
        """Routers keep their last view of the fleet."""
        self._back_at = self._world.clock.now + self._world.rng.uniform(0.5, 5.0)

    def tell_fleet(self) -> None:
        """Inform routers of the fleet: each learns of a change after a different delay."""
        world = self._world
        for name in world.routers.names:
            when = max(world.clock.now + world.rng.uniform(0.01, 0.5), self._back_at)
            world.clock.at(when, self._send_fleet, name)

    def _send_fleet(self, name: str) -> None:
        world = self._world
        if world.clock.now < self._back_at:
            world.clock.at(self._back_at, self._send_fleet, name)
            return
        infos = [WorkerInfo(w.incarnation, w.address, w.pool, w.pool) for w in world.living()]
        world.routers.tell(name, infos)

    def check(self) -> None:
        """Its word is not under test."""

    def settle(self) -> None:
        self._back_at = 0.0
        for process in self._world.processes:
            process.go_on()

    def what_is_left(self) -> str:
        return ""


def drain(world: "World") -> None:
    """A worker with running sequences, as soon as there is one: its sequences can only move."""
    assert isinstance(world.supervision, Scripted)
    busy = [w for w in world.living() if w.has_started and any(map(_has_far_to_go, w.engine._sequences.values()))]
    if busy:
        world.supervision.drain(world.rng.choice(busy).process.name)
    elif world.clock.now < 6.0:
        world.clock.after(0.02, drain, world)


def _has_far_to_go(sequence: Sequence) -> bool:
    return sequence.is_decoding and sequence.request.sampling.max_tokens - sequence.num_output > 8


def supervisor_away(world: "World") -> None:
    assert isinstance(world.supervision, Scripted)
    world.note("the supervisor is away")
    world.supervision.go_away()


KINDS: Kinds = (
    (faults.kill, 6),
    (faults.stall, 6),
    (faults.partition, 5),
    (faults.cut, 5),
    (faults.slow_link, 3),
    (faults.terminate, 2),
    (drain, 12),
    (supervisor_away, 2),
    (faults.clock_jumps, 2),
)
FOG_KINDS: Kinds = (
    (faults.stall, 5),
    (faults.freeze_a_pull, 6),
    (drain, 3),
    (faults.slow_link, 3),
    (faults.partition, 2),
    (faults.clock_jumps, 2),
)
