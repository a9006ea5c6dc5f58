"""Worlds whose only pool has no workers while there are no requests: those with a real supervisor, and a seed that is
REST modulo EVERY. Routers report there what waits. Generators of their own draw all of it, so that other worlds stay as
they were.

    the requests of all worlds ──idle──> no workers ──a few requests──> a worker ──idle──> no workers ──one more──> ...
"""

import random
from typing import Any

from diptych.workers.common.request import Request, SamplingParams

from ..checks.sampling import VOCAB_SIZE
from .clients import Client

EVERY, REST = 20, 3
IDLE_S = 1.0
COME_S = (12.0, 40.0)  # when requests come again, at the earliest
SPREAD_S = 4.0
NUM_REQUESTS = 3
WAIT_S, TIMEOUT_S = 50.0, 60.0  # for a worker, some of whose starts fail; in all


def is_sleepy(seed: int) -> bool:
    return seed % EVERY == REST


def settings_of(seed: int) -> dict[str, Any]:
    """The cluster's settings that let its pool have no workers."""
    if not is_sleepy(seed):
        return {}
    pool = {"replicas": 1, "min_replicas": 0, "max_replicas": 2, "scale_to_zero_after_s": IDLE_S}
    return {"pools": {"prefill": {"replicas": 0}, "decode": pool, "mixed": {"replicas": 0}}}


def load_of(seed: int) -> list[Client]:
    """Requests that come when the pool has idled."""
    if not is_sleepy(seed):
        return []
    rng = random.Random(f"sleep of {seed}")
    clients: list[Client] = []
    for number, come_s in enumerate(COME_S):
        at_s = come_s + rng.uniform(0.0, SPREAD_S)
        for each in range(rng.randint(1, NUM_REQUESTS)):
            prompt = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 20)))
            request = Request(f"late-{number}-{each}", prompt, SamplingParams(max_tokens=rng.randint(1, 9)), TIMEOUT_S)
            clients.append(Client(request, at_s + each * rng.uniform(0.0, 0.2), None))
    return clients
