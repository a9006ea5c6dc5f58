"""Measures what drafts cost beside the steps that verify them, on the shipped model or another.

    python -m benchmarks.engine.draft_costs [--method eagle3 mtp] [--batch 1 4 16] [--depth 4] [--steps 600]
                                            [--threads 1] [--dtype bfloat16] [--model DIR]

Microseconds of processor time of the engine's thread, so that other work on the machine counts little; with one thread
it computes all. `pass`: the time of a draft of `depth` tokens, by `depth`, by compiled kernels and by torch (then the
target too); median. `idle`: a step with a drafter for which no draft pays, beside one without: two engines take steps
in random order, in one process; the mean of the faster nine tenths of each.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import torch

from diptych.workers.common.cores import bind_this_thread, usable_cores
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.draft import Draft, ModelDrafts, ModelProposer, Proposer
from diptych.workers.core.draft_kv import DraftKV
from diptych.workers.core.drafting import Drafter
from diptych.workers.core.sequence import Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.model_runner import ModelRunner
from diptych.workers.server.worker import load_runner
from diptych.workers.speculation.methods import PROPOSERS
from diptych.workers.speculation.model_speculator import ModelSpeculator
from diptych.workers.speculation.speculator import Speculator
from diptych.workers.speculation.synthetic import another

EXAMPLES = Path(__file__).parents[2] / "examples"
DRAFTS = {"draft": "tiny_draft", "eagle3": "tiny_eagle3", "mtp": "tiny_mtp"}
NUM_PROMPT, NUM_NEW = 64, 1024


class Timed:
    """A ModelProposer: another one, whose drafts it times."""

    def __init__(self, proposer: ModelProposer) -> None:
        self._proposer = proposer
        self.pass_s: list[float] = []  # of each draft, the mean, with all that is beside passes

    @property
    def num_anew(self) -> int:
        return self._proposer.num_anew

    def attach(self, kv: DraftKV | None) -> None:
        self._proposer.attach(kv)

    def may_draft(self, sequence: Sequence) -> bool:
        return self._proposer.may_draft(sequence)

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> ModelDrafts:
        began = time.thread_time()
        made = self._proposer.propose(wanted)
        self.pass_s.append((time.thread_time() - began) / max(depth for _, depth in wanted))
        return made

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        self._proposer.verified(sequence, num_accepted)

    def ended(self, sequence: Sequence) -> None:
        self._proposer.ended(sequence)


class Always(ModelSpeculator):
    """Drafter that takes all steps to be equally slow, so that it always drafts."""

    def measured(self, num_rows: int, seconds: float) -> None:
        super().measured(num_rows, 1.0)


class Unpaid(ModelSpeculator):
    """Drafter of a model whose passes are as slow as a second: it decides as it does where no draft pays."""

    def __init__(self, method: str, proposer: ModelProposer, depth: int) -> None:
        super().__init__(method, proposer, depth)
        for num in (1, 256):
            self._passes.add(num, 1.0)


class Wrong:
    """A Proposer: another one, with other tokens."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        draft = self._proposer.propose(sequence, max_tokens)
        return Draft([another(token_id) for token_id in draft.token_ids], draft.chances)

    def ended(self, sequence: Sequence) -> None:
        self._proposer.ended(sequence)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._cores = args, usable_cores()[: args.threads]

    def runner(self, method: str | None, isa: str = "auto") -> ModelRunner:
        config = WorkerConfig.of(
            self._args.model,
            dtype=self._args.dtype,
            threads=self._args.threads,
            cores=self._cores if len(self._cores) == self._args.threads else None,
            prefix_cache=False,
            kv_memory_bytes=1 << 28,
            cpu_isa=isa,
        )
        if method in DRAFTS:
            config = config.changed(speculation=method, draft_model=str(EXAMPLES / DRAFTS[method]))
        self._scheduler = config.device_scheduler
        runner = load_runner(config, lambda _: None)
        bind_this_thread(config.cores)
        return runner

    def engine(self, runner: ModelRunner, drafter: Drafter | None, batch: int) -> Engine:
        """Build an engine whose sequences all decode."""
        engine, generator = Engine(runner, self._scheduler, prefix_cache=False, drafter=drafter), torch.Generator()
        generator.manual_seed(batch)
        for i in range(batch):
            ids = torch.randint(3, runner.info.vocab_size, (NUM_PROMPT,), generator=generator).tolist()
            sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
            engine.submit(f"0/{i}", Request(str(i), tuple(ids), sampling, 3600.0), [])
        for _ in range(8):
            engine.step()
        return engine

    def pass_us(self, method: str, isa: str, batch: int) -> float:
        runner = self.runner(method, isa)
        assert runner.proposer is not None
        timed = Timed(runner.proposer)
        drafter = Always(method, timed, self._args.depth)
        for rows in range(1, 200):
            drafter.measured(rows, 1.0)
        engine = self.engine(runner, drafter, batch)
        while engine.scheduler.has_work and len(timed.pass_s) < self._args.steps // 4:
            engine.step()
        return statistics.median(timed.pass_s) * 1e6

    def idle_us(self, method: str, batch: int) -> tuple[float, float]:
        """Processor time of a step without a drafter, and what one that drafts nothing adds."""
        plain, drafting = self.runner(None), self.runner(method)
        if drafting.proposer is None:
            drafter: Drafter = Speculator(method, Wrong(PROPOSERS[method]()), self._args.depth)
        else:
            drafter = Unpaid(method, drafting.proposer, self._args.depth)
        engines = self.engine(plain, None, batch), self.engine(drafting, drafter, batch)
        pairs: list[tuple[Engine, list[float]]] = [(engine, []) for engine in engines]
        rng = random.Random(1)
        for _ in range(self._args.steps):
            for engine, found in rng.sample(pairs, 2):
                began = time.thread_time()
                engine.step()
                found.append(time.thread_time() - began)
        without, beside = (statistics.mean(sorted(found)[: 9 * len(found) // 10]) for _, found in pairs)
        return without * 1e6, (beside - without) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", choices=(*DRAFTS, *PROPOSERS), default=["eagle3", "mtp"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", type=Path, default=EXAMPLES / "tiny")
    bench = Bench(args := parser.parse_args())
    print("method batch  pass: compiled    torch   idle: a step    added")
    for method in args.method:
        for batch in args.batch:
            isas = ("auto", "none") if method in DRAFTS else ()
            compiled, plain = (f"{bench.pass_us(method, isa, batch):.0f}" for isa in isas) if isas else ("", "")
            step, added = bench.idle_us(method, batch)
            print(f"{method:>6} {batch:5} {compiled:>15} {plain:>8} {step:15.0f} {added:8.1f}", flush=True)


if __name__ == "__main__":
    main()
