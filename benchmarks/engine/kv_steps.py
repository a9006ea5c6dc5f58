"""Steps of decodes at a long context with KV in few bits, and in bfloat16: their time and the ratio.

    python -m benchmarks.engine.kv_steps [--model DIR] [--kv bfloat16 int8 fp8 int4 kivi] [--batch 32] [--context 2048]
        [--quantize int8] [--threads 2] [--steps 12]

Without --model it is the 135 M shape with random weights. KV pools hold random numbers, for a prompt's KV is not what
is measured. Runners take a step in turn, so that a busy machine is busy for all of them. `fit` is how many times as
many tokens the same memory holds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.sparse_attention import DECODED, decoding, make_model
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.sequence import Batch, ScheduledSequence, SequenceStatus
from diptych.workers.core.sequence import Sequence as DecodingSequence
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.layout import blocks_for
from diptych.workers.models.families.registry import load_spec
from diptych.workers.models.plan.kv_plan import layout_of

KV = ("bfloat16", "int8", "fp8", "int4", "kivi")
BLOCK_SIZES = {"kivi": 32}
BLOCK_SIZE = 16


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            make_model(model := Path(folder), args.context + DECODED + BLOCK_SIZE)
        runners = {name: load_filled(model, name, args) for name in args.kv}
    times = {name: list[float]() for name in runners}
    batches = {name: sequences_of(runner, args.batch, args.context) for name, runner in runners.items()}
    for _ in range(args.steps + 1):
        for name, runner in runners.items():
            times[name].append(step_s(runner, batches[name]))
    own = {name: statistics.median(of[1:]) for name, of in times.items()}  # the first step maps memory
    first = next(iter(own))
    print(f"batch {args.batch}, context {args.context:,}, {args.threads} threads, {args.steps} steps")
    for name, seconds in own.items():
        fit = token_bytes(runners[first]) / token_bytes(runners[name])
        rate = f"{args.batch / seconds:8.1f} tokens/s  x{own[first] / seconds:.2f}"
        print(f"{name:<9} {seconds * 1e3:8.2f} ms {rate}  fit x{fit:.2f}")


def token_bytes(runner: ModelRunner) -> float:
    return runner.layout.block_bytes / runner.layout.block_size


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--kv", nargs="+", choices=KV, default=list(KV))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence before the first step")
    parser.add_argument("--quantize", help="the weights, at load")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help=f"at most {DECODED - 1}")
    return parser.parse_args()


def load_filled(model: Path, kv_dtype: str, args: argparse.Namespace) -> ModelRunner:
    """A runner whose pool is filled with random numbers: bytes that no dtype takes for NaN or an infinity."""
    tokens, block_size = args.context + DECODED + BLOCK_SIZE, BLOCK_SIZES.get(kv_dtype, BLOCK_SIZE)
    num_blocks = (args.batch + 1) * blocks_for(tokens, block_size)
    config = WorkerConfig.of(
        str(model),
        dtype="bfloat16",
        kv_dtype="auto" if kv_dtype == "bfloat16" else kv_dtype,
        threads=args.threads,
        max_context_tokens=tokens,
        max_running=args.batch,
        block_size=block_size,
        quantize=args.quantize,
        look_ahead=False,
        kv_memory_bytes=num_blocks * layout_of(load_spec(model), kv_dtype, block_size).block_bytes,
    )
    runner = ModelRunner.load(config)
    backend: Any = runner.backend
    generator = torch.Generator().manual_seed(1)
    backend._cache.tensor.view(torch.uint8).random_(0x20, 0x40, generator=generator)
    return runner


def sequences_of(runner: ModelRunner, num: int, context: int) -> list[DecodingSequence]:
    """Sequences of `context` computed tokens and one more, each in blocks of its own."""
    blocks_each = runner.memory.num_blocks // (num + 1)
    found: list[DecodingSequence] = []
    for i in range(num):
        sequence = decoding([7 + i] * context, runner.layout.block_size, first_block=i * blocks_each)
        sequence.num_computed, sequence.status = context, SequenceStatus.RUNNING
        sequence.token_ids.append(7)
        found.append(sequence)
    return found


def step_s(runner: ModelRunner, sequences: Sequence[DecodingSequence]) -> float:
    """Seconds of a step in which each gets its next token."""
    batch = Batch([ScheduledSequence(sequence, 1) for sequence in sequences], len(sequences))
    start = time.perf_counter()
    tokens = runner.launch(batch).tokens()
    seconds = time.perf_counter() - start
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.num_computed += 1
        sequence.token_ids.append(token.token_id)
    return seconds


if __name__ == "__main__":
    torch.inference_mode()(main)()
