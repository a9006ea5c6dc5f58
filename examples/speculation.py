"""Speculation on the shipped model: the same answers, by fewer steps.

    python -m diptych.examples.speculation [--model DIR] [--draft-model DIR] [--plot FILE]

Asks some questions without drafts, and with each method. Prints the answers, with the tokens that were drafted in
green, and a table: tokens per second, tokens per step, the share of drafted tokens that was accepted. `suffix again`
asks the same questions once more: the method remembers the first answers. `prediction` knows each answer but for one
token, as an editor knows the file that it wants changed. `draft` asks a smaller model, and `self` the model itself
without some of its layers, which a search on these questions chooses.

A worker drafts where that saves time, by the times of its steps. The shipped model is so small that little would: a
step of it takes about as long as a draft. So here every step counts as equally long, `STEP_S`, as nearly holds of a
large model. The tokens per second are real, and fewer than without drafts where a worker would not draft.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..workers.common.request import Request, SamplingParams
from ..workers.config.worker_config import WorkerConfig
from ..workers.core.drafting import Drafter
from ..workers.core.runner import Runner
from ..workers.core.scheduler_config import SchedulerConfig
from ..workers.engine.engine import Engine
from ..workers.execution.model_runner import ModelRunner
from ..workers.execution.skip_search import search
from ..workers.speculation.methods import make_speculator

TINY = Path(__file__).parent / "tiny"
TINY_DRAFT = Path(__file__).parent / "tiny_draft"
QUESTIONS = ("What is Diptych?", "What is a KV cache?", "Who wrote Hamlet?", "What is the capital of France?")
MAX_TOKENS = 64
SEARCHED = 24  # tokens of the answers by which layers are chosen
STEP_S = 0.02  # by the engine's clock
GREEN, PLAIN = "\033[32m", "\033[0m"


@dataclass(slots=True)
class Answer:
    """`steps`: tokens of each step; all but the last of a step were drafted."""

    steps: list[list[int]] = field(default_factory=list[list[int]])

    @property
    def token_ids(self) -> list[int]:
        return [token_id for step in self.steps for token_id in step]


@dataclass(frozen=True, slots=True)
class Row:
    method: str
    tokens_per_s: float
    tokens_per_step: float
    accepted: float  # of the drafted tokens; 0 where there were none


def ask(runner: Runner, requests: Sequence[Request], method: str, drafter: Drafter | None) -> tuple[list[Answer], Row]:
    """Answer one request after the other."""
    clock, answers = count(step=STEP_S).__next__, list[Answer]()
    engine = Engine(runner, SchedulerConfig(), prefix_cache=False, drafter=drafter, clock=clock)
    num_drafted = num_accepted = 0
    began = time.perf_counter()
    for request in requests:
        engine.submit(request.request_id, request, [])
        answers.append(Answer())
        while engine.scheduler.has_work:
            events = list(engine.step().tokens)
            answers[-1].steps.append([event.token_id for event in events])
            num_drafted += sum(event.num_drafted for event in events)
            num_accepted += sum(event.num_accepted for event in events)
    seconds = time.perf_counter() - began
    num_tokens, num_steps = sum(len(a.token_ids) for a in answers), sum(len(a.steps) for a in answers)
    return answers, Row(method, num_tokens / seconds, num_tokens / num_steps, num_accepted / max(num_drafted, 1))


def coloured(tokenizer: PreTrainedTokenizerFast, answer: Answer) -> str:
    """Text of an answer, with drafted tokens in green."""
    text, ids = "", list[int]()
    for step in answer.steps:
        for i, token_id in enumerate(step):
            ids.append(token_id)
            after = str(tokenizer.decode(ids, skip_special_tokens=True))
            piece = after[len(str(tokenizer.decode(ids[:-1], skip_special_tokens=True))) :]
            text += f"{GREEN}{piece}{PLAIN}" if i < len(step) - 1 else piece
    return text


def drafting_by(method: str, config: WorkerConfig, **settings: str) -> tuple[Runner, Drafter]:
    """Load the model again, with one that drafts."""
    runner = ModelRunner.load(config.changed(speculation=method, **settings))
    drafter = make_speculator(method, 8, model=runner.proposer)
    assert drafter is not None
    return runner, drafter


def skipping(config: WorkerConfig, file: Path) -> str:
    """Search for the layers that the model may skip where it drafts for itself, and write them to `file`."""
    questions = file.with_suffix(".txt")
    questions.write_text("\n".join(QUESTIONS))
    num_layers, found = search(config, questions, SEARCHED)
    file.write_text(json.dumps({"num_layers": num_layers, "skipped_layers": found[-1].skipped}))
    return str(file)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the tokens per second of each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row.method for row in rows], [row.tokens_per_s for row in rows])
    axes.bar_label(bars, [f"{row.tokens_per_step:.1f} tokens a step" for row in rows], label_type="center")
    axes.set_xlabel("tokens per second")
    axes.invert_yaxis()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--draft-model", type=Path, default=TINY_DRAFT)
    parser.add_argument("--plot", type=Path, help="file for a picture of the table")
    args = parser.parse_args()
    tokenizer = cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(args.model))
    config = WorkerConfig.of(args.model, kv_memory_bytes=64 << 20)
    runner = ModelRunner.load(config)
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    requests: list[Request] = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = cast(Any, tokenizer.apply_chat_template(chat, add_generation_prompt=True))["input_ids"]
        requests.append(Request(question, tuple(prompt), sampling, timeout_s=60.0))
    ask(runner, requests, "", None)  # warms up
    plain, row = ask(runner, requests, "none", None)
    rows, suffix = [row], make_speculator("suffix", 8)
    predicting: list[Request] = []
    for request, answer in zip(requests, plain, strict=True):
        ids = answer.token_ids
        ids[len(ids) // 2] = ids[0]  # the token that it does not know
        predicting.append(replace(request, prediction=tuple(ids)))
    with tempfile.TemporaryDirectory() as folder:
        by_draft, draft = drafting_by("draft", config, draft_model=str(args.draft_model))
        skipped_layers = skipping(config, Path(folder) / "skipped.json")
        by_itself, own = drafting_by("self", config, skipped_layers=skipped_layers)
    for method, asked, computes, drafter in (
        ("ngram", requests, runner, make_speculator("ngram", 8)),
        ("suffix", requests, runner, suffix),
        ("suffix again", requests, runner, suffix),
        ("prediction", predicting, runner, make_speculator("ngram", 8)),
        ("draft", requests, by_draft, draft),
        ("self", requests, by_itself, own),
    ):
        answers, row = ask(computes, asked, method, drafter)
        assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
        rows.append(row)
        print(f"\n{method}")
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"  {question} {coloured(tokenizer, answer)}")
    print(f"\n{'method':<13} {'tokens/s':>9} {'tokens/step':>12} {'accepted':>9}")
    for row in rows:
        print(f"{row.method:<13} {row.tokens_per_s:9.0f} {row.tokens_per_step:12.2f} {row.accepted:9.0%}")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
