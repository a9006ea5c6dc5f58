"""Triton kernels beside a GPU's limits and torch's own.

    python -m benchmarks.gpu.kernels [--only PATTERN] [--json FILE]

First what the GPU reaches here: bytes a second of a copy, read and written, and bf16 FLOP/s of a matrix product. Then
each case of kernel_cases/: its result held against a reference; the median time of a call in a replayed CUDA graph of
many, with random data, over inputs that together are larger than the L2; its share of the limit (of both, the one that
allows less; fp8 and int8 too are held against bf16); how many times as fast it is as what torch offers; and whether the
goals are met. A wrong result has no figure. Cases run in a process of their own, which is started again after a case
that has ended it. Needs torch, triton and numpy.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from .kernel_bench import runner, supervisor
from .kernel_bench.results import HEAD, Limits, Result, line, row, summary
from .report.rows import put


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", metavar="PATTERN", nargs="+", default=["*"], help="groups or kernels: 'moe' '*decode*'"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was found there too")
    parser.add_argument("--check", action="store_true", help="results alone, no times (TRITON_INTERPRET=1: small ones)")
    parser.add_argument("--peers", choices=runner.PEERS, default="all", help="slow: those that have to be compiled")
    parser.add_argument("--list", action="store_true", help="list the groups")
    parser.add_argument("--seconds", type=float, default=3600.0, help="in all: cases beyond them are left out")
    parser.add_argument("--seconds-each", type=float, default=120.0, help="of a case, what it compiles included")
    return parser.parse_args()


def device() -> dict[str, str]:
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: kernels are interpreted"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}


def main() -> int:
    options = arguments()
    if options.list:
        print(*runner.groups(), sep="\n")
        return 0
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not (is_interpreted and options.check):
        print("This measures kernels on a GPU, and torch sees none here.", file=sys.stderr)
        return 1

    def start(limits: Limits | None, first: int) -> supervisor.Worker:
        return supervisor.Process(runner.work, options.only, not options.check, limits, first, options.peers)

    limits: Limits | None = None
    results: list[Result] = []
    print(", ".join(f"{key} {value}" for key, value in device().items()))
    for found in supervisor.run(start, options.seconds, options.seconds_each):
        if isinstance(found, Limits):
            limits = found
            copied, multiplied = limits.bytes_per_s / 1e12, limits.flops_per_s / 1e12
            print(f"copy: {copied:.2f} TB/s; bf16 product of {runner.MATRIX}: {multiplied:.0f} TFLOP/s\n")
            put("limits", **{"copy, TB/s": copied, "bf16 product, TFLOP/s": multiplied})
            continue
        if not results:
            print(HEAD)
        results.append(found)
        print(line(found), flush=True)
        put("kernels", **row(found))
    print("", *summary(results), sep="\n")
    if options.json is not None:
        written = {
            **device(),
            "limits": None if limits is None else vars(limits),
            "results": [result.as_json() for result in results],
        }
        options.json.write_text(json.dumps(written, indent=1))
    return 0 if results and all(result.is_well for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
