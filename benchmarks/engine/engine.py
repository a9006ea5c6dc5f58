"""Engine steps in one process: their time, and its share of what the machine can do (roofline.py).

    python -m benchmarks.engine.engine [--model DIR] [--workload decode-1 ...] [--threads N]
                                       [--transformers] [--json FILE]

`decode` is the median time of a step with the prompts already computed, `prefill` the time to the first token of one
prompt. Requests go through scheduler, paged cache and sampler; the runner is loaded as a worker loads it, without a
prefix cache. A decode's context is its prompt and half of what it generates.

--transformers runs the same work with transformers' `generate` in turn (ours, theirs, ours, ...), as a static batch of
equal prompts, its best case.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.workers.common.cores import bind_this_thread, usable_cores
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.formats import QUANTIZE
from diptych.workers.server.worker import load_runner

from ..common.roofline import ModelCost, Roofline, measure

if TYPE_CHECKING:
    from torch import Tensor

TINY = Path(__file__).parents[2] / "examples" / "tiny"
MAX_CONTEXT = 4096
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Load:
    batch: int
    num_prompt: int
    num_new: int

    @property
    def is_prefill(self) -> bool:
        return self.num_new == 1

    @property
    def context(self) -> int:
        """Mean over a decode's steps."""
        return self.num_prompt + self.num_new // 2


LOADS = {
    "decode-1": Load(1, 160, 64),
    "decode-16": Load(16, 160, 64),
    "decode-32": Load(32, 496, 64),
    "prefill-512": Load(1, 512, 1),
}


@dataclass(frozen=True)
class Row:
    workload: str
    ours_ms: float
    roofline_share: float | None
    transformers_ms: float | None

    def show(self) -> None:
        share = "" if self.roofline_share is None else f"{100 * self.roofline_share:.0f} %"
        theirs, ratio = "", ""
        if self.transformers_ms is not None:
            theirs, ratio = f"{self.transformers_ms:.2f}", f"{self.transformers_ms / self.ours_ms:.2f}"
        print(f"{self.workload:<12} {self.ours_ms:9.2f} {share:>9} {theirs:>16} {ratio:>6}", flush=True)


def prompts(load: Load, vocab_size: int, seed: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (load.batch, load.num_prompt), generator=generator).tolist()


def ours(engine: Engine, batch: list[list[int]], num_new: int, temperature: float) -> tuple[float, float]:
    """(seconds to the last of the first tokens, median seconds of a later step)."""
    for i, prompt in enumerate(batch):
        sampling = SamplingParams(temperature=temperature, seed=i, max_tokens=num_new, ignore_eos=True)
        engine.submit(f"0/{i}", Request(str(i), tuple(prompt), sampling, 600.0), [])
    start = time.perf_counter()
    num_first = 0
    while num_first < len(batch):
        num_first += sum(token.position == 0 for token in engine.step().tokens)
    first_s = time.perf_counter() - start
    steps: list[float] = []
    while engine.scheduler.has_work or engine.steps:
        began = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
    return first_s, statistics.median(steps) if steps else first_s


def theirs(generate: "Callable[..., Tensor]", batch: list[list[int]], num_new: int) -> tuple[float, float]:
    import torch

    ids = torch.tensor(batch)

    def timed(num: int) -> float:
        start = time.perf_counter()
        generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, min_new_tokens=num, do_sample=False)
        return time.perf_counter() - start

    first_s = timed(1)
    return first_s, (timed(num_new) - first_s) / (num_new - 1) if num_new > 1 else first_s


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._cost = ModelCost(load_spec(args.model), ITEM_BYTES[args.dtype])
        cores = usable_cores()[: args.threads]
        config = WorkerConfig.of(
            str(args.model),
            dtype=args.dtype,
            threads=args.threads,
            cores=cores if len(cores) == args.threads else None,
            max_context_tokens=min(self._cost.spec.max_position_embeddings, MAX_CONTEXT),
            prefix_cache=False,
            look_ahead=args.look_ahead,
            quantize=args.quantize,
        )
        runner = load_runner(config, lambda _: None)  # first: it settles how OpenMP binds its threads
        if not args.look_ahead:  # else another thread computes
            bind_this_thread(config.cores)
        has_roofline = args.roofline_seconds and args.quantize is None  # limits are of weights in full
        self._roofline = measure(args.threads, args.roofline_seconds) if has_roofline else None
        self._engine = Engine(runner, config.device_scheduler, prefix_cache=False)
        self._vocab_size = runner.info.vocab_size
        self._generate = _transformers(args) if args.transformers else None

    def measure(self, name: str) -> Row:
        load = LOADS[name]
        which = 0 if load.is_prefill else 1
        times: tuple[list[float], list[float]] = ([], [])
        for i in range(-1, self._args.repeat):  # the first round warms both up
            batch = prompts(load, self._vocab_size, seed=i + 1)
            pair = [ours(self._engine, batch, load.num_new, self._args.temperature)[which]]
            if self._generate is not None:
                pair.append(theirs(self._generate, batch, load.num_new)[which])
            if i >= 0:
                for side, seconds in zip(times, pair, strict=False):
                    side.append(seconds)
        medians = [statistics.median(side) if side else None for side in times]
        assert medians[0] is not None
        return Row(name, 1e3 * medians[0], self._share(load, medians[0]), medians[1] and 1e3 * medians[1])

    def _share(self, load: Load, seconds: float) -> float | None:
        if self._roofline is None:
            return None
        if load.is_prefill:
            return self._cost.prefill_share(self._roofline, load.num_prompt, seconds)
        return self._cost.decode_share(self._roofline, load.batch, load.context, seconds)

    def describe(self) -> str:
        limits = "" if self._roofline is None else f", {_describe(self._roofline)}"
        args = self._args
        dtype = args.dtype if args.quantize is None else f"{args.dtype}, weights {args.quantize}"
        return f"{args.model.name}, {dtype}, {args.threads} threads, median of {args.repeat}{limits}"


def _describe(roofline: Roofline) -> str:
    return f"reads {roofline.read_bytes_s / 1e9:.1f} GB/s, {roofline.flops / 1e9:.0f} GFLOP/s"


def _transformers(args: argparse.Namespace) -> "Callable[..., Tensor]":
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval().generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--workload", action="append", choices=LOADS)
    parser.add_argument("--dtype", choices=ITEM_BYTES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quantize", choices=QUANTIZE, help="weights in few bits; without shares of limits")
    parser.add_argument("--temperature", type=float, default=0.0, help="of our sampler")
    parser.add_argument("--look-ahead", action="store_true", help="prepare a step while the one before it is computed")
    parser.add_argument("--transformers", action="store_true", help="compare with transformers")
    parser.add_argument("--roofline-seconds", type=float, default=3.0, help="to measure the machine; 0: do not")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    print(bench.describe())
    print(f"{'workload':<12} {'ours ms':>9} {'roofline':>9} {'transformers ms':>16} {'ratio':>6}")
    rows: list[Row] = []
    for name in args.workload or LOADS:
        rows.append(bench.measure(name))
        rows[-1].show()
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
