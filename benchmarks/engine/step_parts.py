"""Measures the parts of a step's time, as the compiled kernels count them themselves.

    python -m benchmarks.engine.step_parts --model DIR [--threads N] [--seconds 5] [--isa NAME]

Of each workload the fastest step is shown: what else the machine does only adds. "python" is what the engine's thread
does around the kernels: scheduling, writing the batch, sampling, bookkeeping. Of each product of weights, the GB/s at
which they are read, and GFLOP/s.
"""

import argparse
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from diptych.kernels.cpu.layer import PARTS
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.common.host_backend import HostBackend
from diptych.workers.execution.cpu.compiled_steps import CompiledSteps
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.families.spec import AttentionSpec, MlpSpec, ModelSpec

# name: (batch, prompt tokens, new tokens)
WORKLOADS = {
    "decode 1": (1, 192, 64),
    "decode 16": (16, 192, 64),
    "decode 32, context 528": (32, 496, 64),
    "prefill 512": (1, 512, 1),
}


@dataclass(frozen=True)
class Timing:
    seconds: float
    parts: NDArray[np.float64]  # seconds of each of PARTS, and of Python


def weights_of(spec: ModelSpec) -> dict[str, int]:
    """Numbers of weights that each part multiplies by, in all layers."""
    attention, mlp = spec.layers[0].attention, spec.layers[0].feed_forward
    assert isinstance(attention, AttentionSpec) and isinstance(mlp, MlpSpec)
    q_size, kv_size = attention.q_size, attention.kv_size
    sizes = {
        "qkv": spec.hidden_size * (q_size + 2 * kv_size),
        "o": spec.hidden_size * q_size,
        "gate_up": 2 * spec.hidden_size * mlp.intermediate_size,
        "down": spec.hidden_size * mlp.intermediate_size,
    }
    return {part: size * spec.num_layers for part, size in sizes.items()} | {"head": spec.vocab_size * spec.hidden_size}


class Bench:
    def __init__(self, runner: ModelRunner) -> None:
        self._engine = Engine(runner, SchedulerConfig(), prefix_cache=False)
        steps = runner.backend.steps if isinstance(runner.backend, HostBackend) else None
        assert isinstance(steps, CompiledSteps), "the compiled kernels do not compute here"
        self._profile = steps.profile().numpy()
        self._vocab_size = runner.info.vocab_size
        self._numbers = itertools.count()

    def fastest(self, batch: int, num_prompt: int, num_new: int, seconds: float) -> Timing:
        """Return the shortest times of steps that decode all of the batch, or of those that prefill where nothing
        decodes."""
        best: Timing | None = None
        until = time.perf_counter() + seconds
        while best is None or time.perf_counter() < until:
            self._submit(batch, num_prompt, num_new)
            while self._engine.scheduler.has_work:
                num_decoding = sum(s.is_decoding for s in self._engine.scheduler.sequences())
                timing = self._step()
                if (num_decoding == batch or num_new == 1) and (best is None or timing.seconds < best.seconds):
                    best = timing
        return best

    def _step(self) -> Timing:
        self._profile[:] = 0
        start = time.perf_counter()
        self._engine.step()
        seconds = time.perf_counter() - start
        return Timing(seconds, np.append(self._profile / 1e9, seconds - self._profile.sum() / 1e9))

    def _submit(self, batch: int, num_prompt: int, num_new: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        generator = torch.Generator().manual_seed(0)
        for prompt in torch.randint(3, self._vocab_size, (batch, num_prompt), generator=generator).tolist():
            key = str(next(self._numbers))
            self._engine.submit(key, Request(key, tuple(prompt), sampling, 600.0), [])


def show(spec: ModelSpec, dtype_bytes: int, name: str, num_rows: int, num_sampled: int, timing: Timing) -> None:
    print(f"\n{name}: {timing.seconds * 1e3:.2f} ms, {num_rows / timing.seconds:.0f} tokens/s")
    weights = weights_of(spec)
    for part, seconds in zip((*PARTS, "python"), timing.parts.tolist(), strict=True):
        line = f"  {part:10} {seconds * 1e3:8.3f} ms {seconds / timing.seconds:6.1%}"
        if part in weights and seconds > 0:
            rows = num_sampled if part == "head" else num_rows
            line += f" {weights[part] * dtype_bytes / seconds / 1e9:7.1f} GB/s"
            line += f" {2 * weights[part] * rows / seconds / 1e9:7.0f} GFLOP/s"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each workload")
    parser.add_argument("--isa", default="auto", help="instruction set of the kernels")
    parser.add_argument("--workload", choices=[*WORKLOADS], nargs="*", default=[*WORKLOADS])
    args = parser.parse_args()
    config = WorkerConfig.of(
        args.model, dtype=args.dtype, threads=args.threads, cpu_isa=args.isa, max_context_tokens=2048
    )
    bench = Bench(ModelRunner.load(config))
    for name in args.workload:
        batch, num_prompt, num_new = WORKLOADS[name]
        timing = bench.fastest(batch, num_prompt, num_new, args.seconds)
        num_rows = batch if num_new > 1 else batch * num_prompt
        show(load_spec(args.model), 4 if args.dtype == "float32" else 2, name, num_rows, batch, timing)


if __name__ == "__main__":
    main()
