"""Service levels of the requests of some worlds: of those with predicted routes and two routers. A generator of its own
draws them, so that all else in those worlds is as without levels."""

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from diptych.workers.common.request import RequestLevel

if TYPE_CHECKING:
    from .clients import Client

LAST_DIGIT = 9  # of the seeds of these worlds
TTFTS_S = (None, 0.02, 0.5, 20.0)  # some are shorter than any prompt takes
TPOTS_S = (None, 0.01, 0.05, 1.0)


def give_levels(clients: "list[Client]", seed: int) -> None:
    """Half of the calls get a level, which all of their completions share."""
    if seed % 10 != LAST_DIGIT:
        return
    rng = random.Random(f"levels of {seed}")
    levels: dict[str, RequestLevel] = {}
    for client in clients:
        call = client.request.request_id.partition(".")[0]
        if call not in levels:
            level = RequestLevel(rng.choice(TTFTS_S), rng.choice(TPOTS_S), refuse=rng.random() < 0.4)
            levels[call] = level if rng.random() < 0.5 else RequestLevel()
        client.request = replace(client.request, level=levels[call])
