"""Compares an answer with a KV cache and without: the same tokens, and the time of each by the length of its context.

    python -m diptych.examples.kv_cache [--model DIR] [--tokens 384] [--plot FILE]

With a cache a step computes the last token alone, and reads the keys and values of those before it. Without, it
computes all tokens again, as a transformer is written down.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..workers.common.request import Request, SamplingParams
from ..workers.config.worker_config import WorkerConfig
from ..workers.core.runner import Runner
from ..workers.core.scheduler_config import SchedulerConfig
from ..workers.engine.engine import Engine
from ..workers.execution.model_runner import ModelRunner

TINY = Path(__file__).parent / "tiny"
NUM_PROMPT = 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    seconds: list[float]  # of each token


def with_cache(runner: Runner, prompt: Sequence[int], num_tokens: int) -> Answer:
    """One request, whose KV stays."""
    engine = Engine(runner, SchedulerConfig(), prefix_cache=False)
    return _timed(engine, Request("with", tuple(prompt), _greedy(num_tokens), timeout_s=600.0))


def without_cache(runner: Runner, prompt: Sequence[int], num_tokens: int) -> Answer:
    """A request for each token: the prompt and all tokens so far are its prompt, and its KV is forgotten."""
    ids, seconds = list(prompt), list[float]()
    engine = Engine(runner, SchedulerConfig(), prefix_cache=False)
    for i in range(num_tokens):
        one = _timed(engine, Request(f"without-{i}", tuple(ids), _greedy(1), timeout_s=600.0))
        ids += one.token_ids
        seconds += one.seconds
    return Answer(ids[len(prompt) :], seconds)


def _greedy(num_tokens: int) -> SamplingParams:
    return GREEDY.of_completion(0, num_tokens)


def _timed(engine: Engine, request: Request) -> Answer:
    token_ids, seconds = list[int](), list[float]()
    engine.submit(request.request_id, request, [])
    while engine.scheduler.has_work:
        began = time.perf_counter()
        token_ids += engine.step().tokens.token_ids
        seconds.append(time.perf_counter() - began)
    return Answer(token_ids, seconds)


def plot(answers: dict[str, Answer], path: Path) -> None:
    """Draw the time of a token by the length of its context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, answer in answers.items():
        axes.plot(range(NUM_PROMPT, NUM_PROMPT + len(answer.seconds)), [1000 * s for s in answer.seconds], label=name)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("ms per token")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--plot", type=Path, help="file for a picture of the times")
    args = parser.parse_args()
    runner = ModelRunner.load(WorkerConfig.of(args.model, dtype="float32", kv_memory_bytes=64 << 20))
    prompt = torch.randint(
        3, runner.info.vocab_size, (NUM_PROMPT,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    with_cache(runner, prompt, 8)  # warms up
    answers = {
        "with a KV cache": with_cache(runner, prompt, args.tokens),
        "without": without_cache(runner, prompt, args.tokens),
    }
    first, second = answers.values()
    assert first.token_ids == second.token_ids, "the cache changed the answer"
    print(f"the same {args.tokens} tokens with and without a KV cache\n")
    print(f"{'tokens of context':>18} {'with, ms':>10} {'without, ms':>12} {'ratio':>6}")
    for end in range(args.tokens // 4, args.tokens + 1, max(args.tokens // 4, 1)):
        piece = slice(end - args.tokens // 4, end)
        by_name = [sorted(answer.seconds[piece])[args.tokens // 8] for answer in answers.values()]
        own, again = (1000 * seconds for seconds in by_name)
        print(f"{NUM_PROMPT + end:18} {own:10.2f} {again:12.2f} {again / own:6.1f}")
    if args.plot:
        plot(answers, args.plot)


if __name__ == "__main__":
    main()
