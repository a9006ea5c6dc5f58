"""Routes that move inside the prompt, in some seeds: any worker computes a beginning of any length."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from diptych.cluster.routing.actions import RequestFacts, Route
from diptych.cluster.routing.fleet import FleetWorker
from diptych.cluster.routing.policy import choose

SHARE = 0.6  # of the routes of such a seed


def splits(seed: int) -> bool:
    return seed % 7 == 1


def split_some(seed: int) -> Callable[..., Route]:
    """The policy of a world."""
    rng = random.Random(f"splits {seed}")

    def chosen(fleet: Mapping[str, FleetWorker], facts: RequestFacts, *args: Any) -> Route:
        route = choose(fleet, facts, *args)
        sources = [
            w
            for w in fleet.values()
            if w.is_available and w.incarnation != route.decode and facts.num_tokens > w.block_size
        ]
        may_split = facts.may_split and facts.may_hand_off and facts.group_route is None
        if not (sources and may_split) or rng.random() >= SHARE:
            return route
        source = rng.choice(sources)
        move_at = rng.randint(1, (facts.num_tokens - 1) // source.block_size) * source.block_size
        return Route(source.incarnation, route.decode, None, move_at)

    return chosen if splits(seed) else choose
