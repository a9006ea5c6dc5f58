"""Decode steps of a real engine, alone and while a transfer runs in the same process.

The model is a random Llama of 135 M parameters, so that a step reads far more memory than the caches hold. The engine
steps on a thread of its own, with one core fewer than the machine has: the last is the transfer's.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner

BATCH, PROMPT_TOKENS = 4, 64
ROUNDS, STEPS = 20, 10  # of each kind
KV_BYTES = 256 << 20
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@dataclass
class Step:
    wall_s: float
    core_s: float  # on a core, of the engine's thread: what is left when others want the cores too


@dataclass
class DecodeFigures:
    alone: Step
    while_reading: Step
    bytes_per_s: float  # of the transfer meanwhile
    num_threads: int

    def sentence(self) -> str:
        alone, busy = self.alone, self.while_reading
        return (
            f"decode step, 135 M parameters, batch {BATCH}, {self.num_threads} thread(s): {alone.wall_s * 1e3:.2f} ms "
            f"alone, {busy.wall_s * 1e3:.2f} ms ({busy.wall_s / alone.wall_s - 1:+.0%}; time on the core "
            f"{busy.core_s / alone.core_s - 1:+.0%}) while {self.bytes_per_s / 1e9:.1f} GB/s arrive"
        )


async def decode_while(
    read: Callable[[int], Awaitable[object]], num_bytes: int, share: Callable[[bool], None]
) -> DecodeFigures:
    """`read` moves `num_bytes`; it is called without a pause. The two kinds of steps take turns. `share` tells the
    transport that an engine computes, as a worker does."""
    engine = await asyncio.to_thread(_engine)
    alone: list[Step] = []
    busy: list[Step] = []
    num_reads, reading_s = 0, 0.0
    share(True)
    for _ in range(ROUNDS):
        alone += await asyncio.to_thread(_steps, engine)
        start = time.perf_counter()
        steps = asyncio.create_task(asyncio.to_thread(_steps, engine))
        while not steps.done():
            await read(num_reads)
            num_reads += 1
        reading_s += time.perf_counter() - start
        busy += await steps
    share(False)
    speed = num_reads * num_bytes / reading_s
    return DecodeFigures(_median(alone), _median(busy), speed, torch.get_num_threads())


def _engine() -> Engine:
    """Make an engine with BATCH sequences that decode without end."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
        threads = max((os.cpu_count() or 2) - 1, 1)
        runner = ModelRunner.load(WorkerConfig.of(Path(folder), kv_memory_bytes=KV_BYTES, threads=threads))
    engine = Engine(runner, SchedulerConfig(), prefix_cache=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=1024, ignore_eos=True)
    for i in range(BATCH):
        prompt = tuple(range(i, i + PROMPT_TOKENS))
        engine.submit(f"0/{i}", Request(str(i), prompt, sampling, 600.0), [])
    for _ in range(STEPS):
        engine.step()
    return engine


def _steps(engine: Engine) -> list[Step]:
    steps: list[Step] = []
    for _ in range(STEPS):
        wall, core = time.perf_counter(), time.thread_time()
        engine.step()
        steps.append(Step(time.perf_counter() - wall, time.thread_time() - core))
    return steps


def _median(steps: list[Step]) -> Step:
    return Step(statistics.median(s.wall_s for s in steps), statistics.median(s.core_s for s in steps))
