"""Measures the proposers of drafts, and the whole of what a step of drafts costs beside its rows.

    python -m benchmarks.engine.proposers [--repeat 5]

Processor time of the thread, the least of `repeat` runs. Text: words of 2 to 8 tokens, of a vocabulary of 2,000 words
whose frequencies fall as 1/rank (Zipf), so that some of it repeats. `prompt`: ns per token of a prompt of 8,192, when
it is first seen; `grow`: ns per token that is accepted, one a step, with the proposal of 8 tokens that follows; `miss`:
of that in a text without repetitions; `nothing to draft`: ns per sequence and step, of 64 sequences for which no draft
pays.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable

from diptych.workers.common.request import Request, SamplingParams
from diptych.workers.core.draft import Proposer
from diptych.workers.core.sequence import Sequence
from diptych.workers.speculation.methods import make_speculator
from diptych.workers.speculation.ngram import NgramProposer
from diptych.workers.speculation.suffix import SuffixProposer

NUM_PROMPT, NUM_STEPS, NUM_ANSWERS, MAX_TOKENS = 8192, 2000, 100, 8
MAKERS: dict[str, Callable[[], Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}
_numbers = itertools.count()


def text(num_tokens: int, seed: int) -> list[int]:
    """Token ids of words."""
    rng = random.Random(7)
    words = [[rng.randrange(50_000) for _ in range(rng.randint(2, 8))] for _ in range(2000)]
    weights = [1 / (rank + 1) for rank in range(2000)]
    chosen = random.Random(seed).choices(words, weights, k=num_tokens)
    return list(itertools.islice(itertools.chain.from_iterable(chosen), num_tokens))


def sequence_of(prompt: list[int]) -> Sequence:
    request = Request("request", tuple(prompt), SamplingParams(max_tokens=1 << 20), timeout_s=60.0)
    return Sequence(f"0/{next(_numbers)}", request, prompt.copy(), len(prompt), deadline=1e9, arrival=0)


def remembering(name: str) -> Proposer:
    """A proposer that has seen other answers."""
    proposer = MAKERS[name]()
    for seed in range(NUM_ANSWERS):
        answered = sequence_of([1])
        proposer.propose(answered, 1)
        answered.token_ids += text(500, 100 + seed)
        proposer.ended(answered)
    return proposer


def prompt_ns(name: str) -> float:
    proposer, sequence = MAKERS[name](), sequence_of(text(NUM_PROMPT, 1))
    began = time.thread_time_ns()
    for _ in range(3):  # a few thousand tokens a step
        proposer.propose(sequence, MAX_TOKENS)
    return (time.thread_time_ns() - began) / NUM_PROMPT


def grow_ns(name: str, answer: list[int]) -> float:
    proposer, sequence = remembering(name), sequence_of(text(1000, 1))
    proposer.propose(sequence, MAX_TOKENS)
    began = time.thread_time_ns()
    for token_id in answer:
        sequence.token_ids.append(token_id)
        proposer.propose(sequence, MAX_TOKENS)
    return (time.thread_time_ns() - began) / len(answer)


def idle_ns(name: str) -> float:
    """A large batch whose rows cost their share: a draft would have to be sure to be accepted."""
    speculator, sequences = make_speculator(name, MAX_TOKENS), [sequence_of([1, 2, 3]) for _ in range(64)]
    for _ in range(20):
        for num_rows in (48, 64, 80):
            speculator.measured(num_rows, 1e-3 * num_rows)
    began = time.thread_time_ns()
    for _ in range(NUM_STEPS):
        assert not any(speculator.draft(sequences, 64, 512))
        speculator.measured(64, 0.064)
    return (time.thread_time_ns() - began) / NUM_STEPS / 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    repeating, fresh = text(NUM_STEPS, 2), [100_000 + i for i in range(NUM_STEPS)]
    print(f"{'ns':<8} {'prompt':>8} {'grow':>8} {'miss':>8} {'nothing to draft':>17}")
    for name in MAKERS:
        prompt = min(prompt_ns(name) for _ in range(repeat))
        grow = min(grow_ns(name, repeating) for _ in range(repeat))
        miss = min(grow_ns(name, fresh) for _ in range(repeat))
        idle = min(idle_ns(name) for _ in range(repeat))
        print(f"{name:<8} {prompt:8.0f} {grow:8.0f} {miss:8.0f} {idle:17.0f}")


if __name__ == "__main__":
    main()
