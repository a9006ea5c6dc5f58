"""Engine steps in one process against transformers' `generate`, on the same checkpoint, dtype and threads.

    python benchmarks/engine.py [--model DIR] [--dtype bfloat16] [--repeat 5] [--json FILE]

Both run in turn (ours, theirs, ours, ...) and the ratio is of the medians. `decode` is the time of one step with the
prompt already computed; `prefill` the time to the first token. transformers runs a static batch of equal prompts, its
best case; the engine runs the same requests through its scheduler, paged cache and sampler.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from diptych.workers.engine import Engine
from diptych.workers.model_runner import ModelRunner, ModelRunnerConfig
from diptych.workers.request import Request, SamplingParams
from diptych.workers.scheduler import SchedulerConfig

TINY = Path(__file__).parents[1] / "examples" / "tiny"
# name: (batch, prompt tokens, new tokens)
WORKLOADS = {"decode-1": (1, 192, 64), "decode-16": (16, 192, 64), "prefill-512": (1, 512, 1)}


@dataclass(frozen=True)
class Row:
    workload: str
    ours_ms: float
    transformers_ms: float

    @property
    def ratio(self) -> float:
        return self.transformers_ms / self.ours_ms


def prompts(batch: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (batch, num_tokens), generator=generator).tolist()


def ours(engine: Engine, batch: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """(seconds to the first tokens, seconds of a later step)."""
    for i, prompt in enumerate(batch):
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        engine.submit(f"0/{i}", Request(str(i), tuple(prompt), sampling, 600.0), [])
    start = time.perf_counter()
    num_first = 0
    while num_first < len(batch):
        num_first += sum(t.position == 0 for t in engine.step().tokens)
    first = time.perf_counter()
    num_steps = 0
    while engine.scheduler.has_work:
        engine.step()
        num_steps += 1
    return first - start, (time.perf_counter() - first) / max(num_steps, 1)


def theirs(model: Callable[..., torch.Tensor], batch: list[list[int]], new_tokens: int) -> tuple[float, float]:
    ids = torch.tensor(batch)

    def generate(num: int) -> float:
        start = time.perf_counter()
        model(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, min_new_tokens=num, do_sample=False)
        return time.perf_counter() - start

    first = generate(1)
    return first, (generate(new_tokens) - first) / (new_tokens - 1) if new_tokens > 1 else first


def measure(name: str, engine: Engine, model: Callable[..., torch.Tensor], vocab_size: int, repeat: int) -> Row:
    batch_size, num_prompt, new_tokens = WORKLOADS[name]
    which = 0 if name.startswith("prefill") else 1
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(repeat + 1):
        batch = prompts(batch_size, num_prompt, vocab_size, seed=i)
        pair = ours(engine, batch, new_tokens)[which], theirs(model, batch, new_tokens)[which]
        if i:  # the first round warms both up
            times[0].append(pair[0])
            times[1].append(pair[1])
    return Row(name, 1e3 * statistics.median(times[0]), 1e3 * statistics.median(times[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runner = ModelRunner.load(ModelRunnerConfig(args.model, dtype=args.dtype))
    engine = Engine(runner, SchedulerConfig(), prefix_cache=False)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    print(f"{args.model.name}, {args.dtype}, {torch.get_num_threads()} threads, median of {args.repeat}")
    print(f"{'workload':<12} {'ours ms':>9} {'transformers ms':>16} {'ratio':>6}")
    rows = [measure(name, engine, model.generate, runner.info.vocab_size, args.repeat) for name in WORKLOADS]
    for row in rows:
        print(f"{row.workload:<12} {row.ours_ms:9.2f} {row.transformers_ms:16.2f} {row.ratio:6.2f}")
    if args.json:
        args.json.write_text(json.dumps([asdict(r) | {"ratio": r.ratio} for r in rows], indent=2))


if __name__ == "__main__":
    main()
