"""Worlds whose supervisor's controller moves prefill budgets, under a load that lasts: those with a real supervisor,
and a seed that is REST modulo EVERY. Generators of their own draw all of it, so that other worlds stay as they were.

    steady   long prompts and long answers, at random       swinging   the ones for some seconds, then the others
"""

import random
from typing import Any

from diptych.workers.common.request import Request, SamplingParams

from ..checks.sampling import VOCAB_SIZE
from .clients import Client

EVERY, REST = 20, 14  # routes of these worlds are chosen by predicted times too
BEGINS_S, LASTS_S = 0.5, 14.0
GAP_S = (0.12, 0.25)  # between two requests
SWING_S = 4.0
PROMPTS, ANSWERS = (36, 2), (4, 30)  # tokens of a prompt and of an answer, where the one or the other is long
NUM_WORKERS = 2  # at first; they may change places with those of other pools
STEP_S = 0.01  # that all workers report to be the time of a step, without sequences
TTFT_S, TPOTS_S = 5.0, (0.5 * STEP_S, 0.9 * STEP_S)  # of the level: a matter of where prompts are computed
TIMEOUT_S = 60.0


def is_dialled(seed: int) -> bool:
    return seed % EVERY == REST


def is_steady(seed: int) -> bool:
    """Return whether the mixture of its load stays."""
    return is_dialled(seed) and _rng(seed).random() < 0.5


def settings_of(seed: int) -> dict[str, Any]:
    """The cluster's settings that make its controller move budgets."""
    if not is_dialled(seed):
        return {}
    tpot_s = random.Random(f"level of {seed}").uniform(*TPOTS_S)
    pools = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "mixed": {"replicas": NUM_WORKERS}}
    return {"dial": True, "service_level": {"ttft_s": TTFT_S, "tpot_s": tpot_s}, "pools": pools}


def load_of(seed: int) -> list[Client]:
    """Requests that come after one another until LASTS_S."""
    if not is_dialled(seed):
        return []
    rng = _rng(seed)
    is_steady, gap_s, share = rng.random() < 0.5, rng.uniform(*GAP_S), rng.uniform(0.3, 1.0)
    clients: list[Client] = []
    for number in range(int((LASTS_S - BEGINS_S) / gap_s)):
        arrives_at = BEGINS_S + number * gap_s
        has_answer = rng.random() >= share if is_steady else int(arrives_at // SWING_S) % 2
        kind = ANSWERS if has_answer else PROMPTS
        prompt = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(kind[0]))
        sampling = SamplingParams(max_tokens=kind[1])
        clients.append(Client(Request(f"load-{number}", prompt, sampling, TIMEOUT_S), arrives_at, None))
    return clients


def _rng(seed: int) -> random.Random:
    return random.Random(f"load of {seed}")
