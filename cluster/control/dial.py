"""Decides how many of a group's workers compute prompts alone. Pure: demand and costs in, a number of workers out.

With N workers of which n only prefill (n = 0: all are mixed), a demand of U worker-seconds a second for prompts, K
sequences that decode, a step of t(k) seconds with k of them, prompts of S seconds, and B seconds of prompts that wait:

    n = 0     u = U / N, a = (p - t + h) / p    TTFT = (B / N + S) / (a - u)    TPOT = min(t(K / N) / (1 - d u), p)
    n > 0     u = U / n                         TTFT = (B / n + S) / (1 - u)    TPOT = t(K / (N - n))

p: promised_target_s, to which a step of prompts and decodes is kept; a: seconds of prompts in a second of such steps,
of which each computes h before it takes longer; d = (p - t) / (p - t + h): the part that makes steps longer. A share
that is used up means a miss. S, U and B count what a prompt of average length attends to (prompt_token_s): too little
where lengths differ much or prefixes are cached. The best n has the fewest expected misses of either time, F as in
prediction.py.
"""

from dataclasses import dataclass

from ..common.prediction import (
    MAX_SHARE,
    Level,
    WorkerCost,
    decode_miss_probability,
    miss_probability,
    prompt_token_s,
    prompts_beside_s,
)

LATE = 1e3  # ratio of a time to its level where a queue grows without end


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand on a group of workers, now or as it is forecast."""

    prompt_tokens_per_s: float  # to compute
    num_decodes: float  # sequences
    num_context: float  # tokens that those attend to
    prompt_tokens: float  # of a prompt, on average
    waiting_tokens: float  # of prompts


@dataclass(frozen=True, slots=True)
class Outlook:
    """Expected times, of a number of workers that only prefill, and share of requests that miss their level."""

    num_prefill: int
    ttft_s: float
    tpot_s: float
    missed: float


def outlook(num_prefill: int, num_workers: int, demand: Demand, cost: WorkerCost, level: Level) -> Outlook:
    """Predict the times of the group with so many workers that only prefill."""
    num_decoders = num_workers - num_prefill
    step_s = cost.fixed_s + (cost.decode_s * demand.num_decodes + cost.context_s * demand.num_context) / num_decoders
    num_computing = num_prefill or num_workers
    token_s = prompt_token_s(cost, demand.prompt_tokens)
    used = demand.prompt_tokens_per_s * token_s / num_computing
    queue_s = (demand.waiting_tokens / num_computing + demand.prompt_tokens) * token_s
    tpot_s, share = step_s, 1.0
    if not num_prefill:
        chunk_s = prompts_beside_s(cost, step_s, level.tpot_s)
        longer_s = max(chunk_s - cost.hidden_s, 0.0)
        tpot_s = min(step_s / (1 - min(used * longer_s / chunk_s, MAX_SHARE)), step_s + longer_s)
        if demand.num_decodes:
            share = chunk_s / (step_s + longer_s)
    left = share - used
    ttft_s = queue_s / left if left > 0 else LATE * level.ttft_s
    missed = 1 - (1 - miss_probability(ttft_s / level.ttft_s)) * (1 - decode_miss_probability(tpot_s / level.tpot_s))
    return Outlook(num_prefill, ttft_s, tpot_s, missed)


def outlooks(num_workers: int, demand: Demand, cost: WorkerCost, level: Level) -> list[Outlook]:
    """Predict the times for each number of workers that only prefill; the last worker always decodes."""
    return [outlook(num, num_workers, demand, cost, level) for num in range(max(num_workers, 1))]
