"""Simulator against an engine that speculates, on this machine: the same requests, drafts of the same acceptance.

    python -m benchmarks.simulator.speculation_simulated [--model DIR] [--batch 1 4] [--acceptance 0 0.5 0.9]
                                                         [--threads N] [--repeat 3]

An engine without a server decodes with drafts of which each token is accepted with a set probability, and without
drafts. The simulator's profile is of the step logs of these runs, as `diptych profile` makes it. TPOT is a batch's time
over the tokens of a sequence: of all requests, from the first tokens on.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.engine.speculation import NUM_NEW, NUM_PROMPT, TINY
from diptych.cluster.common.config_file import build
from diptych.cluster.simulate.build import Hardware, simulate
from diptych.cluster.simulate.load import SimulatedRequest
from diptych.cluster.simulate.profile import Profile, make_profile
from diptych.workers.common.cores import bind_this_thread, usable_cores
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.sequence import Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.engine.step_log import open_step_log
from diptych.workers.server.worker import load_runner
from diptych.workers.speculation.speculator import Speculator
from diptych.workers.speculation.synthetic import SyntheticProposer

MAX_DRAFT = 8
PLAIN = "none"
NUM_SIMULATED = 40  # batches: the variation of steps is drawn for each


class MeasuredEngine:
    """A worker's runner and scheduler, whose steps are logged."""

    def __init__(self, args: argparse.Namespace, log_folder: Path) -> None:
        cores = usable_cores()[: args.threads]
        settings = {"prefix_cache": False, "kv_memory_bytes": 1 << 30, "step_log": str(log_folder)}
        self.config = WorkerConfig.of(
            str(args.model), threads=args.threads, cores=cores if len(cores) == args.threads else None, **settings
        )
        self.runner = load_runner(self.config, lambda _: None)
        bind_this_thread(self.config.cores)
        self._log = open_step_log(self.config, self.runner, "engine")

    def close(self) -> None:
        assert self._log is not None
        self._log.close()

    def run(self, batch: int, seed: int, drafter: Speculator | None) -> tuple[float, list[list[int]]]:
        """Return TPOT (s), and the answers."""
        engine = Engine(self.runner, self.config.device_scheduler, prefix_cache=False, drafter=drafter)
        engine.steps.log = self._log
        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(3, self.runner.info.vocab_size, (batch, NUM_PROMPT), generator=generator).tolist()
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
        for i, ids in enumerate(prompts):
            engine.submit(f"0/{i}", Request(str(i), tuple(ids), replace(sampling, seed=i), 600.0), [])
        answers: dict[str, list[int]] = {f"0/{i}": [] for i in range(batch)}
        times: dict[str, list[float]] = {key: [] for key in answers}
        while engine.scheduler.has_work:
            output = engine.step()
            now = time.perf_counter()
            for event in output.tokens:
                answers[event.key].append(event.token_id)
                times[event.key].append(now)
        return statistics.mean((of[-1] - of[0]) / (len(of) - 1) for of in times.values()), list(answers.values())


def measure(engine: MeasuredEngine, batch: int, acceptance: float, num_turns: int) -> tuple[float, float]:
    """Return the medians of TPOT (s) without and with drafts; the first turn, in which the drafter learns, is left
    out."""
    known: dict[str, list[int]] = {}

    def target(sequence: Sequence, num_tokens: int) -> list[int]:
        start = sequence.num_output
        return known[sequence.request_id][start : start + num_tokens]

    drafter = Speculator("synthetic", SyntheticProposer(target, acceptance), MAX_DRAFT)
    pairs: list[tuple[float, float]] = []
    for turn in range(num_turns + 1):
        plain_s, answers = engine.run(batch, turn, None)
        known.update({str(i): answer for i, answer in enumerate(answers)})
        drafted_s, _ = engine.run(batch, turn, drafter)
        pairs += [(plain_s, drafted_s)] if turn else []
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def simulated(args: argparse.Namespace, measured: Profile, batch: int, acceptance: float | None) -> float:
    """TPOT (s). acceptance: None: without drafts. Batches come one after the other, as to the engine."""
    pool = {"replicas": 1, "threads": args.threads, "speculation": PLAIN if acceptance is None else "ngram"}
    config = build({"model": str(args.model), "pools": {"mixed": pool | {"max_draft_tokens": MAX_DRAFT}}})
    load = [
        SimulatedRequest(turn * batch + i, 600.0 * turn, NUM_PROMPT, NUM_NEW)
        for turn in range(NUM_SIMULATED)
        for i in range(batch)
    ]
    figures = simulate(config, replace(Hardware.of(measured), acceptance=acceptance), load)
    return figures.spreads["tpot"].mean / 1e3


def report(args: argparse.Namespace, rows: SequenceOf[tuple[int, float, float, float]], measured: Profile) -> None:
    print("batch acceptance     without, ms        with drafts, ms     gain")
    for batch, acceptance, plain_s, drafted_s in rows:
        found = [simulated(args, measured, batch, each) for each in (None, acceptance)]
        texts = [
            f"{mine * 1e3:6.2f} / {real * 1e3:6.2f} {mine / real - 1:+5.0%}"
            for mine, real in zip(found, (plain_s, drafted_s), strict=True)
        ]
        gains = f"{found[0] / found[1]:.2f} / {plain_s / drafted_s:.2f}"
        print(f"{batch:5} {acceptance:10g} {texts[0]} {texts[1]}  {gains}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.9])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = MeasuredEngine(args, Path(folder))
        rows = [(b, a, *measure(engine, b, a, args.repeat)) for b in args.batch for a in args.acceptance]
        engine.close()
        measured = make_profile(Path(folder))
    (worker,) = measured.workers
    print(f"{args.model.name}, {args.threads} threads; weights of a step, µs:", [w * 1e6 for w in worker.weights])
    print("simulated / measured")
    report(args, rows, measured)


if __name__ == "__main__":
    main()
