"""Routes that move inside a long prompt, where that is predicted to spare misses."""

from dataclasses import replace

import pytest

from diptych.cluster.common.prediction import FleetCosts
from diptych.cluster.routing.actions import RequestFacts, Route
from diptych.cluster.routing.fleet import FleetWorker
from diptych.cluster.routing.policy import choose, split_points

from .test_predicted_routes import CONFIG, step_cost, times, worker

SPLITTING = replace(CONFIG, split_prompts=True, ttft_s=2.0)


def route(
    *workers: FleetWorker, num_tokens: int = 3000, splits: bool = True, may_split: bool = True, **fields: object
) -> Route:
    costs = FleetCosts()
    for w in workers:
        costs.report(w.incarnation, step_cost())
    facts = RequestFacts(num_tokens, 50, {}, may_split=may_split, **fields)  # type: ignore[arg-type]
    return choose({w.incarnation: w for w in workers}, facts, replace(SPLITTING, split_prompts=splits), costs)


def busy() -> tuple[FleetWorker, FleetWorker]:
    """Sequences decode on each: a long prompt delays them, half of one less so."""
    return worker("A", decodes=8), worker("B", decodes=8)


def test_points_are_whole_blocks_after_what_is_held() -> None:
    points = split_points(times(), times(waiting=1000), 0, 4000, 64)
    assert points == sorted(n // 64 * 64 for n in (1000, 2000, 3000))  # balanced: 1000 tokens in B's queue
    assert split_points(times(), times(waiting=500), 0, 4000, 100)[0] == 500
    assert split_points(times(), times(), 2500, 4000, 100) == [3000]
    assert split_points(times(waiting=1000), times(), 0, 100, 100) == []


def test_a_prompt_is_split_only_where_it_is_asked_for_and_long() -> None:
    workers = busy()
    chosen = route(*workers)
    assert chosen.move_at is not None and 0 < chosen.move_at < 3000 and chosen.move_at % 100 == 0
    assert chosen.prefill != chosen.decode and chosen.prefix is None
    for other in (
        route(*workers, splits=False),
        route(*workers, may_split=False),
        route(*workers, may_hand_off=False),
        route(*workers, num_tokens=1900),
        route(worker("A"), worker("B"), num_tokens=2100),  # nothing would be spared
        route(*workers, failed_pairs=frozenset({("A", "B"), ("B", "A")})),
    ):
        assert other.move_at is None


def test_others_of_a_group_wait_at_the_sink() -> None:
    workers = busy()
    first = route(*workers)
    other = route(*workers, group="g", group_route=first)
    assert other == Route(None, first.decode)


@pytest.mark.parametrize("num_tokens", [2048, 4000, 4900])
def test_equal_facts_give_equal_routes(num_tokens: int) -> None:
    assert route(*busy(), num_tokens=num_tokens) == route(*busy(), num_tokens=num_tokens)
