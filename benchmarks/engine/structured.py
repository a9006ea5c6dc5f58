"""Cost of grammars to an engine: output tokens per second with a JSON schema on every request, and without.

    python -m benchmarks.engine.structured [--model DIR] [--schema records|forms] [--batch 16] [--threads N]
                                           [--look-ahead] [--json FILE]

Both kinds of batch decode the same number of tokens, in turn (without, with, without, ...), in one process: a worker's
runner, engine and sampler, without a server. The schema's answers are longer than that: of `records` most tokens are
free, of `forms`, whose names are long, the grammar forces most. `yielded` is the mean number of tokens that a sequence
gets in a step: more than 1 where a grammar forces several at once. `mask` is the time in which the
mask of one token is made, mostly while the batch is computed; `waited` is the part of it that the step waited for.
`cpu` is the ratio of the processor times of a token, without and with: it depends less on what else the machine does
(with `--threads 1`, where nobody waits for another thread).
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from diptych.workers.common.cores import bind_this_thread, usable_cores
from diptych.workers.common.request import Grammar, GrammarKind, Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.grammar.compiler import GrammarCompiler
from diptych.workers.sampling import grammar_masks
from diptych.workers.server.worker import load_runner

TINY = Path(__file__).parents[2] / "examples" / "tiny"
NUM_PROMPT, NUM_NEW = 160, 96
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["reader", "writer", "owner"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
FORM = {
    "type": "object",
    "properties": {
        "customer_number": {"type": "integer", "minimum": 0, "maximum": 999},
        "preferred_channel": {"enum": ["email", "telephone"]},
        "newsletter_subscription": {"type": "boolean"},
        "shipping_country": {"enum": ["France", "Germany", "Portugal"]},
    },
    "required": ["customer_number", "preferred_channel", "newsletter_subscription", "shipping_country"],
    "additionalProperties": False,
}


def _many(item: object) -> Grammar:
    schema = {"type": "array", "items": item, "minItems": 50, "maxItems": 60}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


SCHEMAS = {"records": _many(RECORD), "forms": _many(FORM)}


@dataclass(frozen=True)
class Row:
    temperature: float
    plain_tokens_s: float
    schema_tokens_s: float
    yielded: float  # tokens of a sequence and step, with the schema
    mask_us: float
    waited_us: float
    plain_cpu_us: float  # of a token
    schema_cpu_us: float

    @property
    def ratio(self) -> float:
        return self.schema_tokens_s / self.plain_tokens_s

    @property
    def cpu_ratio(self) -> float:
        return self.plain_cpu_us / self.schema_cpu_us

    def show(self) -> None:
        print(
            f"{self.temperature:11.1f} {self.plain_tokens_s:14.0f} {self.schema_tokens_s:14.0f} {self.ratio:6.3f} "
            f"{self.yielded:7.2f} {self.mask_us:8.1f} {self.waited_us:10.1f} {self.plain_cpu_us:9.0f} "
            f"{self.schema_cpu_us:10.0f} {self.cpu_ratio:6.3f}",
            flush=True,
        )


class MaskTimes:
    """Times of masks, noted by a wrapper around what makes them and what waits for them."""

    def __init__(self) -> None:
        self.made: list[float] = []
        self.waited: list[float] = []
        make, masks = grammar_masks.GrammarMasks.make, grammar_masks.PendingMasks.masks

        def timed_make(of: grammar_masks.GrammarMasks, rows: list[grammar_masks.MaskRow]) -> grammar_masks.Masks:
            began = time.perf_counter()
            found = make(of, rows)
            self.made.append((time.perf_counter() - began) / len(rows))
            return found

        def timed_masks(of: grammar_masks.PendingMasks) -> grammar_masks.Masks:
            began = time.perf_counter()
            found = masks(of)
            self.waited.append((time.perf_counter() - began) / len(of.rows))
            return found

        grammar_masks.GrammarMasks.make, grammar_masks.PendingMasks.masks = timed_make, timed_masks


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        cores = usable_cores()[: args.threads]
        config = WorkerConfig.of(
            str(args.model),
            dtype=args.dtype,
            threads=args.threads,
            cores=cores if len(cores) == args.threads else None,
            max_context_tokens=1024,
            prefix_cache=False,
            look_ahead=args.look_ahead,
        )
        runner = load_runner(config, lambda _: None)
        if not args.look_ahead:
            bind_this_thread(config.cores)
        self._engine = Engine(runner, config.device_scheduler, prefix_cache=False)
        self._info = runner.info
        compiler = GrammarCompiler.of_folder(args.model, runner.info.vocab_size, runner.info.eos_token_ids)
        self._schema = SCHEMAS[args.schema]
        self._grammar = compiler.compile(self._schema)
        self._times = MaskTimes()

    def measure(self, temperature: float) -> Row:
        rates: tuple[list[float], list[float]] = ([], [])
        self._num_tokens = self._num_rows = 0
        cpu_us: tuple[list[float], list[float]] = ([], [])
        for i in range(-1, self._args.repeat):  # the first round warms both up
            for side, cpu_side, grammar in zip(rates, cpu_us, (None, self._schema), strict=True):
                if i == 0:
                    self._times.made.clear()
                    self._times.waited.clear()
                rate, cpu = self._rate(temperature, grammar, seed=i + 1)
                if i >= 0:
                    side.append(rate)
                    cpu_side.append(cpu)
        plain, schema = (statistics.median(side) for side in rates)
        made, waited = (1e6 * statistics.median(times) for times in (self._times.made, self._times.waited))
        yielded = self._num_tokens / self._num_rows
        return Row(temperature, plain, schema, yielded, made, waited, *(statistics.median(side) for side in cpu_us))

    def _rate(self, temperature: float, grammar: Grammar | None, seed: int) -> tuple[float, float]:
        """Output tokens per second of a batch, after the first tokens, and microseconds of processor time a token."""
        engine, batch = self._engine, self._args.batch
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(3, self._info.vocab_size, (batch, NUM_PROMPT), generator=generator).tolist()
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(
                temperature=temperature, seed=i, max_tokens=NUM_NEW, ignore_eos=True, grammar=grammar
            )
            request = Request(str(i), tuple(prompt), sampling, 600.0)
            engine.submit(f"0/{i}", request, [], grammar=self._grammar if grammar else None)
        num_first = 0
        while num_first < batch:
            num_first += sum(token.position == 0 for token in engine.step().tokens)
        began, cpu_began, num = time.perf_counter(), time.process_time(), 0
        while engine.scheduler.has_work or engine.steps:
            tokens = engine.step().tokens
            num += len(tokens)
            if grammar is not None:
                self._num_rows += len(set(tokens.keys))
        self._num_tokens += num if grammar is not None else 0
        return num / (time.perf_counter() - began), 1e6 * (time.process_time() - cpu_began) / num


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--schema", choices=SCHEMAS, default="records")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--look-ahead", action="store_true", help="prepare a step while the one before it is computed")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    engine = f"{args.dtype}, batch {args.batch}, {args.threads} threads"
    print(f"{args.model.name}, {args.schema}, {engine}, median of {args.repeat}")
    print(
        f"{'temperature':>11} {'plain tokens/s':>14} {'schema':>14} {'ratio':>6} {'yielded':>7} {'mask us':>8} "
        f"{'waited us':>10} {'plain cpu':>9} {'schema cpu':>10} {'cpu':>6}"
    )
    rows: list[Row] = []
    for temperature in (0.0, 1.0):
        rows.append(bench.measure(temperature))
        rows[-1].show()
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
