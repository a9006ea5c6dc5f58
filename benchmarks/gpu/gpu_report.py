"""All that a GPU can tell in ten minutes, as one report; no part can empty it.

    python -m benchmarks.gpu.gpu_report [--budget 560] [--only PART ...] [--jobs PATTERN ...] [--out DIR]

Parts come in the order of what is worth most (report/parts.py says what each is):

    discover   engine   exact   handoff   kernels   peers   tests        and, where it is asked for: sanitize

Each is a few processes, so what fails, hangs or is killed costs only itself. A part has its share of the time, and what
those before it have left. Whatever is found is a line of figures.jsonl at once; report.md, report.json and log.txt (all
output) are written anew whenever a process has ended, and say what was skipped and for want of what. This process
imports neither torch nor anything else that may be missing. diptych need not be installed.

`--device fake` runs every part on the CPU, tiny, in a minute: for tests of the report; no figure means anything.

Exit status 1: something failed.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

from .report import rows
from .report.facts import output_of
from .report.jobs import Job, Outcome, run_all
from .report.page import FAKE, Part, as_json, is_well, log, markdown
from .report.parts import ON_REQUEST, PARTS, ROOT, TESTED, Planned, Setup, ends, importable, missing, not_served, plan

NO_GPU = "This measures a GPU, and torch sees none here."
SEES_GPU = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"


class Report:
    """A report that is being made, in the folder `out`."""

    def __init__(self, out: Path, names: Sequence[str], setup: Setup, patterns: Sequence[str] = ("*",)) -> None:
        """patterns: of the names of jobs."""
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.setup, self._patterns = out, setup, patterns
        self.file = out / "figures.jsonl"
        self.file.unlink(missing_ok=True)
        self.parts = [Part(name) for name in names]
        self.facts = facts(setup)
        self._lock = threading.Lock()  # jobs end on several threads
        self._running: dict[str, int] = {}  # processes, by job
        self._is_stopped = False

    def run(self, start: float, budget: float) -> None:
        """Run the parts, each until its share of so many seconds from `start` on is over."""
        shares = ends([part.name for part in self.parts])
        self.write()
        for part in self.parts:
            begun = time.monotonic()
            try:
                planned = self._planned(part.name)
            except Exception as e:  # noqa: BLE001 (whatever is wrong with one part, the others follow)
                planned = f"not run: {type(e).__name__}: {e}"
            if isinstance(planned, str):
                part.why = planned
                rows.append(self.file, {"part": part.name, "kind": rows.SKIPPED, "what": part.name, "why": planned})
            else:
                jobs, at_once = planned
                self._run(part, jobs, start + shares[part.name] * budget, at_once)
            part.seconds = time.monotonic() - begun
            print(f"{part.name}: {part.status}, {part.seconds:.0f} s", flush=True)
            self.write()

    def stop(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """End what runs; nothing else is begun."""
        self._is_stopped = True
        for process in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)

    def write(self) -> None:
        """Write the report of what is there."""
        with self._lock:
            found = rows.read(self.file)
            for row in found:
                if row.get("kind") == rows.FACT:
                    self.facts[str(row.get("name"))] = str(row.get("value"))
            rows.replace_file(self.out / "report.md", markdown(self.facts, self.parts, found))
            told = json.dumps(as_json(self.facts, self.parts, found), indent=1)
            rows.replace_file(self.out / "report.json", told)
            rows.replace_file(self.out / "log.txt", log(self.parts))

    @property
    def is_well(self) -> bool:
        return is_well(self.parts, rows.read(self.file)) and not self._is_stopped

    def _planned(self, part: str) -> Planned | str:
        planned = plan(part, self.setup)
        if isinstance(planned, str):
            return planned
        jobs = [job for job in planned[0] if any(fnmatch(job.name, pattern) for pattern in self._patterns)]
        return (jobs, planned[1]) if jobs else "skipped: none of its jobs was asked for"

    def _run(self, part: Part, jobs: Sequence[Job], deadline: float, at_once: int) -> None:
        def begun(job: Job, process: int) -> None:
            self._running[job.name] = process
            if self._is_stopped:
                self.stop()
            print(f"{part.name}: {job.name} is process {process}", flush=True)

        def done(outcome: Outcome) -> None:
            self._running.pop(outcome.name, None)
            with self._lock:
                part.outcomes.append(outcome)
            self.write()

        own = [self._prepared(part.name, job) for job in jobs]
        run_all(own, deadline, ROOT, at_once, begun, done, lambda: not self._is_stopped)

    def _prepared(self, part: str, job: Job) -> Job:
        """The same job, with what it needs to find our modules and to write rows."""
        told = rows.environment(self.file, part, job.name)
        return replace(job, environment={**self.setup.environment, **told, **job.environment})


def facts(setup: Setup) -> dict[str, str]:
    """Return what is known without torch; the part `discover` finds the rest."""
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "host": f"{platform.platform()}, {os.cpu_count()} cores",
        "commit": output_of("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "command": " ".join(sys.argv),
    }
    if setup.is_fake:
        found["device"] = FAKE
    if lacking := not_served():
        found["tests of workers that serve"] = f"not run: without {', '.join(lacking)}"
    if lacking := missing(TESTED):
        found["tests of the engine"] = f"fail: without {', '.join(lacking)}"
    return found


def sees_gpu(environment: Mapping[str, str]) -> bool:
    """Return False only where torch says that there is none: whatever else goes wrong, the report will tell."""
    try:
        done = subprocess.run(
            (sys.executable, "-c", SEES_GPU), env={**os.environ, **environment}, check=False, timeout=60
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", "--seconds", type=float, default=560.0, help="seconds, in all")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--jobs", nargs="+", default=["*"], metavar="PATTERN", help='of the parts: "8b, KV*"')
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="a folder")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--at-once", type=int, default=min(8, max((os.cpu_count() or 2) // 2, 1)), help="processes")
    return parser.parse_args()


def main() -> int:
    start, options = time.monotonic(), arguments()
    names = [name for name in PARTS if name in (options.only or set(PARTS) - set(ON_REQUEST))]
    is_fake = options.device == "fake"
    with tempfile.TemporaryDirectory() as folder:
        environment = importable(Path(folder))
        if not is_fake and not sees_gpu(environment):
            print(NO_GPU, file=sys.stderr)
            return 1
        report = Report(options.out.resolve(), names, Setup(is_fake, options.at_once, environment), options.jobs)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, report.stop)
        report.run(start, options.budget)
    print(f"written: {report.out / 'report.md'}")
    return 0 if report.is_well else 1


if __name__ == "__main__":
    sys.exit(main())
