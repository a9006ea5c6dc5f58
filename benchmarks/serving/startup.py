"""Measures a start from `diptych serve` to the first token, phase by phase, and the cost of the cluster while it is
idle.

    python -m benchmarks.serving.startup [--model DIR] [--repeat 3] [--idle 0] [--json FILE] [-- more flags of serve]

The checkpoint is read once before, so that its pages are in memory. A request of one token is sent once the banner
is there. Times are seconds since the command was started; CPU is of each process until the first token, and with --idle
in per cent of a core over so many seconds afterwards.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

import psutil

from ..common.cpu_time import process_s

TINY = Path(__file__).parents[2] / "examples" / "tiny"
PHASES = (
    ("settings", "checked the settings"),
    ("Ray", "Ray runs"),
    ("workers and routers", "are ready"),
    ("banner", "Watch it"),
)


class Serving:
    """`diptych serve`, until `end`. `reached`: seconds by phase."""

    def __init__(self, model: Path, home: str, flags: list[str]) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "DIPTYCH_", "OMP_"))}
        command = [sys.executable, "-m", "diptych.cluster.cli.main", "serve", str(model), "--http-port", "0"]
        self.reached: dict[str, float] = {}
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [*command, "--grpc-port", "0", *flags],
            env=kept | {"DIPTYCH_HOME": home, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until_first_token(self) -> None:
        assert self._process.stdout is not None
        output: list[str] = []
        for line in self._process.stdout:
            output.append(line)
            for phase, mark in PHASES:
                if mark in line:
                    self._reach(phase)
            if "banner" in self.reached:
                break
        found = re.search(r"HTTP (http\S+)/v1", "".join(output))
        if found is None:
            sys.exit("".join(output))
        url = found[1]
        name = json.load(urlopen(f"{url}/v1/models"))["data"][0]["id"]
        body = json.dumps({"model": name, "prompt": "Once upon a time", "max_tokens": 1}).encode()
        urlopen(Request(f"{url}/v1/completions", body, {"content-type": "application/json"})).read()
        self._reach("first token")

    def _reach(self, phase: str) -> None:
        self.reached[phase] = time.monotonic() - self._began

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process."""
        command = psutil.Process(self._process.pid)
        found: dict[str, float] = {}
        for process in [command, *command.children(recursive=True)]:
            found[f"{process.pid} {_name(process)}"] = process_s(process.pid)
        return found

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def _name(process: psutil.Process) -> str:
    line = process.cmdline()
    actor = re.search(r"ray::(\w+)", " ".join(line))
    if actor:
        return actor[1]
    named = next((part for part in line if part.endswith(".py") or part.startswith("diptych.")), line[0])
    return named.rpartition("/")[2]


def run(model: Path, flags: list[str], idle_s: float) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Seconds by phase; CPU seconds by process; per cent of a core while idle."""
    with tempfile.TemporaryDirectory() as home:
        serving = Serving(model, home, flags)
        try:
            serving.until_first_token()
            start, idle = serving.cpu_s(), dict[str, float]()
            if idle_s:
                time.sleep(2.0)
                before = serving.cpu_s()
                time.sleep(idle_s)
                after = serving.cpu_s()
                idle = {name: (after[name] - cpu_s) / idle_s * 100 for name, cpu_s in before.items() if name in after}
        finally:
            serving.end()
    return serving.reached, start, idle


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, default=TINY)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--idle", type=float, default=0.0, metavar="SECONDS")
    p.add_argument("--json", type=Path)
    p.add_argument("flags", nargs="*", help="flags for serve, after --  [default: --mixed 1]")
    a = p.parse_args()
    for path in a.model.iterdir():
        path.read_bytes()
    runs = [run(a.model, a.flags or ["--mixed", "1"], a.idle) for _ in range(a.repeat)]
    reached = {phase: [r[0][phase] for r in runs] for phase in runs[0][0]}
    for phase, seconds in reached.items():
        print(f"{phase:20} {min(seconds):6.2f} s at best, median {statistics.median(seconds):6.2f} s")
    _, start, idle = min(runs, key=lambda r: r[0]["first token"])
    print(f"CPU until the first token: {sum(start.values()):.2f} s")
    for name, cpu_s in start.items():
        shown = f"   idle {idle[name]:5.2f} %" if name in idle else ""
        print(f"  {cpu_s:6.2f} s  {name}{shown}")
    if idle:
        print(f"idle: {sum(idle.values()):.2f} % of a core")
    if a.json:
        a.json.write_text(json.dumps({"reached_s": reached, "cpu_s": start, "idle_percent": idle}, indent=2))


if __name__ == "__main__":
    main()
