"""Engine steps of one model with weights of few bits, beside the same in full: their time and the ratio.

    python -m benchmarks.engine.few_bits --model DIR [--dtype bfloat16] [--threads N] [--format mxfp4 ...] [--repeat 3]

`int8`, `int4` and `w8a8` are quantised at load; `mxfp4` is a checkpoint of that format, written for the run, which is
computed as it is stored. Formats take turns, so that a busy machine is busy for all of them; a time is the best of a
format's medians, and with one thread of its processor time alone. The weights need no meaning.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.workers.common.cores import usable_cores
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.server.worker import load_runner

from .engine import LOADS, MAX_CONTEXT, TINY, Load, prompts

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("full", "int8", "int4", "w8a8", "mxfp4")
WORKLOADS = ("decode-1", "decode-16", "prefill-512")
GROUP = 32


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: engine_of(args, name, Path(folder)) for name in args.format}
        for workload in args.workload:
            show(workload, args, engines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--workload", nargs="+", choices=list(LOADS), default=list(WORKLOADS))
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def engine_of(args: argparse.Namespace, name: str, folder: Path) -> tuple[Engine, int]:
    """Make an engine, and return the size of its vocabulary."""
    path = mxfp4_checkpoint(args.model, folder / name) if name == "mxfp4" else args.model
    cores = usable_cores()[: args.threads]
    config = WorkerConfig.of(
        str(path),
        dtype=args.dtype,
        threads=args.threads,
        cores=cores if len(cores) == args.threads else None,
        max_context_tokens=MAX_CONTEXT,
        kv_memory_bytes=1 << 30,
        prefix_cache=False,
        look_ahead=False,
        quantize=name if name in ("int8", "int4", "w8a8") else None,
    )
    runner = load_runner(config, lambda _: None)
    return Engine(runner, config.device_scheduler, prefix_cache=False), runner.info.vocab_size


def show(workload: str, args: argparse.Namespace, engines: dict[str, tuple[Engine, int]]) -> None:
    """Measure all formats in turn, and print a line each."""
    load, best = LOADS[workload], dict.fromkeys(engines, float("inf"))
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    for i in range(args.repeat):
        for name, (engine, vocab_size) in engines.items():
            best[name] = min(best[name], step_s(engine, prompts(load, vocab_size, i), load, clock))
    for name, seconds in best.items():
        ratio = f"  x{best['full'] / seconds:.2f}" if "full" in best else ""
        print(f"{workload:<12} {name:<6} {seconds * 1e3:9.2f} ms{ratio}", flush=True)


def step_s(engine: Engine, batch: list[list[int]], load: Load, clock: Callable[[], float]) -> float:
    """Seconds to the last of the first tokens, or the median of the steps after it. clock: of this thread, which
    computes."""
    for i, prompt in enumerate(batch):
        sampling = SamplingParams(temperature=0.0, max_tokens=load.num_new, ignore_eos=True)
        engine.submit(f"0/{i}", Request(str(i), tuple(prompt), sampling, 600.0), [])
    steps, start, num_first = list[float](), clock(), 0
    while num_first < len(batch):
        num_first += sum(token.position == 0 for token in engine.step().tokens)
    first_s = clock() - start
    while engine.scheduler.has_work or engine.steps:
        began = clock()
        engine.step()
        steps.append(clock() - began)
    return first_s if load.is_prefill else statistics.median(steps)


def mxfp4_checkpoint(source: Path, target: Path) -> Path:
    """Write a checkpoint of one file anew, with its layers' products in MXFP4 as compressed-tensors has it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            codes, exponents = in_mxfp4(tensor.float())
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.weight_packed": codes, f"{module}.weight_scale": exponents}
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True}
    scheme = {"targets": ["Linear"], "weights": weights}
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def in_mxfp4(weight: "Tensor") -> "tuple[Tensor, Tensor]":
    """weight: float32 [n, k]. Returns pairs of codes, uint8 [n, k / 2], and exponents, uint8 [n, k / 32]."""
    import torch

    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.unflatten(1, (-1, GROUP))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100))) - 2
    scaled = groups / torch.exp2(exponents)
    codes = torch.bucketize(scaled.abs(), (sizes[1:] + sizes[:-1]) / 2) + 8 * (scaled < 0)
    pairs = codes.flatten(1).unflatten(1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents.squeeze(-1) + 127).to(torch.uint8)


if __name__ == "__main__":
    main()
