"""Steps of a worker of several ranks beside those of one process with as many threads, and what of them is waiting.

    python -m benchmarks.engine.tensor_parallel --model DIR [--ranks 2] [--dtype bfloat16] [--workload decode-1 ...]

For each workload of engine.py: the median step of one process with that many threads, of as many ranks with a thread
each, and their ratio; and of the ranks' steps, as rank 0 sees them, the share of time in each kind of call that they
make to one another, in which whoever comes first waits for the others.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.workers.common.cores import bind_this_thread, usable_cores
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.server.worker import load_runner

from .engine import LOADS, Load, ours, prompts

if TYPE_CHECKING:
    from diptych.workers.core.runner import Runner

CALLS = ("all_reduce", "gather", "broadcast")
MAX_CONTEXT = 2048


class Spent:
    """Seconds in each of CALLS of this process, from here on."""

    def __init__(self) -> None:
        from diptych.workers.parallel.groups import (
            GlooGroup,  # and torch, once a runner has settled how its threads wait
        )

        self.seconds: defaultdict[str, float] = defaultdict(float)
        for name in CALLS:
            setattr(GlooGroup, name, self._timed(name, getattr(GlooGroup, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed


@dataclass(frozen=True)
class Timing:
    step_s: float  # median
    shares: dict[str, float]  # of the time of all steps, by call


def load(args: argparse.Namespace, num_ranks: int, num_threads: int, usable: tuple[int, ...]) -> "Runner":
    bind_this_thread(usable)  # again to all: ranks and gloo's threads start where this one may run
    cores = usable[:num_threads]
    config = WorkerConfig.of(
        str(args.model),
        dtype=args.dtype,
        threads=num_threads,
        cores=cores if len(cores) == num_threads else None,
        max_context_tokens=MAX_CONTEXT,
        kv_memory_bytes=1 << 30,
        tensor_parallel=num_ranks,
        prefix_cache=False,
    )
    runner = load_runner(config, lambda _: None)
    bind_this_thread(config.cores and config.cores[: num_threads // num_ranks])
    return runner


def measure(runner: "Runner", of: Load, spent: Spent, repeat: int) -> Timing:
    engine = Engine(runner, WorkerConfig.of("any").device_scheduler, prefix_cache=False)
    steps: list[float] = []
    total = 0.0
    for i in range(-1, repeat):  # the first round warms up
        if i == 0:
            spent.seconds.clear()
        batch = prompts(of, runner.info.vocab_size, seed=i + 1)
        start = time.perf_counter()
        first_s, step_s = ours(engine, batch, of.num_new, temperature=0.0)
        if i >= 0:
            steps.append(first_s if of.is_prefill else step_s)
            total += time.perf_counter() - start
    return Timing(statistics.median(steps), {name: spent.seconds[name] / total for name in CALLS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workload", nargs="*", choices=[*LOADS], default=[*LOADS])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    spent: Spent | None = None
    usable = usable_cores()
    found: dict[int, dict[str, Timing]] = {}
    for num_ranks in (1, args.ranks):
        runner = load(args, num_ranks, args.ranks, usable)
        spent = spent or Spent()
        found[num_ranks] = {name: measure(runner, LOADS[name], spent, args.repeat) for name in args.workload}
        runner.close()
    print(f"{args.model.name}, {args.dtype}: 1 process of {args.ranks} threads, {args.ranks} ranks of 1")
    print(f"{'workload':<12} {'1 ms':>8} {f'{args.ranks} ms':>8} {'ratio':>6} " + " ".join(f"{n:>10}" for n in CALLS))
    for name in args.workload:
        one, several = found[1][name], found[args.ranks][name]
        shares = " ".join(f"{several.shares[call]:10.1%}" for call in CALLS)
        ratio = several.step_s / one.step_s
        print(f"{name:<12} {1e3 * one.step_s:8.2f} {1e3 * several.step_s:8.2f} {ratio:6.2f} {shares}")


if __name__ == "__main__":
    main()
