"""The engine on one GPU, with random weights of known shapes.

    python -m benchmarks.gpu.engine_gpu [--models 8b 1b v2-lite]

First what the GPU reaches here: bytes a second of a copy, read and written, bf16 FLOP/s of a matrix product, bytes a
second from pinned memory. Then, by a worker's own runner and engine, with CUDA graphs and without:

- decode: the time of a step, by the host's clock, at several batches and contexts; what reading the weights once takes
  at copy bandwidth is a share of it. And the host gap: how long a step leaves the device without work, by events on its
  lanes (gpu_engine/timed.py). Gaps between the kernels of one graph, or of one launched sequence, are not the host's.
- prefill: from the first step of a few prompts to the last of their first tokens.
- serving: requests that all come at once, 1,024 tokens in and as many out.
- memory; and how fast weights are loaded from a file that is in memory.

Needs torch, triton, safetensors, numpy and protobuf. It makes no figures without a GPU.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from diptych.workers.device.cuda_device import CudaDevice

from ..common.roofline import Roofline
from .gpu_engine import measure
from .gpu_engine.limits import link_bytes_s, roofline
from .gpu_engine.loading import loading
from .gpu_engine.models import SHAPES
from .gpu_engine.report import HEAD, Figure
from .gpu_engine.rig import Rig, Settings, make_rig
from .gpu_engine.timed import CudaClock, TimedDevice

NO_GPU = "This measures the engine on a GPU, and torch sees none here."
PARTS = ("decode", "prefill", "serving", "memory")
DECODES = ((1, 1024), (1, 32_768), (16, 1024), (16, 8192), (64, 1024), (64, 4096), (256, 1024))
PROMPTS = ((1, 1024), (8, 1024), (1, 8192))


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Yield the figures in the order in which they are measured."""
    cuda = CudaDevice(torch.device("cuda"))
    limits = roofline()
    link = link_bytes_s(cuda)
    yield Figure("limit", "copy, read and written", limits.read_bytes_s / 1e12, "TB/s")
    yield Figure("limit", "product of bfloat16 matrices", limits.flops / 1e12, "TFLOP/s")
    yield Figure("limit", "copy from pinned memory", link / 1e9, "GB/s")
    yield from loading(cuda, link)
    for has_graphs in (True, False) if options.graphs == "both" else (options.graphs == "yes",):
        for model in options.models:
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()
            device = TimedDevice(CudaDevice(torch.device("cuda")), CudaClock())
            rig = make_rig(SHAPES[model], Settings(cuda_graphs=has_graphs), device)
            gc.collect()
            gc.freeze()  # as a worker does: a full collection would hold steps up
            for figure in _of_model(options, rig, limits):
                yield replace(figure, model=model, graphs=has_graphs)
            rig.runner.close()
            del rig, device


def _of_model(options: argparse.Namespace, rig: Rig, limits: Roofline) -> Iterator[Figure]:
    if "decode" in options.parts:
        for batch, context in DECODES:
            yield from measure.decode(rig, measure.DecodeCase(batch, context), limits)
    if "prefill" in options.parts:
        for num, length in PROMPTS:
            yield from measure.prompts(rig, measure.PromptCase(num, length), limits)
    if "serving" in options.parts:
        yield from measure.serve(rig, measure.ServingCase(options.requests, 1024, 1024), limits)
    if "memory" in options.parts:
        yield from measure.memory(rig)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*SHAPES], default=["8b", "1b", "v2-lite"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--graphs", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--requests", type=int, default=256, help="of serving")
    parser.add_argument("--seconds", type=float, default=3600.0, help="in all: what comes after them is left out")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was found there too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(", ".join(f"{key} {value}" for key, value in machine.items()), "", HEAD, sep="\n")
    found: list[Figure] = []
    end = time.monotonic() + options.seconds
    for figure in figures(options):
        found.append(figure)
        print(figure.line(), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({**machine, "figures": [f.as_json() for f in found]}, indent=1))
        if time.monotonic() > end:
            print(f"\nThe rest is left out: {options.seconds:.0f} seconds are over.")
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
