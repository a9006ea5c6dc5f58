"""Which worker takes what, case by case, and for any fleet."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from diptych.cluster.routing.actions import PrefixSource, RequestFacts, Route
from diptych.cluster.routing.fleet import FleetWorker, WorkerInfo
from diptych.cluster.routing.policy import RoutingConfig, choose_sink
from diptych.cluster.routing.policy import choose as choose_of
from diptych.proto import worker_pb2
from diptych.workers.common.errors import ConfigError, Unavailable

CONFIG = RoutingConfig()
NUM_BLOCKS = 100


def choose(workers: Iterable[FleetWorker], wanted: RequestFacts, config: RoutingConfig) -> Route:
    return choose_of({w.incarnation: w for w in workers}, wanted, config)


def worker(
    name: str, role: str = "mixed", *, num: int = NUM_BLOCKS, free: int = NUM_BLOCKS, waiting: int = 0, **fields: object
) -> FleetWorker:
    view = FleetWorker(WorkerInfo(name, f"{name}:1", role, role), is_up=True, num_blocks=num)
    view.max_context_tokens, view.block_size = 1000, 4
    view.take(worker_pb2.LoadReport(num_blocks=num, num_free_blocks=free, num_waiting_tokens=waiting))
    for key, value in fields.items():
        setattr(view, key, value)
    return view


def facts(num_tokens: int = 40, max_new: int = 10, **fields: object) -> RequestFacts:
    given = {"cached_tokens": {}} | fields
    return RequestFacts(num_tokens=num_tokens, max_new_tokens=max_new, **given)  # type: ignore[arg-type]


P1, P2, D1, D2 = worker("p1", "prefill"), worker("p2", "prefill"), worker("d1", "decode"), worker("d2", "decode")


def test_both_pools_take_part_and_ties_go_by_name() -> None:
    assert choose([D2, P2, D1, P1], facts(), CONFIG) == Route("p1", "d1")


def test_prefill_goes_where_the_fewest_tokens_wait() -> None:
    busy = worker("p1", "prefill", waiting=500)
    assert choose([busy, P2, D1], facts(), CONFIG) == Route("p2", "d1")
    sent = worker("p1", "prefill", pending_tokens=500)
    assert choose([sent, P2, D1], facts(), CONFIG) == Route("p2", "d1")


def test_a_cached_prefix_outweighs_a_short_queue_only() -> None:
    holder = worker("p2", "prefill", waiting=30)
    assert choose([P1, holder, D1], facts(cached_tokens={"p2": 36}), CONFIG) == Route("p2", "d1")
    assert choose([P1, holder, D1], facts(cached_tokens={"p2": 28}), CONFIG) == Route("p1", "d1")


def test_a_shared_prefix_does_not_draw_every_request_to_one_worker() -> None:
    holder = worker("m1", num_in_flight=5)
    assert choose([holder, worker("m2")], facts(cached_tokens={"m1": 16}), CONFIG) == Route(None, "m2")


def test_decode_goes_where_the_most_kv_memory_is_left() -> None:
    assert choose([P1, worker("d1", "decode", free=50), D2], facts(), CONFIG) == Route("p1", "d2")
    assert choose([P1, worker("d1", "decode", held_blocks=50), D2], facts(), CONFIG) == Route("p1", "d2")


def test_a_sequence_fills_blocks_of_each_workers_own_size() -> None:
    coarse = worker("d1", "decode", block_size=40)  # 41 tokens fill 2 of its 100 blocks, and 11 of d2's
    assert choose([P1, coarse, D2], facts(), CONFIG) == Route("p1", "d1")
    assert facts().num_blocks(coarse) == 2 and facts().num_blocks(D2) == 11
    assert choose([P1, worker("d1", "decode", block_size=40, free=1), D2], facts(), CONFIG) == Route("p1", "d2")


def test_a_full_worker_is_taken_last() -> None:
    small = worker("d2", "decode", num=10, free=8)
    assert choose([P1, worker("d1", "decode", free=12), small], facts(), CONFIG) == Route("p1", "d1")
    assert choose([P1, worker("d1", "decode", free=0)], facts(), CONFIG) == Route("p1", "d1")


def test_a_single_token_needs_no_decode_worker() -> None:
    assert choose([P1, D1], facts(max_new=1), CONFIG) == Route(None, "p1")


def test_a_role_is_a_weight() -> None:
    assert choose([P1, P2], facts(), CONFIG) == Route(None, "p1")
    assert choose([D1, D2], facts(), CONFIG) == Route(None, "d1")
    assert choose([worker("m1"), worker("m2")], facts(), CONFIG) == Route(None, "m1")


def test_mixed_workers_work_alone_beside_the_pools() -> None:
    idle = worker("m1")
    assert choose([worker("p1", "prefill", waiting=99), D1, idle], facts(), CONFIG).prefill != "p1"
    assert choose([P1, worker("d1", "decode", free=10), worker("m1", waiting=99)], facts(), CONFIG) == Route("p1", "m1")
    assert choose([worker("m1", free=50), D1], facts(), CONFIG) == Route("m1", "d1")
    assert choose([worker("m1", free=50), worker("m2", waiting=9)], facts(), CONFIG) == Route(None, "m1")


def test_who_is_not_available_is_never_taken() -> None:
    away = [worker("a", is_up=False), worker("b", is_draining=True), worker("c", is_listed=False)]
    with pytest.raises(Unavailable, match="no worker"):
        choose(away, facts(), CONFIG)
    assert choose([*away, D1], facts(), CONFIG) == Route(None, "d1")
    with pytest.raises(Unavailable):
        choose([D1], facts(num_tokens=995), CONFIG)


def test_who_failed_the_request_is_taken_when_nobody_else_is_left() -> None:
    assert choose([P1, P2, D1, D2], facts(excluded=frozenset({"p1", "d1"})), CONFIG) == Route("p2", "d2")
    assert choose([P1, D1], facts(excluded=frozenset({"d1"})), CONFIG) == Route(None, "p1")
    assert choose([P1, D1], facts(excluded=frozenset({"p1", "d1"})), CONFIG) == Route("p1", "d1")


def test_without_a_hand_off_a_decode_worker_does_it_all() -> None:
    assert choose([P1, D1], facts(may_hand_off=False), CONFIG) == Route(None, "d1")


def test_another_sink_for_a_standing_offer() -> None:
    assert choose_sink([P1, P2, D1, D2], facts(excluded=frozenset({"d1"})), "p1") == "d2"
    assert choose_sink([P1, D1], facts(excluded=frozenset({"d1"})), "p1") is None
    assert choose_sink([worker("m1"), worker("m2")], facts(), "m1") == "m2"


def measured(name: str, role: str, tokens_s: float = 100.0, **fields: object) -> FleetWorker:
    """Blocks of 4 tokens, 1 KB a token."""
    view = worker(name, role, block_size=4, kv_token_bytes=1e3, **fields)
    view.load.num_prefill_tokens, view.load.prefill_s = 1000, 1000 / tokens_s
    return view


def test_a_prefix_is_pulled_where_that_is_cheaper_than_computing_it() -> None:
    p, d1, d2 = measured("p", "prefill"), measured("d1", "decode"), measured("d2", "decode")
    route = choose([p, d1, d2], facts(40, cached_tokens={"d1": 36, "d2": 40}), CONFIG)
    assert route == Route("p", "d1", PrefixSource("d1", 36))  # the last token is computed: 39 are no whole blocks
    assert choose([p, d1], facts(41, cached_tokens={"d1": 40}), CONFIG).prefix == PrefixSource("d1", 40)
    assert choose([p, d1], facts(40, cached_tokens={"p": 36, "d1": 36}), CONFIG).prefix is None
    assert choose([p, d1], facts(40, cached_tokens={"p": 32, "d1": 36}), CONFIG).prefix == PrefixSource("d1", 36)
    fast = measured("p", "prefill", tokens_s=1e4)
    assert choose([fast, d1], facts(40, cached_tokens={"d1": 36}), CONFIG).prefix is None
    p.load.links.add(incarnation="d1", num_bytes=2 << 20, read_s=1e3)
    p.take(p.load)
    assert choose([p, d1], facts(40, cached_tokens={"d1": 36}), CONFIG).prefix is None


def test_whoever_computes_the_prompt_pulls_and_whoever_stays_gives() -> None:
    m1, m2 = measured("m1", "mixed"), measured("m2", "mixed", waiting=500)
    wanted = facts(40, cached_tokens={"m2": 36})
    assert choose([m1, m2], wanted, CONFIG) == Route(None, "m1", PrefixSource("m2", 36))
    assert choose([m1, measured("m2", "mixed", is_draining=True)], wanted, CONFIG).prefix is None
    assert choose([m1, measured("m2", "mixed", is_up=False)], wanted, CONFIG).prefix is None
    assert choose([m1, m2], wanted, replace(CONFIG, pull_prefixes=False)).prefix is None
    failed = replace(wanted, failed_pairs=frozenset({("m2", "m1")}))
    assert choose([m1, m2], failed, CONFIG).prefix is None


def test_a_pair_that_failed_is_not_taken_again() -> None:
    failed = frozenset({("p1", "d1")})
    assert choose([P1, D1, D2], facts(failed_pairs=failed), CONFIG) == Route("p1", "d2")
    assert choose([P1, D1], facts(failed_pairs=failed), CONFIG) == Route(None, "p1")
    assert choose([P1, D1], facts(failed_pairs=failed, excluded=frozenset({"p1", "d1"})), CONFIG) == Route(None, "p1")
    assert choose_sink([P1, D1, D2], facts(failed_pairs=failed), "p1") == "d2"
    assert choose_sink([P1, P2, D1], facts(failed_pairs=failed), "p1") is None
    assert choose_sink([P1, P2, D1], facts(failed_pairs=failed), "p2") == "d1"


def test_settings_that_cannot_work_are_named() -> None:
    for name, value in (
        ("max_attempts", 0),
        ("worker_timeout_s", float("nan")),
        ("max_migrations", 0),
    ):
        with pytest.raises(ConfigError, match=name):
            RoutingConfig(**{name: value}).validate()
    RoutingConfig().validate()


def test_any_fleet_gives_a_route_that_can_work() -> None:
    random_ = random.Random(3)
    for _ in range(2000):
        fleet = [
            worker(
                f"w{i}",
                random_.choice(["prefill", "decode", "mixed"]),
                free=random_.randint(0, NUM_BLOCKS),
                waiting=random_.randint(0, 99),
                is_up=random_.random() < 0.8,
                is_draining=random_.random() < 0.2,
            )
            for i in range(random_.randint(0, 6))
        ]
        names = [w.incarnation for w in fleet]
        wanted = facts(
            random_.randint(1, 99),
            cached_tokens={n: random_.randint(0, 50) for n in names if random_.random() < 0.5},
            excluded=frozenset(n for n in names if random_.random() < 0.3),
        )
        free = {w.incarnation for w in fleet if w.is_available}
        if not free:
            with pytest.raises(Unavailable):
                choose(fleet, wanted, CONFIG)
            continue
        route = choose(fleet, wanted, CONFIG)
        used = {route.decode} | ({route.prefill} if route.prefill else set())
        assert used <= free
        assert route.prefill != route.decode
        assert used <= free - wanted.excluded or free <= wanted.excluded
        random_.shuffle(fleet)
        assert choose(fleet, wanted, CONFIG) == route


def test_completions_of_one_prompt_go_the_same_way_while_it_is_open() -> None:
    busy, group_route = worker("p2", "prefill", waiting=500), Route("p2", "d2")
    assert choose([P1, busy, D1, D2], facts(group_route=group_route), CONFIG) == group_route
    full = worker("d2", "decode", free=5)
    closed = (
        ([P1, busy, D1, full], facts(group_route=group_route)),
        ([P1, worker("p2", "prefill", is_draining=True), D1, D2], facts(group_route=group_route)),
        ([P1, busy, D1, D2], facts(group_route=group_route, excluded=frozenset({"p2"}))),
        ([P1, busy, D1, D2], facts(group_route=group_route, failed_pairs=frozenset({("p2", "d2")}))),
    )
    for workers, given in closed:
        assert choose(workers, given, CONFIG) == Route("p1", "d1")
