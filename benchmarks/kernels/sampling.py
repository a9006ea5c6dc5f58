"""Sampling by the compiled kernels beside torch: milliseconds a step, the best of several.

    python -m benchmarks.kernels.sampling [--rows 32] [--vocab 49152] [--threads 2]

Logits are normal, times --scale: at 1 nearly every token is likely, at 4 a few are, as a model's.
"""

import argparse
import time
from collections.abc import Callable

import torch

from diptych.kernels.cpu.greedy import greedy
from diptych.kernels.cpu.linear import linear, pack
from diptych.kernels.cpu.sample import RowSampler
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.sequence import Sequence
from diptych.workers.sampling.sampler import Sampler

from ..common.compiled import compiled_team

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576, help="of the head")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scale", type=float, default=4.0)
    parser.add_argument("--isa", help="instruction set; default: the best here")
    args = parser.parse_args()
    team = compiled_team(args.threads, isa=args.isa)
    logits = torch.randn(args.rows, args.vocab) * args.scale
    compiled, twin = Sampler((), RowSampler(team)), Sampler(())
    print(f"{args.rows} rows of {args.vocab} logits, {args.threads} threads, {team.library.isa}: compiled, torch (ms)")
    for name, sampling in SETTINGS.items():
        sequences = [sequence(sampling) for _ in range(args.rows)]
        ours = best(lambda of=sequences: compiled.sample(logits, of), 20)
        theirs = best(lambda of=sequences: twin.sample(logits.clone(), of), 3)
        print(f"  {name:20} {ours:8.2f} {theirs:8.2f}")
    hidden = torch.randn(args.rows, args.hidden, dtype=torch.bfloat16)
    head = pack(team, [torch.randn(args.vocab, args.hidden, dtype=torch.bfloat16)])
    print(f"  {'head, argmax alone':20} {best(lambda: greedy(team, hidden, head), 20):8.2f}")
    print(f"  {'head, all logits':20} {best(lambda: linear(team, hidden, head, out=logits), 20):8.2f}")
    team.close()


def sequence(sampling: SamplingParams) -> Sequence:
    return Sequence("0/0", Request("request", (1,), sampling, timeout_s=60.0), [1, 2], 1, deadline=1e9, arrival=0)


def best(work: Callable[[], object], times: int) -> float:
    """Milliseconds."""
    taken: list[float] = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1e3 * min(taken)


if __name__ == "__main__":
    main()
