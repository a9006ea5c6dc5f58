"""Faults, chosen by the seed. A fault strikes at the n-th packet of the run, so between any two steps of any protocol,
or at a time, if there are not that many packets by then."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ..world import World


@dataclass(frozen=True)
class Weather:
    """Probabilities of single mishaps, and how many faults strike. A kind day by default."""

    name: str = "calm"
    num_faults: int = 0
    stream_break: float = 0.0  # of a stream between two running processes
    lose_call: float = 0.0  # of a unary call: the request or its answer
    double_call: float = 0.0  # carried out twice
    straggle: float = 0.0  # of a packet that takes long
    read_error: float = 0.0  # of an RDMA read that fails and lands later all the same
    flip: float = 0.0  # of a bit in a piece of KV on its way, to a sink that compares checksums
    leave: float = 0.2  # of a client that goes away
    step_fault: float = 0.0  # of a step that raises
    poison: float = 0.0  # of a request that makes steps raise
    stop_reading: float = 0.1  # of a client that takes no tokens for a while
    forge: float = 0.05  # of a request for another sink's blocks, every eighth packet
    latency_s: float = 0.002  # of a packet, at most
    lease_s: tuple[float, float] = (0.5, 3.0)

    STREAMS: ClassVar[tuple[str, ...]] = ("/Subscribe", "/Pull", "/Link")


CALM = Weather(lease_s=(0.15, 0.8))
BREEZE = Weather("breeze", 1, 0.02, 0.03, 0.05, 0.01, 0.02)
GALE = Weather("gale", 3, 0.07, 0.08, 0.1, 0.03, 0.06, flip=0.005, step_fault=0.001, poison=0.03, forge=0.1)
STORM = Weather("storm", 8, 0.15, 0.15, 0.15, 0.06, 0.12, flip=0.01, step_fault=0.003, poison=0.03, forge=0.1)
# Messages and timers are late.
FOG = Weather("fog", 8, 0.2, straggle=0.15, double_call=0.1, latency_s=0.05, lease_s=(0.25, 0.6))
WEATHERS = ((CALM, 20), (BREEZE, 15), (GALE, 25), (STORM, 20), (FOG, 20))


def choose_weather(rng: random.Random) -> Weather:
    kinds, weights = zip(*WEATHERS, strict=True)
    return rng.choices(kinds, weights)[0]


@dataclass(frozen=True)
class Fault:
    at_packet: int
    at_s: float  # at the latest
    strike: Callable[["World"], None]


Kinds = tuple[tuple[Callable[["World"], None], int], ...]  # with their weights


def plan(rng: random.Random, weather: Weather, of: Kinds) -> list[Fault]:
    """Plan faults, in the order in which they strike."""
    kinds, weights = zip(*of, strict=True)
    num = rng.randint(1, weather.num_faults) if weather.num_faults else 0
    faults = [Fault(rng.randint(20, 700), rng.uniform(1.0, 6.0), rng.choices(kinds, weights)[0]) for _ in range(num)]
    return sorted(faults, key=lambda f: f.at_packet)


def _some_host(world: "World") -> str:
    """Choose a host; empty where none is known yet."""
    names = world.supervision.names()
    return world.rng.choice(names) if names else ""


def kill(world: "World") -> None:
    """SIGKILL; usually a new process starts soon at the same address, sometimes none if others run."""
    rng = world.rng
    host = _some_host(world)
    world.kill(host)
    if rng.random() < 0.8 or world.num_living == 0:
        world.supervision.replace(host, 0.05, 3.0)


def stall(world: "World") -> None:
    """SIGSTOP, and SIGCONT later; now and then the router."""
    rng = world.rng
    about_a_lease = rng.uniform(0.3, 2.0) * world.lease_s
    seconds = rng.choice((rng.uniform(0.01, 0.5), about_a_lease, about_a_lease, rng.uniform(3.0, 8.0)))
    if rng.random() < 0.1:
        world.stall(world.routers.some().process, min(seconds, 3.0))
        return
    worker = world.workers.get(_some_host(world))
    if worker is not None:
        world.stall(worker.process, seconds)


def partition(world: "World") -> None:
    """Cut two hosts off from each other, one way or both ways."""
    rng = world.rng
    a, b = rng.sample([*world.supervision.peers(), world.routers.some_name()], 2)
    seconds = rng.choice((rng.uniform(0.05, 1.0), rng.uniform(1.0, 6.0)))
    world.note(f"partition {a} -> {b} for {seconds:.2f} s")
    world.network.block(a, b, seconds)
    if rng.random() < 0.6:
        world.note(f"partition {b} -> {a} too")
        world.network.block(b, a, seconds)


def cut(world: "World") -> None:
    """A connection breaks, and both processes continue."""
    connections = list(world.network.connections)
    if connections:
        connection = world.rng.choice(connections)
        world.note(f"cut {connection.client.name} - {connection.host}")
        world.network.cut(connection)


def slow_link(world: "World") -> None:
    rng = world.rng
    a, b = rng.sample([*world.supervision.peers(), world.routers.some_name()], 2)
    if rng.random() < 0.5:
        b = world.routers.some_name()  # tokens overtake each other
    factor = 10 ** rng.uniform(1, 2.5) * 0.002 / world.network.latency_s
    world.note(f"slow {a} -> {b}: {factor:.0f} times")
    world.network.slow_down(a, b, factor)


def terminate(world: "World") -> None:
    """SIGTERM: the process stops in good order, and another comes."""
    host = _some_host(world)
    world.terminate(host)
    world.supervision.replace(host, 1.0, 4.0)


def freeze_a_pull(world: "World") -> None:
    """Reads become slow, and one of the two processes stops or is unreachable: the lease may expire."""
    rng = world.rng
    pulling = [w for w in world.living() if w.has_started and w.service is not None and w.service._pulls._sink._pulls]
    if not pulling:
        if world.clock.now < 8.0:
            world.clock.after(0.02, freeze_a_pull, world)
        return
    sink = rng.choice(pulling)
    pull = rng.choice(sink.pulls)
    source = world.worker_of(pull._job.source.incarnation)
    if source is None:
        return
    factor = rng.uniform(0.2, 0.8) * world.lease_s / world.network.latency_s
    there, here = source.process.name, sink.process.name
    world.network.slow_down(there, here, factor)
    seconds = rng.uniform(0.6, 1.8) * world.lease_s
    world.note(f"slow {there} -> {here}: {factor:.0f} times")
    soon = rng.random() * 0.3 * world.lease_s
    kind = rng.choice(("deaf", "deaf", "source", "sink"))
    if kind == "deaf":
        world.clock.after(soon, world.network.block, here, there, seconds)
    else:
        world.clock.after(soon, world.stall, (source if kind == "source" else sink).process, seconds)


def clock_jumps(world: "World") -> None:
    """Set the clock of a process ahead."""
    rng = world.rng
    process = rng.choice([world.routers.some().process, *(w.process for w in world.living())])
    seconds = rng.choice((rng.uniform(0.01, 0.5), rng.uniform(0.3, 2.0) * world.lease_s))
    world.note(f"the clock of {process.name} jumps by {seconds:.2f} s")
    world.network.troubles.add(world.clock.now, world.clock.now, process.name)
    if router := world.routers.of(process):
        router.jumped_s += seconds
    process.jump(seconds)
