"""The process that runs cases: it holds each result against its reference, and times it. It may be ended by a case."""

import fnmatch
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..kernel_cases.common import DEVICE, Case, error, poisoned
from .results import Limits, Result, Verdict, figure_of, one_line, share_of
from .timing import Clock, CudaClock, Timing, num_sets, time_calls

CASES = Path(__file__).parent.parent / "kernel_cases"
COPIED_BYTES = 1 << 30
MATRIX = 8192
PEERS = ("all", "quick", "slow", "none")  # slow: what has to be compiled first


def groups() -> list[str]:
    return sorted(p.stem for p in CASES.glob("*.py") if p.stem != "common")


def cases_of(group: str) -> list[Case]:
    importlib.import_module("triton")  # before any kernel: see kernels/common/lang.py
    return list(importlib.import_module(f"..kernel_cases.{group}", __package__).cases())


def chosen(only: list[str], peers: str = "all") -> Iterator[tuple[str, Case]]:
    """Each case of a group, or of a kernel, that one of the patterns names, in the same order each time. peers: one of
    PEERS; with "slow" only cases that have such ones."""
    for group in groups():
        for case in cases_of(group):
            if any(fnmatch.fnmatch(name, pattern) for name in (group, case.kernel) for pattern in only):
                beside = {name: peer for name, peer in case.peers.items() if _is_wanted(name, peers)}
                if beside or peers != "slow":
                    yield group, replace(case, peers=beside)


def _is_wanted(peer: str, peers: str) -> bool:
    return peers == "all" or (peers != "none" and ("compile" in peer) == (peers == "slow"))


def work(
    pipe: Connection, only: list[str], is_timed: bool, limits: Limits | None, first: int, peers: str = "all"
) -> None:
    """Sends the limits (where it has to find them), then of the chosen cases from `first` on: (its number, group,
    kernel, shape), and when it is done its Result. Ends early where a case has left the device unusable."""
    clock = CudaClock() if is_timed else None
    if clock is not None and limits is None:
        limits = find_limits(clock)
        pipe.send(limits)
    for number, (group, case) in enumerate(chosen(only, peers)):
        if number >= first:
            pipe.send((number, group, case.kernel, case.shape))
            pipe.send(result_of(group, case, clock, limits))
            if not is_usable():
                return


def find_limits(clock: Clock) -> Limits:
    source = torch.randn(COPIED_BYTES // 2, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    # Not copy_: in a graph that is a node of its own kind, which an H200 carries out at two thirds of the rate.
    copying = time_calls([lambda: torch.neg(source, out=target)], clock).median
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return Limits(2 * COPIED_BYTES / copying, 2 * MATRIX**3 / time_calls([lambda: a @ b], clock).median)


def is_usable() -> bool:
    """A fault on a GPU stays: whatever is asked of it from then on fails."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def result_of(group: str, case: Case, clock: Clock | None, limits: Limits | None) -> Result:
    """Check a case's result, and time it where there is a clock."""
    what: dict[str, Any] = {
        "group": group,
        "kernel": case.kernel,
        "shape": case.shape,
        "num_bytes": case.num_bytes,
        "num_flops": case.num_flops,
        "tolerance": case.tolerance,
    }
    try:
        if "torch._dynamo" in sys.modules:  # it gives up what it has compiled anew, for other shapes, too often
            torch.compiler.reset()
        what["error"], problems = check(case)
        if not what["error"] <= case.tolerance:
            return Result(**what, problem=f"wrong: error {what['error']:.1e}, {case.tolerance:.0e} is allowed")
        if clock is None or limits is None:
            return Result(**what, problems=problems)
        return timed(case, what, problems, clock, limits)
    except Exception as problem:  # noqa: BLE001 (the top loop of a process: other cases shall have their figures)
        return Result(**what, problem=told(problem))


def told(problem: Exception) -> str:
    return one_line(f"{type(problem).__name__}: {problem}", 400)


def check(case: Case) -> tuple[float, dict[str, str]]:
    """(error of the kernel's result, the peers that give something else or nothing, and why)."""
    with poisoned():
        found = case.run(case.make(0))
    expected = case.reference(case.make(0), found)
    problems: dict[str, str] = {}
    for name, peer in case.peers.items():
        try:
            theirs = peer(case.make(0))
        except Exception as problem:
            if not is_usable():
                raise
            problems[name] = told(problem)
            continue
        if name not in case.unlike and not (apart := error(theirs, expected)) <= case.tolerance:
            problems[name] = f"gives something else: error {apart:.1e}"
    return error(found, expected), problems


def timed(case: Case, what: dict[str, Any], problems: dict[str, str], clock: Clock, limits: Limits) -> Result:
    sets = [case.make(seed) for seed in range(num_sets(case.num_bytes))]

    def timing_of(run: Any) -> Timing:
        return time_calls([lambda x=x: run(x) for x in sets], clock)

    ours = timing_of(case.run)
    times: dict[str, float] = {}
    for name, peer in case.peers.items():
        if name not in problems:
            try:
                times[name] = timing_of(peer).median / ours.median
            except Exception as problem:
                if not is_usable():
                    raise
                problems[name] = told(problem)
    verdicts = tuple(
        Verdict(g.of, g.least, g.aim, figure_of(g.of, ours.median, case.num_bytes, case.num_flops, times, limits))
        for g in case.goals
    )
    return Result(
        **what,
        seconds=ours.median,
        spread=(ours.low, ours.high),
        share=share_of(ours.median, case.num_bytes, case.num_flops, limits),
        times=times,
        problems=problems,
        verdicts=verdicts,
    )
