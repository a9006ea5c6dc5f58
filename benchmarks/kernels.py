"""Triton kernels beside a GPU's limits and torch's own: `python benchmarks/kernels.py [NAME...]`.

First what the GPU reaches here: bytes a second of a copy, read and written, and bf16 FLOP/s of a matrix product. Then
each case of kernel_cases/: the median time of a replayed CUDA graph, with random data and a cold L2 (a buffer larger
than it is written before each); its share of the limit (of both, the one that allows less; fp8 and int8 too are held
against bf16); and how many times as fast it is as what torch offers. Needs torch, triton and numpy.
"""

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from kernel_cases.common import Case

REPEATS = 30
FLUSHED_BYTES = 256 << 20  # more than any L2, and long enough to hide the launch that follows it
COPIED_BYTES = 1 << 30
MATRIX = 8192


def seconds_of(call: Callable[[], object], flushed: torch.Tensor) -> float:
    """The median of REPEATS replays of `call`, after it has run twice (compiled, warm) and been captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for start, end in events:
        flushed.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def limits(flushed: torch.Tensor) -> tuple[float, float]:
    """(bytes a second, bf16 FLOP/s) that torch reaches on this GPU, on random data."""
    source = torch.randn(COPIED_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * COPIED_BYTES / seconds_of(lambda: target.copy_(source), flushed)
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return rate, 2 * MATRIX**3 / seconds_of(lambda: a @ b, flushed)


def row(case: Case, bytes_a_second: float, flops: float, flushed: torch.Tensor) -> str:
    seconds = seconds_of(case.run, flushed)
    least = max(case.num_bytes / bytes_a_second, case.num_flops / flops)
    ratios = [f"{seconds_of(call, flushed) / seconds:.2f} {name}" for name, call in case.against.items()]
    return (
        f"| {case.kernel} | {case.shape} | {seconds * 1e6:.1f} | {case.num_bytes / seconds / 1e12:.2f} "
        f"| {case.num_flops / seconds / 1e12:.0f} | {least / seconds:.0%} | {', '.join(ratios)} |"
    )


def main() -> int:
    names = sorted(p.stem for p in (Path(__file__).parent / "kernel_cases").glob("*.py") if p.stem != "common")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; none: all")
    chosen = parser.parse_args().names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no cases of {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        print("This measures kernels on a GPU, and torch sees none here.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    bytes_a_second, flops = limits(flushed)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"copy: {bytes_a_second / 1e12:.2f} TB/s; bf16 product of {MATRIX}: {flops / 1e12:.0f} TFLOP/s\n")
    print("| kernel | shape | us | TB/s | TFLOP/s | of the limit | times as fast as |\n|---|---|---|---|---|---|---|")
    for name in chosen:
        for case in importlib.import_module(f"kernel_cases.{name}").cases():
            print(row(case, bytes_a_second, flops, flushed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
