"""Routes that move inside the prompt, as a test asks for them in place of the policy."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from diptych.cluster.routing import request_driver
from diptych.cluster.routing.actions import RequestFacts, Route
from diptych.cluster.routing.fleet import FleetWorker
from diptych.cluster.routing.policy import choose


def split_all(monkeypatch: pytest.MonkeyPatch, source_role: str = "prefill") -> list[Route]:
    """Split each prompt that may be, after half of it; its beginning goes to a worker of `source_role`. Returns the
    routes, as they are chosen."""
    routes: list[Route] = []
    monkeypatch.setattr(request_driver, "choose", _splitting(source_role, routes))
    return routes


def _splitting(source_role: str, routes: list[Route]) -> Callable[..., Route]:
    def chosen(fleet: Mapping[str, FleetWorker], facts: RequestFacts, *args: Any) -> Route:
        route = choose(fleet, facts, *args)
        sources = [w for w in fleet.values() if w.is_available and w.info.role == source_role]
        sources = [w for w in sources if w.incarnation not in facts.excluded | {route.decode}]
        if sources and facts.may_split and facts.may_hand_off and facts.group_route is None:
            source = min(sources, key=lambda w: w.num_in_flight)
            move_at = facts.num_tokens // 2 // source.block_size * source.block_size
            if move_at:
                route = Route(source.incarnation, route.decode, None, move_at)
        routes.append(route)
        return route

    return chosen
