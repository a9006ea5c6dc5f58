"""Gain of an engine by speculation: output tokens per second with drafts, and without.

    python -m benchmarks.engine.speculation [--model DIR] [--method ngram] [--draft-model DIR] [--skipped-layers FILE]
                                            [--batch 1 4 16] [--acceptance 0 0.5 0.9] [--threads N] [--repeat 5]
                                            [--loads answers] [--tokens 192] [--processor-time]
                                            [--json FILE]

Both decode the same tokens (which is checked), in turn (without, with, without, ...), in one process: a worker's
runner, engine and sampler, without a server. Each turn has other requests, and the drafter lives through all of them,
as a worker's does; the first turn is not counted. With --processor-time, rates are per second of processor time of the
engine's thread, and so are the times by which a drafter decides: on a machine with other work, of one thread. Loads, of
which `--loads` without a name leaves the last kind:

    repeating  greedy answers of the model: those of a random one fall into loops, so that most drafts are accepted
    noise      answers drawn from 16 tokens at random, after prompts of such: the last tokens always occurred before,
               and what followed them then seldom follows them now
    answers    greedy answers to the questions of the shipped model, with its chat template (only if --model is tiny)
    0.7 ...    drafts of the true answer, of which each token is right with that probability (--acceptance)

`accepted`: share of the drafted tokens; `yield`: mean number of tokens that a sequence gets in a step; `of best`: of a
set probability a, the ratio beside that of the best fixed length k of drafts, by the times of steps by their rows that
the drafter measured in the same run: (1 + a + ... + a^k) · seconds(n) / seconds(n (1 + k)), n sequences.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from diptych.workers.common.cores import bind_this_thread, usable_cores
from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.config.worker_config import WorkerConfig
from diptych.workers.core.drafting import Drafter
from diptych.workers.core.sequence import Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.execution.draft.draft_model import DraftModel
from diptych.workers.execution.draft.guarded_draft import GuardedDraft
from diptych.workers.execution.draft.head_draft import HeadDraft
from diptych.workers.server.worker import load_runner
from diptych.workers.speculation.methods import make_speculator
from diptych.workers.speculation.speculator import Speculator
from diptych.workers.speculation.synthetic import SyntheticProposer

TINY = Path(__file__).parents[2] / "examples" / "tiny"
NUM_PROMPT, NUM_NEW = 256, 192
NUM_NOISE = 16  # tokens that noise is made of
QUESTIONS = ("What is the capital of France?", "Who wrote Hamlet?", "What is a prime number?", "Name three colours.")


@dataclass(frozen=True, slots=True)
class Row:
    load: str
    method: str
    batch: int
    plain: float  # output tokens per second
    drafted: float
    accepted: float
    num_yielded: float
    ratios: list[float]  # of each turn
    best: float | None = None  # ratio of the best fixed length; None: of no set probability

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch, from its first tokens to its last."""

    tokens_per_s: float
    answers: list[list[int]]
    num_drafted: int
    num_accepted: int
    num_steps: int  # of all sequences together
    num_tokens: int  # that they yielded


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        cores = usable_cores()[: args.threads]
        config = WorkerConfig.of(
            str(args.model),
            dtype=args.dtype,
            threads=args.threads,
            cores=cores if len(cores) == args.threads else None,
            prefix_cache=False,
            kv_memory_bytes=1 << 30,
            **_settings(args),
        )
        self._runner = load_runner(config, lambda _: None)
        bind_this_thread(config.cores)
        self._scheduler = config.device_scheduler
        self._clock = time.thread_time if args.processor_time else time.perf_counter

    def requests(self, load: str, batch: int, turn: int) -> list[Request]:
        """Requests of a load, other ones in each turn; those of an acceptance are `repeating`."""
        vocab_size, generator = self._runner.info.vocab_size, torch.Generator().manual_seed(1000 * turn + batch)
        greedy = SamplingParams(temperature=0.0, max_tokens=self._args.tokens, ignore_eos=True)
        if load == "answers":
            tokenizer, answer = AutoTokenizer.from_pretrained(self._args.model), replace(greedy, ignore_eos=False)
            chats = [[{"role": "user", "content": QUESTIONS[(i + turn) % len(QUESTIONS)]}] for i in range(batch)]
            prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
            return [Request(str(i), tuple(ids), answer, 600.0) for i, ids in enumerate(prompts)]
        if load == "noise":
            ids = torch.randint(3, vocab_size, (NUM_NOISE,), generator=generator)
            bias = dict.fromkeys(ids.tolist(), 100.0)
            found: list[Request] = []
            for i in range(batch):
                prompt = ids[torch.randint(NUM_NOISE, (NUM_PROMPT,), generator=generator)]
                sampling = SamplingParams(seed=i, max_tokens=self._args.tokens, ignore_eos=True, logit_bias=bias)
                found.append(Request(str(i), tuple(prompt.tolist()), sampling, 600.0))
            return found
        prompts = torch.randint(3, vocab_size, (batch, NUM_PROMPT), generator=generator).tolist()
        return [Request(str(i), tuple(ids), greedy, 600.0) for i, ids in enumerate(prompts)]

    def rows(self) -> Iterator[Row]:
        loads = self._args.loads
        if loads is None:
            loads = ["repeating", "noise"] + ["answers"] * (self._args.model.resolve() == TINY.resolve())
        for batch in self._args.batch:
            for load in loads:
                yield self._row(load, self._args.method, batch)
            for acceptance in self._args.acceptance:
                yield self._row("repeating", f"{acceptance:g}", batch)

    def _row(self, load: str, method: str, batch: int) -> Row:
        pairs: list[tuple[Run, Run]] = []
        answers: dict[str, list[int]] = {}
        drafter = self._drafter(method, answers)
        for turn in range(self._args.repeat + 1):  # the first warms both up, and the drafter learns
            requests = self.requests(load, batch, turn)
            plain = self._run(requests, None)
            answers |= {request.request_id: answer for request, answer in zip(requests, plain.answers, strict=True)}
            drafted = self._run(requests, drafter)
            assert plain.answers == drafted.answers, "drafts changed an answer"
            pairs += [(plain, drafted)] if turn else []
        rates = [statistics.median(pair[i].tokens_per_s for pair in pairs) for i in range(2)]
        ratios = [drafted.tokens_per_s / plain.tokens_per_s for plain, drafted in pairs]
        runs = [run for _, run in pairs]
        num_drafted = sum(run.num_drafted for run in runs)
        accepted = sum(run.num_accepted for run in runs) / max(num_drafted, 1)
        num_yielded = sum(run.num_tokens for run in runs) / sum(run.num_steps for run in runs)
        best = None
        if isinstance(drafter, Speculator) and method != self._args.method:
            best = best_ratio(float(method), batch, self._args.max_draft_tokens, drafter.step_s)
        return Row(load, method, batch, *rates, accepted, num_yielded, ratios, best)

    def _drafter(self, method: str, known: Mapping[str, list[int]]) -> Drafter:
        """known: true answers by request."""
        if method == self._args.method:
            proposer = self._runner.proposer
            if isinstance(proposer, GuardedDraft) and isinstance(proposer.draft, DraftModel | HeadDraft):
                proposer.draft.clock = self._clock
            return make_speculator(method, self._args.max_draft_tokens, model=proposer)

        def target(sequence: Sequence, num_tokens: int) -> list[int]:
            start = sequence.num_output
            return known[sequence.request_id][start : start + num_tokens]

        return Speculator(method, SyntheticProposer(target, float(method)), self._args.max_draft_tokens)

    def _run(self, requests: SequenceOf[Request], drafter: Drafter | None) -> Run:
        engine = Engine(self._runner, self._scheduler, prefix_cache=False, drafter=drafter, clock=self._clock)
        for request in requests:
            engine.submit(f"0/{request.request_id}", request, [])
        answers: dict[str, list[int]] = {f"0/{request.request_id}": [] for request in requests}
        num_drafted = num_accepted = num_steps = num = 0
        began = 0.0
        while engine.scheduler.has_work:
            has_begun = all(answers.values())
            began = began or (self._clock() if has_begun else 0.0)
            tokens = engine.step().tokens
            for event in tokens:
                answers[event.key].append(event.token_id)
                num_drafted += event.num_drafted
                num_accepted += event.num_accepted
            num_steps += len(set(tokens.keys)) if has_begun else 0
            num += len(tokens) if has_begun else 0
        rate = num / (self._clock() - began)
        return Run(rate, list(answers.values()), num_drafted, num_accepted, num_steps, num)


def best_ratio(acceptance: float, batch: int, max_tokens: int, step_s: Callable[[int], float]) -> float:
    """Tokens per second with the best fixed length of drafts over those without. step_s: seconds of a step, by rows."""

    def ratio(length: int) -> float:
        return sum(acceptance**i for i in range(length + 1)) * step_s(batch) / step_s(batch * (1 + length))

    return max(ratio(length) for length in range(max_tokens + 1))


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """Settings of a method that has a model; the engine of a turn without drafts does not ask it."""
    if args.method in ("ngram", "suffix"):
        return {}
    found = {"draft_model": args.draft_model, "skipped_layers": args.skipped_layers}
    return {"speculation": args.method} | {name: str(path) for name, path in found.items() if path is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--method", choices=("ngram", "suffix", "draft", "self", "eagle3", "mtp"), default="ngram")
    parser.add_argument("--draft-model", type=Path, help="of draft, eagle3 and mtp")
    parser.add_argument("--skipped-layers", type=Path, help="of self")
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--loads", nargs="*", choices=("repeating", "noise", "answers"))
    parser.add_argument("--tokens", type=int, default=NUM_NEW, help="of an answer")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    print(f"{args.model.name}, {args.dtype}, {args.threads} threads, median of {args.repeat}")
    print("      load  method batch plain t/s  drafted  ratio accepted  yield of best")
    rows: list[Row] = []
    for row in bench.rows():
        rows.append(row)
        print(
            f"{row.load:>10} {row.method:>7} {row.batch:5} {row.plain:9.1f} {row.drafted:8.1f} {row.ratio:6.2f} "
            f"{row.accepted:8.2f} {row.num_yielded:6.2f} {'' if row.best is None else f'{row.ratio / row.best:7.2f}'}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1))


if __name__ == "__main__":
    main()
