"""The engine on one GPU, with random weights of known shapes.

    python -m benchmarks.gpu.engine_gpu [--models 8b 1b v2-lite] [--kv-dtype int8]

For each model, by a worker's own runner and engine, with CUDA graphs and without; what is worth most comes first:

- loading: the time of making weights, of the warm-up with what it compiles, of captures; kernels compiled.
- decode: the time of a step, by the host's clock, at several batches and contexts; what reading the weights once takes
  at copy bandwidth is a share of it. And the host gap: how long a step leaves the device without work, by events on its
  lanes (gpu_engine/timed.py). Gaps between the kernels of one graph, or of one launched sequence, are not the host's.
- prefill: from the first step of a few prompts to the last of their first tokens.
- profile: the kernels of a few decode steps and of a prompt, by torch.profiler.
- serving: requests that all come at once, 1,024 tokens in and as many out.
- speculation, only on request: decodes with drafts of which a set share is right, and without.
- memory; and how fast weights are loaded from a file that is in memory.

Before them, what the GPU reaches here: bytes a second of a copy, read and written, bf16 FLOP/s of a matrix product;
after them, bytes a second from pinned memory. Figures are rows of gpu_report.py's file too, where that runs it. Needs
torch, triton, safetensors, numpy and protobuf. It makes no figures without a GPU: `--device fake` runs every part on
the CPU, tiny.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from diptych.kernels.common.lang import tell_of_compiles
from diptych.workers.common.garbage import leave
from diptych.workers.device.cuda_device import CudaDevice
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.kv.dtypes import GROUP, KV_DTYPES, is_rounded_by_block

from ..common.roofline import Roofline
from .gpu_engine import measure
from .gpu_engine.drafts import DRAFT_TOKENS, DraftCase, speculation
from .gpu_engine.limits import OF_FAKE, link_bytes_s, roofline
from .gpu_engine.loading import WRITTEN_BYTES, loading
from .gpu_engine.models import IN_FEW_BITS, SHAPES, TINY
from .gpu_engine.profile import profile_decode, profile_prompts
from .gpu_engine.report import HEAD, Figure
from .gpu_engine.rig import Rig, Settings, make_rig
from .gpu_engine.timed import CudaClock, HostClock, TimedDevice
from .report.rows import FIGURE, PROBLEM, put

NO_GPU = "This measures the engine on a GPU, and torch sees none here."
PARTS = ("decode", "prefill", "profile", "serving", "memory", "speculation")
ON_REQUEST = ("speculation",)  # its graphs and buffers have room for drafts


@dataclass(frozen=True)
class Cases:
    """Cases of a kind of device: those of `first` are measured before everything else."""

    first: Sequence[measure.DecodeCase]
    first_prompt: measure.PromptCase
    decodes: Sequence[measure.DecodeCase]
    prompts: Sequence[measure.PromptCase]
    profiled: Sequence[measure.DecodeCase]
    drafted: Sequence[DraftCase]
    serving: measure.ServingCase
    settings: Settings


def _decodes(*of: tuple[int, int]) -> list[measure.DecodeCase]:
    return [measure.DecodeCase(*each) for each in of]


ON_GPU = Cases(
    _decodes((1, 1024), (64, 1024), (256, 1024)),
    measure.PromptCase(1, 8192),
    _decodes((16, 1024), (1, 32_768), (16, 8192), (64, 4096)),
    [measure.PromptCase(1, 1024), measure.PromptCase(8, 1024)],
    _decodes((1, 1024), (64, 1024), (256, 1024)),
    [DraftCase(batch, 1024, acceptance) for batch in (1, 16, 64, 256) for acceptance in (0.7, 0.0)],
    measure.ServingCase(256, 1024, 1024),
    Settings(),
)
ON_FAKE = Cases(
    [measure.DecodeCase(3, 40, num_steps=4)],
    measure.PromptCase(1, 50, repeat=2),
    [measure.DecodeCase(1, 40, num_steps=4)],
    [measure.PromptCase(2, 50, repeat=2)],
    [measure.DecodeCase(3, 40)],
    [DraftCase(2, 8, 0.7, num_steps=4, num_turns=1)],
    measure.ServingCase(6, 20, 10),
    Settings(max_context_tokens=128, max_batch_tokens=64, max_running=4, kv_memory_bytes=1 << 20, dtype="float32"),
)


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Yield the figures in the order in which they are measured."""
    is_fake = options.device == "fake"
    limits = OF_FAKE if is_fake else roofline()
    yield Figure("limit", "copy, read and written", limits.read_bytes_s / 1e12, "TB/s")
    yield Figure("limit", "product of bfloat16 matrices", limits.flops / 1e12, "TFLOP/s")
    for has_graphs in (True, False) if options.graphs == "both" else (options.graphs == "yes",):
        for model in options.models:
            for figure in _of_rig(options, model, has_graphs, limits):
                kv = None if options.kv_dtype == "auto" else f"KV {options.kv_dtype}"
                name = ", ".join(of for of in (model, options.quantize, kv) if of is not None)
                yield replace(figure, model=name, graphs=has_graphs)
    device = FakeDevice() if is_fake else CudaDevice(torch.device("cuda"))
    link = 1e9 if is_fake else link_bytes_s(device)
    yield Figure("limit", "copy from pinned memory", link / 1e9, "GB/s")
    yield from loading(device, link, *([WRITTEN_BYTES] if is_fake else []))


def _of_rig(options: argparse.Namespace, model: str, has_graphs: bool, limits: Roofline) -> Iterator[Figure]:
    gc.unfreeze()
    gc.collect()
    cases = ON_GPU
    if options.device == "fake":
        cases, device = ON_FAKE, TimedDevice(FakeDevice(), HostClock())
    else:
        torch.cuda.empty_cache()
        device = TimedDevice(CudaDevice(torch.device("cuda")), CudaClock())
    compiled: list[float] = []
    if options.device == "cuda":
        tell_of_compiles(lambda _name, seconds: compiled.append(seconds))
    settings = replace(cases.settings, cuda_graphs=has_graphs, quantize=options.quantize, kv_dtype=options.kv_dtype)
    if is_rounded_by_block(options.kv_dtype):
        settings = replace(settings, block_size=GROUP)
    if "speculation" in options.parts:
        settings = replace(settings, max_draft_tokens=DRAFT_TOKENS)
    if options.kv_gib is not None:
        settings = replace(settings, kv_memory_bytes=int(options.kv_gib * 2**30))
    rig = make_rig(TINY if model == "tiny" else SHAPES[model], settings, device)
    for what, seconds in rig.seconds.items():
        yield Figure("loading", what, seconds, "s")
    yield Figure("loading", f"{len(compiled)} kernels compiled, in all", sum(compiled), "s")
    compiled.clear()
    gc.collect()
    gc.freeze()  # as a worker does: a full collection would hold steps up
    yield from _of_model(options, rig, limits, cases)
    yield Figure("compiled while requests were served", "kernels", len(compiled), "kernels")
    rig.runner.close()


def _of_model(options: argparse.Namespace, rig: Rig, limits: Roofline, cases: Cases) -> Iterator[Figure]:
    has = {part: part in options.parts for part in PARTS}
    if has["decode"]:
        for decode in cases.first:
            yield from measure.decode(rig, decode, limits)
    if has["prefill"]:
        yield from measure.prompts(rig, cases.first_prompt, limits)
    if has["memory"]:
        yield from measure.memory(rig)
    if has["profile"]:
        for decode in cases.profiled:
            _told(f"profile, {decode}", lambda of=decode: profile_decode(rig, of))
        _told(f"profile, {cases.first_prompt}", lambda: profile_prompts(rig, cases.first_prompt))
    if has["prefill"]:
        for prompt in cases.prompts:
            yield from measure.prompts(rig, prompt, limits)
    for drafted in cases.drafted if has["speculation"] else ():
        yield from speculation(rig, drafted)
    if has["serving"]:
        serving = cases.serving
        yield from measure.serve(rig, replace(serving, num_requests=options.requests or serving.num_requests), limits)
    if has["decode"]:
        for decode in cases.decodes:
            yield from measure.decode(rig, decode, limits)


def _told(what: str, run: Callable[[], None]) -> None:
    """Run what may be refused on a machine, as profilers are; where it is, a row says so."""
    try:
        run()
    except Exception as e:  # noqa: BLE001 (whatever a profiler raises, figures come after it)
        put(PROBLEM, what=what, problem=f"{type(e).__name__}: {e}")
        print(f"{what}: {type(e).__name__}: {e}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*SHAPES, "tiny"], default=["8b", "1b", "v2-lite"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[part for part in PARTS if part not in ON_REQUEST])
    parser.add_argument("--graphs", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--quantize", choices=IN_FEW_BITS, help="weights in few bits; fp8-rows: their rows are FP8 too")
    parser.add_argument("--requests", type=int, help="of serving; 256 by default")
    parser.add_argument("--kv-gib", type=float, help="memory for KV, where others use the GPU too; else most of it")
    parser.add_argument("--kv-dtype", choices=("auto", *KV_DTYPES), default="auto", help="of models without latents")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--seconds", type=float, default=3600.0, help="in all: what comes after them is left out")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was found there too")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name() if options.device == "cuda" else "fake device: no figure means anything"
    machine = {"device": name, "torch": torch.__version__, "KV": options.kv_dtype}
    print(", ".join(f"{key} {value}" for key, value in machine.items()), "", HEAD, sep="\n")
    found: list[Figure] = []
    end = time.monotonic() + options.seconds
    for figure in figures(options):
        found.append(figure)
        print(figure.line(), flush=True)
        put(FIGURE, **figure.as_json())
        if options.json is not None:
            options.json.write_text(json.dumps({**machine, "figures": [f.as_json() for f in found]}, indent=1))
        if time.monotonic() > end:
            print(f"\nThe rest is left out: {options.seconds:.0f} seconds are over.")
            break
    return 0


if __name__ == "__main__":
    leave(main())
