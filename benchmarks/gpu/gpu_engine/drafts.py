"""Gain by speculation: decodes with drafts that are right by a set probability, and decodes without.

Each request has a bias to one token, so its answer is known whatever the order of sums, and a synthetic proposer drafts
it. Speculator and scheduler are a worker's, and decide how much is drafted.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diptych.workers.core.drafting import Drafter
from diptych.workers.core.scheduler_config import SchedulerConfig
from diptych.workers.core.sequence import Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.speculation.speculator import Speculator
from diptych.workers.speculation.synthetic import SyntheticProposer

from .measure import DecodeCase, arrive, fits, leave
from .report import Figure
from .rig import Rig

WARMUP_STEPS = 16
DRAFT_TOKENS = 4  # of a sequence in a step, at most


@dataclass(frozen=True)
class DraftCase:
    batch: int
    context: int
    acceptance: float
    num_steps: int = 64  # of a turn
    num_turns: int = 3  # of each of the two, in turn; a further one of each comes first and is not counted

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}, {self.acceptance:.0%} of drafted tokens right"


@dataclass(frozen=True)
class Turn:
    tokens_per_s: float
    num_yielded: float  # tokens of a sequence in a step


def speculation(rig: Rig, case: DraftCase) -> Iterator[Figure]:
    """Measure both; yield nothing where the KV does not fit."""
    most = rig.settings.max_draft_tokens
    num_new = (WARMUP_STEPS + case.num_steps) * (1 + most) + 2 * (1 + most)
    if not fits(rig, case.batch, case.context + num_new):
        return
    drafter = Speculator("synthetic", SyntheticProposer(biased, case.acceptance), most)
    runs: tuple[list[Turn], list[Turn]] = [], []
    for _ in range(1 + case.num_turns):
        for into, of_turn in zip(runs, (None, drafter), strict=True):
            into.append(turn(rig, case, num_new, of_turn))
    plain, drafted = (statistics.median(each.tokens_per_s for each in of[1:]) for of in runs)
    yield Figure("speculation", str(case), drafted, "tokens/s")
    yield Figure("speculation", str(case), plain, "tokens/s without")
    yield Figure("speculation", str(case), drafted / plain, "times as fast as without")
    yielded = statistics.median(each.num_yielded for each in runs[1][1:])
    yield Figure("speculation", str(case), yielded, f"tokens of a sequence in a step, of {1 + most} at most")


def biased(sequence: Sequence, num_tokens: int) -> list[int]:
    """The next tokens of a sequence's answer."""
    [token_id] = sequence.request.sampling.logit_bias
    return [token_id] * num_tokens


def turn(rig: Rig, case: DraftCase, num_new: int, drafter: Drafter | None) -> Turn:
    config = SchedulerConfig(rig.settings.max_batch_tokens, max_running=rig.settings.max_running)
    engine = Engine(rig.runner, config, prefix_cache=False, drafter=drafter)
    decodes = DecodeCase(case.batch, case.context)
    keys = arrive(replace(rig, engine=engine), decodes, num_new, is_known=True)
    for _ in range(WARMUP_STEPS):
        engine.step()
    began, num_tokens, num_rows = time.perf_counter(), 0, 0
    for _ in range(case.num_steps):
        tokens = engine.step().tokens
        num_tokens += len(tokens)
        num_rows += len(set(tokens.keys))
    seconds = time.perf_counter() - began
    leave(engine, keys)
    return Turn(num_tokens / seconds, num_tokens / num_rows)
