"""The decision between routers, by hand."""

from collections import Counter
from dataclasses import replace

import pytest

from diptych.cluster.common.admission import RouteForecast, RouterLoad, RouterOutlook
from diptych.cluster.common.prediction import Level
from diptych.cluster.picker.choice import RouterAsk, RouterView, pick
from diptych.workers.common.errors import Overloaded, Unavailable

IDLE = RouteForecast(0.1, 0.0, 0.01)
OUTLOOK = RouterOutlook(0, 100, 2.0, Level(1.0, 0.1), IDLE, IDLE)


def router(number: int, num_requests: int = 0, **changes: object) -> RouterView:
    outlook = replace(OUTLOOK, num_requests=num_requests)
    return replace(RouterView(f"10.0.0.{number}:80", RouterLoad(f"tag{number}", True, outlook), True), **changes)  # type: ignore[arg-type]


def seen(view: RouterView, **changes: object) -> RouterView:
    """The router with another outlook."""
    assert view.load is not None
    return replace(view, load=replace(view.load, outlook=replace(view.load.outlook, **changes)))  # type: ignore[arg-type]


def test_the_router_with_the_least_to_do_is_the_first_and_the_others_follow() -> None:
    views = [router(1, 7), router(2, 3), router(3, 5)]
    assert pick(views, RouterAsk()) == ["10.0.0.2:80"]
    assert pick(views, RouterAsk(), 2) == ["10.0.0.2:80", "10.0.0.3:80"]
    assert pick(views, RouterAsk(), 9) == ["10.0.0.2:80", "10.0.0.3:80", "10.0.0.1:80"]


def test_load_is_a_share_of_what_a_router_takes() -> None:
    assert pick([router(1, 10), seen(router(2, 15), max_requests=200)], RouterAsk()) == ["10.0.0.2:80"]


def test_requests_that_were_sent_since_a_router_told_count() -> None:
    assert pick([router(1, 2), router(2, 1, num_sent=2)], RouterAsk()) == ["10.0.0.1:80"]


def test_equals_are_taken_in_turn() -> None:
    views = [router(i) for i in range(3)]
    assert sorted(Counter(pick(views, RouterAsk(turn=turn))[0] for turn in range(9)).values()) == [3, 3, 3]


def test_a_router_that_is_far_from_workers_comes_last() -> None:
    far = seen(router(1, 0), now=RouteForecast(2.0, 0.0, 0.01))
    assert pick([far, router(2, 50)], RouterAsk(), 2) == ["10.0.0.2:80", "10.0.0.1:80"]
    late = [seen(router(i, 2 - i), now=RouteForecast(2.0, 1.9, 0.01)) for i in (1, 2)]
    assert pick(late, RouterAsk()) == ["10.0.0.2:80"], "where all are late, none is far"


@pytest.mark.parametrize("lost", [{"is_reachable": False}, {"load": None}, {"load": RouterLoad("tag", False, OUTLOOK)}])
def test_routers_that_are_not_ready_are_not_picked(lost: dict[str, object]) -> None:
    assert pick([router(1, **lost), router(2, 99)], RouterAsk(), 2) == ["10.0.0.2:80"]
    with pytest.raises(Unavailable, match="no router is ready"):
        pick([router(1, **lost)], RouterAsk())


def test_no_router_at_all_is_named() -> None:
    with pytest.raises(Unavailable, match=r"0 known"):
        pick([], RouterAsk())


def test_only_those_of_the_subset_are_picked() -> None:
    views = [router(i, i) for i in (1, 2, 3)]
    assert pick(views, RouterAsk(frozenset({"10.0.0.3:80", "10.0.0.9:80"})), 3) == ["10.0.0.3:80"]
    assert pick(views, RouterAsk(frozenset({"10.0.0.2"})), 3) == ["10.0.0.2:80"], "an address without a port"
    six = replace(router(1), endpoint="[fd00::1]:80")
    assert pick([six], RouterAsk(frozenset({"fd00::1"}))) == ["[fd00::1]:80"]
    for subset in (frozenset({"10.0.0.9:80"}), frozenset[str]()):
        with pytest.raises(Unavailable, match="0 of 3 in the subset"):
            pick(views, RouterAsk(subset))


def test_routers_that_take_no_more_are_passed_over_and_all_full_is_429() -> None:
    full = [seen(router(i, 4), max_requests=4, mean_s=s) for i, s in ((1, 30.0), (2, 12.0))]
    assert pick([*full, router(3, 99)], RouterAsk(), 3) == ["10.0.0.3:80"]
    with pytest.raises(Overloaded) as refused:
        pick(full, RouterAsk())
    assert refused.value.retry_after_s == 3.0, "the mean time by the number that it takes, of the soonest"
    with pytest.raises(Overloaded, match="4 sequences are in flight"):
        pick([seen(router(1, 3, num_sent=1), max_requests=4)], RouterAsk())


LATE = RouteForecast(9.0, 8.9, 0.01)


def test_a_request_is_refused_that_would_rather_be_refused_than_late() -> None:
    late = seen(router(1), now=LATE)
    impatient = RouterAsk(ttft_s=0.5)
    assert pick([late, router(2, 99)], impatient, 2) == ["10.0.0.2:80"]
    with pytest.raises(Overloaded, match="time to the first token") as refused:
        pick([late], impatient)
    assert refused.value.retry_after_s == pytest.approx(8.5)  # the queue shortens by a second each second
    assert pick([late], RouterAsk(ttft_s=10.0)) == ["10.0.0.1:80"]
    assert pick([late], RouterAsk()) == ["10.0.0.1:80"], "it waits"
    unknown = seen(router(1), now=None, idle=None)
    assert pick([unknown], impatient) == ["10.0.0.1:80"], "nothing is predicted"


def test_what_may_be_shed_is_shed_by_the_clusters_level() -> None:
    late = seen(router(1), now=LATE)
    with pytest.raises(Overloaded) as refused:
        pick([late], RouterAsk(is_sheddable=True))
    assert refused.value.retry_after_s == pytest.approx(8.0)
    patient = seen(late, level=Level(10.0, 0.1))
    assert pick([patient], RouterAsk(is_sheddable=True)) == ["10.0.0.1:80"]


def test_the_refusal_says_the_soonest_time_that_helps() -> None:
    hopeless = seen(router(1), now=RouteForecast(9.0, 0.0, 0.01), idle=RouteForecast(8.0, 0.0, 0.01))
    soon = seen(router(2), now=RouteForecast(5.0, 4.9, 0.01))
    with pytest.raises(Overloaded) as refused:
        pick([hopeless, soon], RouterAsk(is_sheddable=True))
    assert (refused.value.retry_helps, refused.value.retry_after_s) == (True, pytest.approx(4.0))


def test_what_refers_to_a_router_goes_there_however_busy() -> None:
    views = [router(1, 0), router(2, 90), router(3, 0)]
    assert pick(views, RouterAsk(call="tag2abcdef"), 3) == ["10.0.0.2:80"], "no other knows it"
    assert pick(views, RouterAsk(call="tag9abcdef")) != ["10.0.0.2:80"], "its router has ended: another one says so"
    full = [seen(views[0], max_requests=1, num_requests=1, mean_s=1.0), seen(views[1], max_requests=90, mean_s=900.0)]
    with pytest.raises(Overloaded) as refused:
        pick([*full, views[2]], RouterAsk(call="tag2abcdef"))
    assert refused.value.retry_after_s == 10.0, "of the one that it waits for"


def test_what_computes_nothing_goes_to_full_routers_too() -> None:
    full = [seen(router(i, 4 + i), max_requests=4, now=LATE) for i in (1, 2)]
    assert pick(full, RouterAsk(computes=False), 2) == ["10.0.0.1:80", "10.0.0.2:80"]
    assert pick(full, RouterAsk(call="tag2abcdef", computes=False)) == ["10.0.0.2:80"]
    assert pick(full, RouterAsk(ttft_s=0.1, is_sheddable=True, computes=False)) == ["10.0.0.1:80"]
    with pytest.raises(Overloaded):
        pick(full, RouterAsk())


def test_what_refers_to_a_router_goes_nowhere_else_while_that_one_is_not_ready() -> None:
    views = [router(1), router(2)]
    draining = replace(views[1], load=replace(views[1].load, ready=False))  # type: ignore[type-var]
    assert pick([views[0], draining], RouterAsk(call="tag2abcdef")) == ["10.0.0.2:80"], "it answers for what it keeps"
    assert pick([draining], RouterAsk(call="tag2abcdef", computes=False)) == ["10.0.0.2:80"]
    for call in ("", "tag9abcdef"):
        assert pick([views[0], draining], RouterAsk(call=call), 2) == ["10.0.0.1:80"]
    lost = replace(views[1], is_reachable=False)
    with pytest.raises(Unavailable, match="no other has it"):
        pick([views[0], lost], RouterAsk(call="tag2abcdef"))
    assert pick([views[0], lost], RouterAsk(call="tag1abcdef")) == ["10.0.0.1:80"]


def test_repetitions_of_a_request_come_to_one_router_and_keys_are_spread() -> None:
    views = [router(i) for i in range(4)]
    chosen = {f"key{k}": pick(views, RouterAsk(key=f"key{k}"))[0] for k in range(400)}
    assert all(pick(views, RouterAsk(key=key, turn=9))[0] == where for key, where in chosen.items())
    assert min(Counter(chosen.values()).values()) > 60
    left = views[1:]
    moved = [key for key, where in chosen.items() if pick(left, RouterAsk(key=key))[0] != where]
    assert {chosen[key] for key in moved} == {"10.0.0.0:80"}, "only those of the router that left move"


def test_repetitions_leave_a_router_that_has_far_more_to_do() -> None:
    views = [router(i, 10) for i in range(4)]
    busy = next(i for i, view in enumerate(views) if view.endpoint == pick(views, RouterAsk(key="a"))[0])
    views[busy] = router(busy, 90)
    first, *_, last = pick(views, RouterAsk(key="a"), 4)
    assert (first != f"10.0.0.{busy}:80", last) == (True, f"10.0.0.{busy}:80")
