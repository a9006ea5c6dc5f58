"""Accuracy of a model in few bits: perplexity, and how often its first choice is that of the plain model.

    python -m benchmarks.engine.accuracy [NAME ...] [--kv-dtype int8] [--json FILE]

Of the shipped model, text of its own kind that it was not taught: chats, questions and stories by another seed than its
training's, as its template has them. Calibration has a third seed. What counts is the tokens that the model was taught
to say (what users say cannot be foretold), each context once: texts begin alike, and one tie there would count often.
With --model, --text and --calibrate give the texts, and all their tokens count.

Everything is computed by an engine as a worker has it, prompts a chunk at a time: `at load` rows by --quantize, others
from checkpoints that `diptych quantize` writes.
"""

import argparse
import json
import math
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray
from tokenizers import Tokenizer

from diptych.workers.common.prompt_logprobs import PromptLogprobs
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.engine.engine import Engine
from diptych.workers.models.plan.formats import QUANTIZE
from diptych.workers.models.plan.quantize_job import WRITTEN, QuantizeJob
from diptych.workers.quantize.calibration_text import read_sequences
from diptych.workers.quantize.job import quantise
from diptych.workers.server.worker import load_runner

TINY = Path(__file__).parents[2] / "examples" / "tiny"
CALIBRATION_SEED, HELD_OUT_SEED = 1001, 2002
NUM_CALIBRATION_TEXTS = 256
MAX_CONTEXT = 1024


@dataclass(frozen=True)
class Variant:
    """A way of making the model."""

    format: str | None = None  # that a checkpoint is written in; None: the model as it is
    method: str | None = None
    quantize: str | None = None  # at load


VARIANTS = {
    "plain": Variant(),
    **{f"{name} at load": Variant(quantize=name) for name in QUANTIZE},
    **{f"{name} {method}": Variant(name, method) for name, written in WRITTEN.items() for method in written.methods},
}


@dataclass(frozen=True)
class HeldOutText:
    """Sequences of token ids, and which of the tokens after the first count."""

    sequences: list[list[int]]
    counted: list[NDArray[np.bool_]]

    @classmethod
    def of(cls, sequences: list[list[int]], wanted: list[list[bool]]) -> "HeldOutText":
        """wanted: of all tokens; of those with one context, the first counts."""
        contexts, counted = set[tuple[int, ...]](), list[NDArray[np.bool_]]()
        for ids, own in zip(sequences, wanted, strict=True):
            each = [tuple(ids[:i]) for i in range(1, len(ids))]
            counted.append(
                np.array([is_wanted and of not in contexts for of, is_wanted in zip(each, own[1:], strict=True)])
            )
            contexts.update(each)
        return cls(sequences, counted)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that count."""
        return sum(int(of.sum()) for of in self.counted)


@dataclass(frozen=True)
class AccuracyRow:
    name: str
    perplexity: float
    agreement: float  # share of these tokens at which its first choice is the plain model's
    megabytes: float  # of the checkpoint's tensors, or of the plain one's

    def show(self) -> None:
        print(f"{self.name:<18} {self.perplexity:10.4f} {self.agreement:9.2%} {self.megabytes:9.2f}", flush=True)


def documents(seed: int) -> Iterator[str]:
    """Texts of the shipped model's kind, with its template's marks, without an end."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from diptych.examples.training.documents import Documents
    from diptych.examples.training.facts import load_facts, load_words
    from diptych.examples.training.packing import render

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    words, rng = load_words(), random.Random(seed)
    return (render(each, tokenizer, rng) for each in Documents(load_facts(words), words).stream(seed))


def own_text(num: int) -> HeldOutText:
    """Held-out text of the shipped model."""
    from diptych.examples.training.packing import IGNORED, label

    tokenizer, texts = Tokenizer.from_file(str(TINY / "tokenizer.json")), islice(documents(HELD_OUT_SEED), num)
    sequences = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    sequences = [ids[:MAX_CONTEXT] for ids in sequences if len(ids) > 1]
    return HeldOutText.of(sequences, [[of != IGNORED for of in label(ids)] for ids in sequences])


def engine_of(model: Path, variant: Variant, args: argparse.Namespace, kv_dtype: str = "auto") -> Engine:
    config = WorkerConfig.of(
        str(model),
        dtype=args.dtype,
        threads=args.threads,
        quantize=variant.quantize,
        max_context_tokens=MAX_CONTEXT + 1,
        prefix_cache=False,
        kv_memory_bytes=256 << 20,
        kv_dtype=kv_dtype,
    )
    return Engine(load_runner(config, lambda _: None), config.device_scheduler, prefix_cache=False)


def scored(engine: Engine, sequences: Sequence[Sequence[int]]) -> list[PromptLogprobs]:
    """Log-probabilities of every token after the first of each sequence, with the likeliest in its place."""
    for i, ids in enumerate(sequences):
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
        engine.submit(f"0/{i}", Request(str(i), tuple(ids), sampling, 3600.0), [])
    parts: dict[str, list[PromptLogprobs]] = {}
    while engine.scheduler.has_work or engine.steps:
        for key, of in engine.step().prompt_logprobs:
            parts.setdefault(key, []).append(of)
    return [PromptLogprobs.joined(parts[f"0/{i}"]) for i in range(len(sequences))]


class AccuracyBench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._calibrate: Path | None = args.calibrate
        if args.text is None:
            self.text = own_text(args.sequences)
            self._calibrate = folder / "calibration.jsonl"
            texts = islice(documents(CALIBRATION_SEED), NUM_CALIBRATION_TEXTS)
            lines = (json.dumps({"text": text}) for text in texts)
            self._calibrate.write_text("\n".join(lines))
        else:
            sequences = read_sequences(args.model, args.text, args.sequences, MAX_CONTEXT, 1 << 31)
            self.text = HeldOutText.of(sequences, [[True] * len(ids) for ids in sequences])
        self._plain = [of.top_ids[:, 0] for of in scored(engine_of(args.model, Variant(), args), self.text.sequences)]

    def measure(self, name: str) -> AccuracyRow:
        variant = VARIANTS[name]
        model, num_bytes = self._made(name, variant)
        loss, num_same = 0.0, 0
        found = scored(engine_of(model, variant, self._args, self._args.kv_dtype), self.text.sequences)
        for of, counted, plain in zip(found, self.text.counted, self._plain, strict=True):
            loss -= float(of.logprobs[counted].astype(np.float64).sum())
            num_same += int((of.top_ids[:, 0] == plain)[counted].sum())
        num = self.text.num_tokens
        return AccuracyRow(name, math.exp(loss / num), num_same / num, num_bytes / 1e6)

    def _made(self, name: str, variant: Variant) -> tuple[Path, int]:
        """Return the folder of the model, and the bytes of its tensors."""
        source: Path = self._args.model
        if variant.format is None:
            return source, sum(path.stat().st_size for path in source.glob("*.safetensors"))
        out = self._folder / name.replace(" ", "-")
        calibrate = None if variant.method == "rtn" else str(self._calibrate)
        job = QuantizeJob(str(source), str(out), variant.format, calibrate, variant.method, samples=128)
        return out, quantise(job, psutil.virtual_memory().available).num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(VARIANTS)}  [default: all]")
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--text", type=Path, help="held-out text, for --model")
    parser.add_argument("--calibrate", type=Path, help="calibration text, for --model")
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kv-dtype", default="auto", help="of the rows; the plain model has KV at full width")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := set(args.names) - set(VARIANTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if args.model != TINY and (args.text is None or args.calibrate is None):
        parser.error("--model needs --text and --calibrate")
    with tempfile.TemporaryDirectory() as folder:
        bench = AccuracyBench(args, Path(folder))
        print(f"{args.model.name}, {args.dtype}, {len(bench.text.sequences)} texts, {bench.text.num_tokens:,} tokens")
        print(f"{'':<18} {'perplexity':>10} {'agreement':>9} {'MB':>9}")
        rows: list[AccuracyRow] = []
        for name in args.names or VARIANTS:
            rows.append(bench.measure(name))
            rows[-1].show()
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
