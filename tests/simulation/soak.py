"""Runs seeds of the simulation, and shows the schedule of one that fails.

python -m tests.simulation.soak --seeds 2000 --start 0
"""

import argparse
import gc
import os
import signal
import sys
import time
import traceback
from collections import Counter
from types import FrameType

from .checks.invariants import check_end
from .checks.violation import Violation
from .world import World, simulate

SHOWN = 400  # lines of a schedule
LONGEST_S = 60  # processor time of a seed: a loop that never waits lets no event of the simulation notice it


def soak(seeds: range, *, shows_progress: bool = False) -> Counter[str]:
    """Run the seeds; count the ends of requests, by weather, the events, and the seeds with a real supervisor.

    Raises Violation for the first seed that fails, with its schedule.
    """
    outcomes: Counter[str] = Counter()
    began = time.perf_counter()
    for number, seed in enumerate(seeds, 1):
        if shows_progress:
            _watch(seed)
        try:
            world = simulate(seed)
        except Exception as e:
            raise Violation(explain(seed, e)) from e
        outcomes.update(f"{world.weather.name}: {client.outcome}" for client in world.clients)
        outcomes["events"] += world.clock.num_events
        outcomes["supervised seeds"] += world.is_supervised
        if shows_progress and number % 1000 == 0:
            print(f"{number} seeds in {time.perf_counter() - began:.0f} s", flush=True)
    return outcomes


def _watch(seed: int) -> None:
    """End the process with its stack, should `seed` run for longer than LONGEST_S."""

    def end(_: int, frame: FrameType | None) -> None:
        traceback.print_stack(frame, file=sys.stdout)
        print(f"seed {seed} loops for {LONGEST_S} s", flush=True)
        os._exit(1)

    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)


def explain(seed: int, error: Exception) -> str:
    """The schedule that led to `error`: the same seed again, this time noting what happens."""
    world = World(seed, trace=True)
    try:
        world.run()
        check_end(world)
        again = "it did not fail again: something is not decided by the seed"
    except Exception as e:
        again = "".join(traceback.format_exception_only(e)).strip()
    lines = world.schedule[-SHOWN:]
    plan = f"{world.weather.name}; {len(world.clients)} requests; workers {', '.join(world.workers)}"
    return "\n".join(
        [
            f"seed {seed} ({plan}): {type(error).__name__}: {error}",
            *lines,
            f"then: {again}",
            f"again: make soak START={seed} SEEDS=1",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    args = parser.parse_args()
    gc.freeze()
    gc.set_threshold(20_000)  # looked for more often, it costs a tenth of the time
    began = time.perf_counter()
    try:
        outcomes = soak(range(args.start, args.start + args.seeds), shows_progress=True)
    except Violation as e:
        print(e)
        return 1
    elapsed = time.perf_counter() - began
    print(f"{args.seeds} seeds held ({elapsed / args.seeds * 1000:.1f} ms each)")
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8} {outcome}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
