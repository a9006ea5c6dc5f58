"""Our linear layers against oneDNN's with prepacked weights, and both against what the machine can do.

    python -m benchmarks.kernels.linear [--shape 3072x576 ...] [--rows 1 16 512] [--format plain int8 int4 mxfp4]
        [--threads 2] [--pad 64] [--seconds 1] [--bandwidth GB/s] [--gflops GFLOP/s] [--json FILE]

Each product reads weights that no cache holds: copies take turns. Ours and oneDNN's alternate; a figure is the mean of
the copies' best times. `limit` is the time that reading the weights or multiplying them takes at least, by the rates
given (roofline.py measures them); x is oneDNN's time, in bfloat16, over ours in `format`. `error` is the
relative L2 distance of the product from that of the weights as they were before they were quantised.
"""

import argparse
import json
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_PROC_BIND", "close")
os.environ.setdefault("OMP_PLACES", "cores")
CORES = sorted(os.sched_getaffinity(0))  # before torch binds this thread to one of them

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from diptych.kernels.cpu.formats import AT_LOAD, Format, NumberLayout, group_of  # noqa: E402
from diptych.kernels.cpu.library import Team  # noqa: E402
from diptych.kernels.cpu.linear import PackedLinear, linear, pack, pack_numbers, packed_bytes  # noqa: E402
from diptych.workers.models.rounding.stored import numbers_of  # noqa: E402

from ..common.compiled import compiled_team  # noqa: E402

FORMATS = {format.name.lower(): format for format in AT_LOAD} | {"mxfp4": Format.TABLE4}
SHAPES = ["960x576", "576x576", "3072x576", "576x1536", "49152x576"]
COLD_BYTES = 300_000_000  # several times the largest cache


def main() -> None:
    args = parse()
    team = compiled_team(args.threads, CORES)
    found = [
        measure(args, team, shape, name, num_rows)
        for shape in args.shape
        for name in args.format
        for num_rows in args.rows
    ]
    team.close()
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 32, 128, 512])
    parser.add_argument("--format", nargs="+", choices=list(FORMATS), default=["plain"])
    parser.add_argument("--pad", type=int, default=0, help="bytes between the rows of our inputs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--bandwidth", type=float, default=43.0)
    parser.add_argument("--gflops", type=float, default=870.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(args: argparse.Namespace, team: Team, shape: str, name: str, num_rows: int) -> dict[str, object]:
    (n, k), format = map(int, shape.split("x")), FORMATS[name]
    num_bytes = packed_bytes(n, k, torch.bfloat16, format)
    num_copies = max(1, COLD_BYTES // num_bytes)
    weight = torch.randn(n, k).bfloat16()
    ours = [packed(team, weight, format) for _ in range(num_copies)]
    theirs = [
        torch.ops.mkldnn._reorder_linear_weight(weight, num_rows) for _ in range(max(1, COLD_BYTES // (2 * n * k)))
    ]
    x, out = torch.randn(num_rows, k).bfloat16(), torch.empty(num_rows, n, dtype=torch.bfloat16)
    padded = torch.empty(num_rows, k + args.pad // x.element_size(), dtype=x.dtype)[:, :k].copy_(x)
    calls: list[list[Callable[[], object]]] = [
        [lambda w=w: linear(team, padded, w, out=out) for w in ours],
        [lambda w=w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "") for w in theirs],
    ]
    our_s, their_s = best_of(calls, args.seconds)
    exact = x.float() @ weight.float().T
    error = float((linear(team, x, ours[0], out=torch.empty(num_rows, n)) - exact).norm() / exact.norm())
    limit_s = max(num_bytes / args.bandwidth, 2 * num_rows * n * k / args.gflops) / 1e9
    print(
        f"{shape:>10} {name:5} rows {num_rows:4}: {our_s * 1e6:8.1f} us "
        f"{2 * num_rows * n * k / our_s / 1e9:6.0f} GFLOP/s {num_bytes / our_s / 1e9:5.1f} GB/s, "
        f"{limit_s / our_s:4.0%} of the limit | oneDNN {their_s * 1e6:8.1f} us | x{their_s / our_s:.2f} | {error:.5f}",
        flush=True,
    )
    return {
        "shape": shape,
        "format": name,
        "rows": num_rows,
        "ours_s": our_s,
        "onednn_s": their_s,
        "limit_s": limit_s,
        "error": error,
    }


def packed(team: Team, weight: Tensor, format: Format) -> PackedLinear:
    if format in AT_LOAD:
        return pack(team, [weight], format=format, take=in_huge_pages)
    layout = NumberLayout(format, group_of(format, weight.shape[1]))
    return pack_numbers(team, [numbers_of(weight, format)], layout, weight.dtype, take=in_huge_pages)


def best_of(calls: list[list[Callable[[], object]]], seconds: float) -> list[float]:
    """Return, for each list, the mean of its calls' shortest times; the lists take turns for `seconds` in all."""
    best = [[float("inf")] * len(turn) for turn in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, turn in enumerate(calls):
            for j, call in enumerate(turn):
                start = time.perf_counter()
                call()
                best[i][j] = min(best[i][j], time.perf_counter() - start)
    return [sum(times) / len(times) for times in best]


def in_huge_pages(num_bytes: int) -> Tensor:
    huge = 2 << 20
    mapping = mmap.mmap(-1, -(-num_bytes // huge) * huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


if __name__ == "__main__":
    torch.inference_mode()(main)()
