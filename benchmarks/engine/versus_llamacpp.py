"""Our engine's steps beside llama.cpp's, on the same checkpoint and the same cores, in turn.

    python -m benchmarks.engine.versus_llamacpp --llamacpp ENV --model DIR [--quantize int8] [--repeat 5] [--json FILE]

ENV is a virtual environment that holds llama-cpp-python built for this machine, and gguf:

    python3 -m venv ENV && ENV/bin/pip install llama-cpp-python gguf

DIR is a Llama checkpoint in bfloat16 (Hugging Face); it is written as GGUF beside its own files, once. decode-1: the
median step of one sequence, context 192, greedy; prefill-512: the time to the first token of 512. Each alternation is a
process of each side. With `--quantize`, ours rounds the checkpoint at load, and llama.cpp's own tool makes Q8_0 or Q4_0
of it: 8.5 and 4.5 bits a weight. A ratio is the median over the alternations, above 1 where Diptych is faster.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .engine import LOADS

HERE = Path(__file__).parent
WORKLOADS = ("decode-1", "prefill-512")
RUNS = 3  # in a process
TYPES = {None: "bfloat16", "int8": "Q8_0", "int4": "Q4_0"}  # llama.cpp's, by `--quantize`


@dataclass(frozen=True)
class Row:
    workload: str
    ours_ms: Sequence[float]
    theirs_ms: Sequence[float]

    @property
    def ratio(self) -> float:
        return statistics.median(b / a for a, b in zip(self.ours_ms, self.theirs_ms, strict=True))

    def show(self) -> None:
        ours, theirs = statistics.median(self.ours_ms), statistics.median(self.theirs_ms)
        print(f"{self.workload:<12} {ours:9.2f} ms {1e3 / ours:8.1f}/s {theirs:9.2f} ms {1e3 / theirs:8.1f}/s", end="")
        print(f" {self.ratio:6.2f}", flush=True)


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=False, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed: {done.stderr[-2000:]}")
    return done.stdout


def ours(name: str, args: argparse.Namespace) -> float:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.engine.engine", "--model", str(args.model), "--workload", name]
        command += ["--repeat", str(RUNS), "--threads", str(args.threads), "--roofline-seconds", "0"]
        command += ["--quantize", args.quantize] if args.quantize else []
        run([*command, "--json", file.name])
        return json.load(file)[0]["ours_ms"]


def theirs(name: str, args: argparse.Namespace) -> float:
    load = LOADS[name]
    script = [
        str(args.llamacpp / "bin" / "python"),
        str(HERE / "llamacpp_steps.py"),
        str(args.model),
        TYPES[args.quantize],
    ]
    output = run([*script, *map(str, (args.threads, RUNS, load.num_prompt, load.num_new))])
    return json.loads(output.splitlines()[-1])["first_ms" if load.is_prefill else "step_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamacpp", type=Path, required=True, help="virtual environment with llama-cpp-python")
    parser.add_argument("--model", type=Path, required=True, help="Llama checkpoint in bfloat16")
    parser.add_argument("--quantize", choices=[name for name in TYPES if name])
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=5, help="alternations")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # what runs ends with this process
    kinds = f"{args.quantize} and {TYPES[args.quantize]}" if args.quantize else "bfloat16"
    print(f"{args.model.name}, {kinds}, {args.threads} threads, {args.repeat} alternations: diptych, llama.cpp, ratio")
    rows: list[Row] = []
    for name in args.workload or WORKLOADS:
        pairs = [(ours(name, args), theirs(name, args)) for _ in range(args.repeat)]
        a, b = zip(*pairs, strict=True)
        rows.append(Row(name, a, b))
        rows[-1].show()
    if args.json:
        args.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2))


if __name__ == "__main__":
    main()
