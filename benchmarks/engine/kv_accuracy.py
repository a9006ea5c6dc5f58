"""Accuracy of KV dtypes on the shipped model: `python -m benchmarks.engine.kv_accuracy [--dtype float32]`.

Held-out text of the model's own kind (examples/training, by a seed that it was not taught with), scored by an engine as
a worker has it: chunk by chunk, so that every token attends to stored KV, its own too. Agreement: the share of tokens
whose likeliest next one is that of KV at full width. Perplexity is of all tokens, users' included, which nobody can
foretell: compare it between rows. `mean` and `largest`: of the absolute differences of log-probabilities.
"""

import argparse
import math
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from benchmarks.engine.accuracy import TINY, documents, scored
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.dtypes import GROUP as KIVI_BLOCK
from diptych.workers.kv.dtypes import KIVI, KV_DTYPES

SEED = 3003
MAX_TOKENS = 1000
GROUP = 32  # texts that are scored at once
CHUNKS = SchedulerConfig(chunk_tokens=64)


def held_out(num: int) -> list[list[int]]:
    """Token ids of `num` texts, several documents in each, so that contexts are long."""
    tokenizer, stream = Tokenizer.from_file(str(TINY / "tokenizer.json")), documents(SEED)
    texts: list[list[int]] = []
    while len(texts) < num:
        ids: list[int] = []
        while len(ids) < MAX_TOKENS:
            ids += tokenizer.encode(next(stream), add_special_tokens=False).ids
        texts.append(ids[:MAX_TOKENS])
    return texts


def measure(kv_dtype: str, dtype: str, texts: Sequence[Sequence[int]], threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each token, and the id of the likeliest in its place; of all texts, one after the other."""
    sizes = {"block_size": KIVI_BLOCK if kv_dtype == KIVI else 16, "kv_memory_bytes": 256 << 20}
    config = WorkerConfig.of(TINY, dtype=dtype, kv_dtype=kv_dtype, threads=threads, **sizes)
    runner = ModelRunner.load(config)
    groups = (texts[at : at + GROUP] for at in range(0, len(texts), GROUP))
    found = [of for group in groups for of in scored(Engine(runner, CHUNKS), group)]
    runner.close()
    return np.concatenate([of.logprobs for of in found]), np.concatenate([of.top_ids[:, 0] for of in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    texts = held_out(args.texts)
    full, likeliest = measure("auto", args.dtype, texts, args.threads)
    print(f"{TINY.name}, {args.dtype}, {len(full):,} tokens in {len(texts)} texts")
    print(f"{'KV':9} {'perplexity':>10} {'agreement':>10} {'mean':>9} {'largest':>9}")
    print(f"{args.dtype:9} {math.exp(-full.astype(np.float64).mean()):10.4f}")
    for kv_dtype in KV_DTYPES:
        logprobs, own = measure(kv_dtype, args.dtype, texts, args.threads)
        gaps, perplexity = np.abs(logprobs - full), math.exp(-logprobs.astype(np.float64).mean())
        same = (own == likeliest).mean()
        print(f"{kv_dtype:9} {perplexity:10.4f} {same:10.2%} {gaps.mean():9.5f} {gaps.max():9.4f}", flush=True)


if __name__ == "__main__":
    main()
