"""Measures the precision that a narrower wire costs: the KV's relative error, and whether a model's answers stay the
same.

    python -m benchmarks.transfer.wire_dtype [--model DIR] [--prompts 32] [--tokens 32] [--json]

Error: relative L2 of each vector of head_dim numbers, standard normal, as it is after a wire dtype: the largest of all
vectors and the mean. Agreement: prompts of random ids are prefilled by one ModelRunner of --model; their KV goes over
the wire format into another pool; both go on greedily. Tokens agree up to the first that differs.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.sequence import Batch, ScheduledSequence, Sequence
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.kv.bridge import Bridge
from diptych.workers.kv.dtypes import vector_bytes
from diptych.workers.kv.memory import KVMemory
from diptych.workers.kv.segment import Read, Segment
from diptych.workers.kv.wire import narrow, widen
from diptych.workers.transport.runs import gather

TINY = Path(__file__).parents[2] / "examples" / "tiny"
NUM_VECTORS = 1 << 16
HEAD_DIMS = (64, 128)
PAIRS = (("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8"))  # cache, wire


@dataclass(frozen=True)
class Precision:
    cache: str
    wire: str
    head_dim: int
    bytes_of_cache: float  # share of the cache's bytes that travel
    mean_error: float
    max_error: float


@dataclass(frozen=True)
class Agreement:
    cache: str
    wire: str
    num_tokens: int
    agreeing: float  # share of the tokens before the first that differs
    whole_answers: float  # share of the prompts without any


def precision(cache: str, wire: str, head_dim: int) -> Precision:
    values = np.random.default_rng(0).standard_normal((NUM_VECTORS, head_dim), dtype=np.float32)
    data = values.tobytes() if cache == "float32" else narrow(values.tobytes(), "float32", "bfloat16", head_dim)
    exact = widen(data, cache, "float32", head_dim)
    found = widen(narrow(data, cache, wire, head_dim), wire, "float32", head_dim)
    errors = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    share = vector_bytes(wire, head_dim) / vector_bytes(cache, head_dim)
    return Precision(cache, wire, head_dim, share, float(errors.mean()), float(errors.max()))


def load(model: Path, dtype: str) -> ModelRunner:
    return ModelRunner.load(WorkerConfig.of(model, dtype=dtype, kv_memory_bytes=32 << 20))


def sequence_of(prompt: list[int], table: list[int]) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    request = Request("r", tuple(prompt), sampling, timeout_s=60.0)
    sequence = Sequence("0/1", request, list(prompt), len(prompt), deadline=1e9, arrival=0)
    sequence.block_table = table
    return sequence


def step(runner: ModelRunner, sequence: Sequence) -> int:
    num_new = len(sequence.token_ids) - sequence.num_computed
    [sampled] = runner.launch(Batch([ScheduledSequence(sequence, num_new)])).tokens()
    sequence.num_computed += num_new
    sequence.token_ids.append(sampled.token_id)
    return sampled.token_id


def move(source: KVMemory, ours: KVMemory, table: list[int], wire: str) -> None:
    """A table's KV into the same blocks of ours, by way of the wire."""
    layout, blocks = source.layout, tuple(table)
    bridge = Bridge(ours, layout, source.num_blocks, wire)
    segment = Segment(0, blocks, (1,) * len(blocks), 0, layout.num_layers)
    read = Read(0, segment, blocks, 0)
    assert source.region.view is not None
    for part in bridge.parts(segment, whole_blocks=True):
        runs = source.runs(part.block_ids, part.first_layer, part.num_layers)
        raw = b"".join(gather(source.region.view, runs, 1 << 20))
        data = raw if wire == layout.dtype else narrow(raw, layout.dtype, wire, layout.head_dim)
        bridge.convert(memoryview(data), part, read.table, 0)


def agreement(model: Path, cache: str, wire: str, num_prompts: int, num_tokens: int) -> Agreement:
    one, other = load(model, cache), load(model, cache)
    rng = np.random.default_rng(1)
    num_agreeing = num_whole = 0
    for _ in range(num_prompts):
        prompt = rng.integers(1, one.info.vocab_size, int(rng.integers(8, 128))).tolist()
        table = list(range(one.layout.num_blocks_for(len(prompt) + num_tokens)))
        here, there = sequence_of(prompt, table), sequence_of(prompt, table)
        first = step(one, here)
        move(one.memory, other.memory, table, wire)
        there.num_computed = len(prompt)
        there.token_ids.append(first)
        pairs = [(step(one, here), step(other, there)) for _ in range(num_tokens)]
        num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), num_tokens)
        num_agreeing += num_same
        num_whole += num_same == num_tokens
    total = num_prompts * num_tokens
    return Agreement(cache, wire, total, num_agreeing / total, num_whole / num_prompts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    precisions = [precision(cache, wire, dim) for cache, wire in PAIRS for dim in HEAD_DIMS]
    agreements = [agreement(args.model, cache, wire, args.prompts, args.tokens) for cache, wire in PAIRS]
    if args.json:
        print(json.dumps({"precision": [asdict(p) for p in precisions], "agreement": [asdict(a) for a in agreements]}))
        return 0
    print("cache     wire      head_dim  bytes  mean error  max error")
    for p in precisions:
        print(
            f"{p.cache:9} {p.wire:9} {p.head_dim:8} {p.bytes_of_cache:6.3f}  {p.mean_error:10.2e}  {p.max_error:9.2e}"
        )
    print("\ncache     wire      tokens  agreeing  whole answers")
    for a in agreements:
        print(f"{a.cache:9} {a.wire:9} {a.num_tokens:6}  {a.agreeing:8.1%}  {a.whole_answers:13.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
