"""Jobs of a report: commands, each in a process group of its own that a deadline interrupts, then ends.

What is cut off gets SIGINT first: pytest then says what it has found so far, Python cleans up. SIGKILL follows where
that does not help within GRACE_S. Knows no torch.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE_S = 6.0
EARLIER_S = 2.0  # by which a job that knows its time ends before it is interrupted
SECONDS = "{seconds}"  # in a command: how long it may take


@dataclass(frozen=True)
class Job:
    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # beside this process's own
    weight: float = 1.0  # its share of its part's time, beside those of the jobs that follow it
    limit_s: float = 3600.0


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str  # "passed", "failed (exit status 1)", "cut off after 30 s", "killed by SIGSEGV", "not run: ..."
    seconds: float = 0.0
    output: str = ""  # stdout and stderr together
    command: str = ""

    @property
    def has_passed(self) -> bool:
        return self.status == "passed"


def run(
    job: Job,
    deadline: float,
    folder: Path,
    now: Callable[[], float] = time.monotonic,
    begun: Callable[[int], object] = lambda pid: None,
) -> Outcome:
    """deadline: by `now`. begun: told the job's process. Ends everything that the job has started, when it ends and
    when it is cut off."""
    start = now()
    deadline = min(deadline, start + job.limit_s)
    if start >= deadline:
        return Outcome(job.name, "not run: no time was left", command=" ".join(job.argv))
    argv = [each.replace(SECONDS, f"{max(deadline - start - GRACE_S - EARLIER_S, 1):.0f}") for each in job.argv]
    written = " ".join([*(f"{key}={value}" for key, value in job.environment.items()), *argv])
    with tempfile.TemporaryFile() as output:  # no pipe: what outlives the job could hold that open
        try:
            process = subprocess.Popen(
                argv,
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **job.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as e:
            return Outcome(job.name, f"not run: {e}", command=written)
        begun(process.pid)
        try:
            status = _waited(process, start, deadline, now)
        finally:
            _signal(process, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Outcome(job.name, status, now() - start, output.read().decode(errors="replace"), written)


def _waited(process: "subprocess.Popen[Any]", start: float, deadline: float, now: Callable[[], float]) -> str:
    grace = min(GRACE_S, (deadline - start) / 4)
    try:
        return _status(process.wait(deadline - start - grace))
    except subprocess.TimeoutExpired:
        interrupt(process, max(deadline - now(), 0.1))
    return f"cut off after {now() - start:.0f} s"


def interrupt(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """Ask a process group to end, and wait so long for it."""
    _signal(process, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)


def _status(code: int) -> str:
    if code >= 0:
        return "passed" if code == 0 else f"failed (exit status {code})"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _signal(process: "subprocess.Popen[Any]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def run_all(
    jobs: Sequence[Job],
    deadline: float,
    folder: Path,
    at_once: int,
    begun: Callable[[Job, int], object] = lambda job, pid: None,
    done: Callable[[Outcome], object] = lambda outcome: None,
    may_start: Callable[[], bool] = lambda: True,
) -> list[Outcome]:
    """Run the jobs in their order, `at_once` at a time; return their outcomes in the same order. Where they run one by
    one, each may take its share of the time that is left. begun, done: told each job's process and outcome, on any
    thread. may_start: asked before each job."""

    def one(index: int) -> Outcome:
        job, left = jobs[index], sum(each.weight for each in jobs[index:])
        now = time.monotonic()
        end = now + (deadline - now) * job.weight / left if at_once == 1 else deadline
        if may_start():
            outcome = run(job, end, folder, begun=lambda pid: begun(job, pid))
        else:
            outcome = Outcome(job.name, "not run: the report was ended")
        done(outcome)
        return outcome

    with ThreadPoolExecutor(max(at_once, 1)) as pool:
        return list(pool.map(one, range(len(jobs))))
