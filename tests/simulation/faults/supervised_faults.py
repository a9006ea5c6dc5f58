"""Faults in a world with a real supervisor, in addition to those of all worlds (faults.py)."""

import random
from typing import TYPE_CHECKING

from . import faults
from .faults import Fault, Kinds, Weather

if TYPE_CHECKING:
    from ..processes.routers import RouterProcess
    from ..processes.supervised import Supervised
    from ..world import World

HANGS_S = (16.0, 25.0)  # longer than a supervisor waits for a sign of life
FOR_EVER_S = 1000.0


def plan_supervised(rng: random.Random, weather: Weather) -> list[Fault]:
    """Plan the faults of a supervisor. On a calm day too targets change, and supervisors come and go: no request may
    notice."""
    if weather.name == "calm":
        return _more(rng, rng.randint(1, 4), CALM_KINDS)
    kinds = FOG_KINDS if weather is faults.FOG else KINDS
    return sorted([*faults.plan(rng, weather, kinds), *_more(rng, rng.randint(0, 2), CALM_KINDS)], key=_when)


def _more(rng: random.Random, num: int, of: Kinds) -> list[Fault]:
    kinds, weights = zip(*of, strict=True)
    return sorted(
        (Fault(rng.randint(100, 900), rng.uniform(1.0, 6.0), rng.choices(kinds, weights)[0]) for _ in range(num)),
        key=_when,
    )


def _when(fault: Fault) -> int:
    return fault.at_packet


def _of(world: "World") -> "Supervised":
    from ..processes.supervised import Supervised

    assert isinstance(world.supervision, Supervised)
    return world.supervision


def kill_supervisor(world: "World") -> None:
    """Ray starts another supervisor, which adopts the running processes."""
    _of(world).kill()


def _serves(router: "RouterProcess") -> bool:
    if router.router is None:
        return False
    health = router.router.health()
    return health.num_decode_workers + health.num_mixed_workers > 0


def stall_supervisor(world: "World") -> None:
    """SIGSTOP, and SIGCONT later. On a calm day only once requests can be served: a stopped start would fail them."""
    actor = _of(world).actor
    may_stop = world.weather.name != "calm" or all(_serves(router) for router in world.routers.living())
    if actor is not None and actor.process is not None and may_stop:
        seconds = world.rng.choice((world.rng.uniform(0.1, 5.0), world.rng.uniform(*HANGS_S)))
        world.stall(actor.process, seconds)


def scale(world: "World") -> None:
    """Change the targets: up, down, to nothing and back."""
    from ..processes.supervised import plan_replicas

    _of(world).scale(plan_replicas(world.rng))


def scale_and_kill(world: "World") -> None:
    """The supervisor ends while it carries out a command."""
    scale(world)
    world.clock.after(world.rng.uniform(0.0, 3.0), kill_supervisor, world)


def starts_fail(world: "World") -> None:
    """Let the next starts fail."""
    _of(world).num_failing += world.rng.randint(1, 3)
    world.note("starts fail")


def no_node(world: "World") -> None:
    """Let the next start find no node."""
    _of(world).num_unplaced += 1
    world.note("there is no node for one more")


def hang(world: "World") -> None:
    """A worker is stopped for longer than its supervisor waits."""
    worker = next((w for w in world.living() if w.has_started and world.rng.random() < 0.5), None)
    if worker is not None:
        world.stall(worker.process, world.rng.choice((FOR_EVER_S, world.rng.uniform(*HANGS_S))))


CALM_KINDS: Kinds = (
    (scale, 6),
    (scale_and_kill, 3),
    (kill_supervisor, 2),
    (stall_supervisor, 2),
    (starts_fail, 1),
    (no_node, 1),
)
KINDS: Kinds = (
    (faults.kill, 6),
    (faults.stall, 4),
    (faults.partition, 5),
    (faults.cut, 5),
    (faults.slow_link, 2),
    (faults.terminate, 2),
    (faults.clock_jumps, 2),
    (hang, 2),
    (scale, 6),
    (scale_and_kill, 3),
    (kill_supervisor, 3),
    (stall_supervisor, 2),
    (starts_fail, 2),
    (no_node, 2),
)
FOG_KINDS: Kinds = (
    (faults.stall, 5),
    (faults.freeze_a_pull, 6),
    (faults.slow_link, 3),
    (faults.partition, 2),
    (faults.clock_jumps, 2),
    (scale, 4),
    (scale_and_kill, 2),
    (kill_supervisor, 2),
    (stall_supervisor, 2),
)
