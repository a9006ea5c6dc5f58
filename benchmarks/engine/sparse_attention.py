"""Sparse attention (QUEST) against full attention: what it changes, and what it gains.

    python -m benchmarks.engine.sparse_attention [error] [speed] [--threads N] [--budgets 256 ...] [--contexts 1024 ...]

error: of examples/tiny, in float32, over rows of 2,048 tokens as it was trained on. Of each row the first tokens are a
prompt and the others are decoded, each fed as the row has it: the error of what attention gives in the layers that are
sparse, relative to full attention with the same queries and keys, and how many of the tokens that follow are likeliest
in both.

speed: a decode's step, alone, of the judged 135 M shape with random weights in bfloat16, whose KV pool holds random
numbers. Runners with each budget and without take a step in turn; told are median times and ratios.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.engine.families import SHAPE
from diptych.examples.training.documents import Documents
from diptych.examples.training.facts import load_facts, load_words
from diptych.examples.training.packing import Packer
from diptych.kernels.attention.paged_attention import paged_attention
from diptych.kernels.attention.paged_batch import AttentionOptions, PagedBatch
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.sequence import Batch, ScheduledSequence
from diptych.workers.core.sequence import Sequence as DecodingSequence
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.layout import blocks_for
from diptych.workers.models.layers.sparse import SparseStep
from diptych.workers.models.layers.step import Step

TINY = Path(__file__).parents[2] / "examples" / "tiny"
ROW_TOKENS, DECODED = 2048, 192
ERROR_BUDGETS = (64, 128, 256, 512, 1024)


def config_of(path: Path, budget: int, **settings: Any) -> WorkerConfig:
    sparse = {"sparse_attention": "quest", "sparse_budget_tokens": budget} if budget else {}
    return WorkerConfig.of(path, **settings, **sparse)


def decoding(prompt: Sequence[int], block_size: int, first_block: int = 0) -> DecodingSequence:
    """A sequence in blocks of its own, with room to decode; nothing of it is computed."""
    request = Request("bench", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True), 600.0)
    num_blocks = blocks_for(len(prompt) + DECODED + 1, block_size)
    table = list(range(first_block, first_block + num_blocks))
    return DecodingSequence("0/1", request, list(prompt), len(prompt), math.inf, 0, block_table=table)


def likeliest(runner: ModelRunner, row: Sequence[int]) -> list[int]:
    """The likeliest token after each of the decoded ones, each decoded as the row has it."""
    sequence = decoding(row[:-DECODED], runner.layout.block_size)
    found: list[int] = []
    num_new = sequence.num_tokens
    for token_id in row[-DECODED:]:
        sampled = runner.launch(Batch([ScheduledSequence(sequence, num_new)], int(num_new == 1))).tokens()
        found.append(sampled[0].token_id)
        sequence.num_computed += num_new
        sequence.token_ids.append(token_id)
        num_new = 1
    return found[1:]  # the first follows the prompt


@dataclass(frozen=True)
class Compared(SparseStep):
    """Attends to all, and notes how far from that it is to attend to the blocks of each budget."""

    whole: PagedBatch
    errors: dict[int, list[float]]  # by number of blocks

    def attend(self, q: Tensor, cache: Tensor, bounds: Tensor, options: AttentionOptions) -> Tensor:
        full = paged_attention(q, cache, self.whole, options)
        fields: dict[str, Any] = {name: getattr(self, name) for name in SparseStep.__dataclass_fields__}
        for num_chosen, errors in self.errors.items():
            sparse = SparseStep(**(fields | {"num_chosen": num_chosen})).attend(q, cache, bounds, options)
            errors.append(float((sparse - full).norm() / full.norm()))
        return full


def errors_of(runner: ModelRunner, row: Sequence[int], budgets: Sequence[int]) -> dict[int, float]:
    """Mean error by budget, of all sparse layers. runner: torch computes."""
    backend: Any = runner.backend
    steps, cache, block_size = backend.steps, backend._cache, runner.layout.block_size
    sequence = decoding(row[:-DECODED], block_size)
    errors: dict[int, list[float]] = {budget // block_size: [] for budget in budgets}
    num_new = sequence.num_tokens
    for token_id in row[-DECODED:]:
        step = Step.of([ScheduledSequence(sequence, num_new)], block_size, bounded=[0 if num_new == 1 else -1])
        meta = step.meta(steps._cos_sin, block_size, cache.bounds.num_chosen)
        if meta.sparse is not None:
            fields: dict[str, Any] = {name: getattr(meta.sparse, name) for name in SparseStep.__dataclass_fields__}
            meta = replace(meta, sparse=Compared(**fields, whole=meta.paged, errors=errors))
        with torch.inference_mode():
            steps._decoder.forward(torch.from_numpy(step.token_ids.astype(np.int64)), cache, meta)
        sequence.num_computed += num_new
        sequence.token_ids.append(token_id)
        num_new = 1
    return {num * block_size: statistics.mean(found) for num, found in errors.items()}


def measure_error(num_rows: int, budgets: Sequence[int]) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    words = load_words()
    packer = Packer(Documents(load_facts(words), words), tokenizer, seed=99)
    rows = packer.batch(num_rows, ROW_TOKENS, long=True)[0].tolist()
    settings: dict[str, Any] = {"dtype": "float32", "max_context_tokens": ROW_TOKENS, "kv_memory_bytes": 32 << 20}
    torch_runner = ModelRunner.load(config_of(TINY, max(budgets), cpu_isa="none", **settings))
    errors = [errors_of(torch_runner, row, budgets) for row in rows]
    full_runner = ModelRunner.load(config_of(TINY, 0, **settings))
    full = [likeliest(full_runner, row) for row in rows]
    print(f"{num_rows} rows: prompts of {ROW_TOKENS - DECODED} tokens, {DECODED} decoded\n")
    print("| budget | relative error of attention | same likeliest token |\n|---|---|---|")
    for budget in budgets:
        runner = ModelRunner.load(config_of(TINY, budget, **settings))
        sparse = [likeliest(runner, row) for row in rows]
        pairs = [pair for one, other in zip(full, sparse, strict=True) for pair in zip(one, other, strict=True)]
        same = sum(one == other for one, other in pairs) / len(pairs)
        print(f"| {budget} | {statistics.mean(of[budget] for of in errors):.3f} | {same:.1%} |", flush=True)


def make_model(path: Path, max_tokens: int) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = SHAPE | {"max_position_embeddings": max_tokens}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.to(torch.bfloat16).save_pretrained(path)


def load_filled(path: Path, budget: int, max_tokens: int, threads: int) -> ModelRunner:
    """A runner whose pool is filled with random numbers."""
    memory = (max_tokens // 16 + 16) * 16 * 30 * 2 * 3 * 64 * 2
    config = config_of(path, budget, threads=threads, max_context_tokens=max_tokens, kv_memory_bytes=memory)
    runner = ModelRunner.load(config)
    backend: Any = runner.backend
    backend._cache.tensor.normal_(generator=torch.Generator().manual_seed(1))
    return runner


def step_times(runners: Sequence[ModelRunner], context: int, num_steps: int) -> Iterator[list[float]]:
    """Seconds of a decode's step by each runner, one after the other."""
    prompt = torch.randint(1, SHAPE["vocab_size"], (context,), generator=torch.Generator().manual_seed(2)).tolist()
    sequences = [decoding(prompt, runner.layout.block_size) for runner in runners]
    for sequence in sequences:
        sequence.num_computed = context
        sequence.token_ids.append(7)
    for _ in range(num_steps):
        times: list[float] = []
        for runner, sequence in zip(runners, sequences, strict=True):
            start = time.perf_counter()
            (token,) = runner.launch(Batch([ScheduledSequence(sequence, 1)], 1)).tokens()
            times.append(time.perf_counter() - start)
            sequence.num_computed += 1
            sequence.token_ids.append(token.token_id)
        yield times


def measure_speed(threads: int, contexts: Sequence[int], budgets: Sequence[int], num_steps: int) -> None:
    max_tokens = max(contexts) + num_steps + 16
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), max_tokens)
        runners = [load_filled(Path(folder), budget, max_tokens, threads) for budget in (0, *budgets)]
    print(f"{threads} threads, {num_steps} steps; the first step with a context reads all its keys for their bounds\n")
    print("| context | full |" + "".join(f" {budget} | ratio |" for budget in budgets) + " first step |")
    print("|---|" + "---|" * (2 + 2 * len(budgets)))
    for context in contexts:
        first, *later = step_times(runners, context, num_steps)
        full, *sparse = (statistics.median(of) * 1e3 for of in zip(*later, strict=True))
        cells = "".join(f" {own:.1f} ms | {full / own:.2f} |" for own in sparse)
        print(f"| {context:,} | {full:.1f} ms |{cells} {first[1] * 1e3:.0f} ms |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["error", "speed"], default=["error", "speed"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=4, help="of examples/tiny")
    parser.add_argument("--budgets", type=int, nargs="*", default=[512, 2048], help="of the 135 M shape, tokens")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if "error" in args.what:
        measure_error(args.rows, ERROR_BUDGETS)
    if "speed" in args.what:
        measure_speed(args.threads, args.contexts, args.budgets, min(args.steps, DECODED))


if __name__ == "__main__":
    main()
