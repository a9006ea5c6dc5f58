"""Measures the cost of sharing experts: a group of workers that each hold some of them, against as many that hold all.

    python -m benchmarks.serving.data_parallel [--workers 2] [--sequences 1 8] [--tokens 64] [--repeat 3] [--json FILE]

Real worker processes, one thread and core each, by torch in bfloat16; a random Mixtral of 8 layers, 8 experts, hidden
size 512. Each worker answers so many sequences at once; a figure is the median time from one token to the next, over
all sequences of all workers, as their routers see it. "one busy": the others of the group have no requests, and compute
for it alone. Kinds take turns; the ratio is of medians over the turns.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from diptych.cluster.routing.fleet import WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.workers.common.request import Request, SamplingParams

from ..transfer.overlap import worker

PROMPT_TOKENS = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def make_checkpoint(path: Path) -> None:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(MixtralConfig(**SHAPE))
    model.to(torch.bfloat16).save_pretrained(path)


@contextmanager
def started(model: Path, num_workers: int, rendezvous: Path | None) -> Generator[list[WorkerInfo]]:
    """A group that meets there, or workers of their own."""
    plain: dict[str, Any] = {"cpu_isa": "none"}  # as those that share experts compute
    group = {"data_parallel": num_workers, "rendezvous": str(rendezvous)}
    each = [plain if rendezvous is None else plain | group | {"data_rank": rank} for rank in range(num_workers)]
    with ExitStack() as stack, ThreadPoolExecutor(num_workers) as pool:  # those of a group wait for each other
        contexts = [worker(model, "mixed", core, **settings) for core, settings in enumerate(each)]
        yield list(pool.map(stack.enter_context, contexts))


async def answer(router: Router, number: int, num_tokens: int) -> list[float]:
    """Seconds from each token to the next."""
    prompt = random.Random(number).choices(range(1, SHAPE["vocab_size"]), k=PROMPT_TOKENS)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    times: list[float] = []
    async for delta in router.stream(Request(f"request-{number}", tuple(prompt), sampling, timeout_s=600.0)):
        times += [time.perf_counter()] * len(delta.token_ids)
    return [b - a for a, b in itertools.pairwise(times)]


async def median_gap(workers: Sequence[WorkerInfo], num_sequences: int, num_tokens: int) -> float:
    async with AsyncExitStack() as stack:
        routers: list[Router] = []
        for info in workers:
            router = Router(RoutingConfig())
            await router.start()
            stack.push_async_callback(router.stop)
            router.update_fleet([info])
            routers.append(router)
        numbers = itertools.count()
        calls = [answer(router, next(numbers), num_tokens) for router in routers for _ in range(num_sequences)]
        return statistics.median(itertools.chain.from_iterable(await asyncio.gather(*calls)))


async def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    make_checkpoint(folder / "model")
    found: list[dict[str, object]] = []
    with (
        started(folder / "model", args.workers, folder / "rendezvous") as group,
        started(folder / "model", args.workers, None) as alone,
    ):
        kinds = {"shared": group, "all each": alone, "shared, one busy": group[:1], "all each, one busy": alone[:1]}
        for num_sequences in args.sequences:
            gaps: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(args.repeat + 1):
                for kind, workers in kinds.items():
                    gap = await median_gap(workers, num_sequences, args.tokens)
                    if turn:  # the first touches memory
                        gaps[kind].append(gap)
            row = {kind: statistics.median(of) * 1e3 for kind, of in gaps.items()}
            figures = ", ".join(f"{kind} {ms:.1f}" for kind, ms in row.items())
            print(f"{num_sequences} sequences a worker, ms a token: {figures}")
            print(f"  shared: {row['shared'] / row['all each']:.2f} of all each", flush=True)
            found.append({"sequences": num_sequences, **row})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8], help="of each worker")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args, Path(folder)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
