"""One launch of every kernel, small, each in a process of its own: one that crashes or hangs costs only itself.

    KERNEL_CASES=small python -m benchmarks.gpu.report.launches [--at-once 8] [--seconds 60] [--seconds-each 60]

The cases are those of kernel_cases/; results are held against the references. Processes are forked from one that has
imported torch, triton and the kernels, and has not touched the GPU.
"""

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection

from ..kernel_bench.results import Result
from .rows import put

Named = tuple[str, str, str]  # group, kernel and shape of a case


def found_cases() -> tuple[list[tuple[int, Named]], list[Result]]:
    """Number in its group and names of each case; and a Result for each group whose cases cannot be made."""
    from ..kernel_bench.runner import cases_of, groups, told

    found, broken = list[tuple[int, Named]](), list[Result]()
    for group in groups():
        try:
            found += [(n, (group, case.kernel, case.shape)) for n, case in enumerate(cases_of(group))]
        except Exception as e:  # noqa: BLE001 (a file of cases that cannot be imported: the others can)
            broken.append(Result(group, "all", "", problem=told(e)))
    return found, broken


def launch(pipe: Connection, number: int, group: str) -> None:
    """Send the Result of a case. The work of a process."""
    from ..kernel_bench.runner import cases_of, result_of

    pipe.send(result_of(group, replace(cases_of(group)[number], peers={}), None, None))


def outcome(number: int, named: Named, deadline: float, seconds_each: float) -> Result:
    """Run a case in a process, and return its Result, or one that says how the process ended."""
    left = min(deadline - time.monotonic(), seconds_each)
    if left <= 0:
        return Result(*named, problem="not run: no time was left")
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=launch, args=(theirs, number, named[0]), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(left):
            return Result(*named, problem=f"not done in {left:.0f} s")
        return ours.recv()
    except EOFError:
        process.join()
        return Result(*named, problem=f"its process ended (exit status {process.exitcode})")
    finally:
        process.kill()
        process.join()
        ours.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0, help="in all")
    parser.add_argument("--seconds-each", type=float, default=60.0)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    cases, broken = found_cases()
    groups = sorted({group for _, (group, _, _) in cases})
    preloaded = [
        "triton",
        "benchmarks.gpu.kernel_bench.runner",
        *(f"benchmarks.gpu.kernel_cases.{of}" for of in groups),
    ]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)

    def told(result: Result, seconds: float = 0.0) -> bool:
        state = result.problem or "right"
        named = {"group": result.group, "kernel": result.kernel, "shape": result.shape}
        put("launches", **named, state=state, error=result.error, seconds=round(seconds, 1))
        print(f"{result.kernel}, {result.shape}: {state}, {seconds:.1f} s", flush=True)
        return not result.problem

    def one(item: tuple[int, Named]) -> bool:
        began = time.monotonic()
        result = outcome(*item, deadline, options.seconds_each)
        return told(result, time.monotonic() - began)

    with ThreadPoolExecutor(max(options.at_once, 1)) as pool:
        found = [*map(told, broken), *pool.map(one, cases)]
    print(f"{sum(found)} of {len(found)} launches are right")
    return 0 if found and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
