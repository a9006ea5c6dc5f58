"""Which running sequences move, and where to."""

import math

from diptych.cluster.routing.fleet import FleetWorker, WorkerInfo
from diptych.cluster.routing.kv_costs import DEFAULT_LINK_BYTES_S, PULL_LATENCY_S, compute_s, link_bytes_s, pull_s
from diptych.cluster.routing.migration import REST_S, MovableRequest, Move, drain_move, is_short_of_blocks, relief
from diptych.proto import worker_pb2
from diptych.workers.core.live_handoff import offered_tokens, slack_tokens

NUM_BLOCKS = 100
NOW = 1000.0


def worker(name: str, role: str = "decode", *, free: int = NUM_BLOCKS, **fields: object) -> FleetWorker:
    """Blocks of 4 tokens, 1 KB a token; prefills 100 tokens/s."""
    view = FleetWorker(WorkerInfo(name, f"{name}:1", role, role), is_up=True, num_blocks=NUM_BLOCKS)
    view.max_context_tokens, view.block_size, view.kv_token_bytes = 1000, 4, 1e3
    load = worker_pb2.LoadReport(num_blocks=NUM_BLOCKS, num_free_blocks=free, num_prefill_tokens=1000, prefill_s=10.0)
    for key, value in fields.items():
        setattr(view if hasattr(view, key) else load, key, value)
    view.take(load)
    return view


def request(handle: int, worker: str = "a", **fields: object) -> MovableRequest:
    given: dict[str, object] = {"num_tokens": 40, "num_remaining": 40, "began_at": float(handle)} | fields
    return MovableRequest(handle, worker, **given)  # type: ignore[arg-type]


def test_a_worker_that_drains_gives_its_legs_to_the_emptiest() -> None:
    workers = [worker("a", is_draining=True), worker("b", free=50), worker("c", free=60), worker("p", "prefill")]
    assert drain_move(workers, [request(1)], {}, 4, NOW) == Move(1, "c")
    assert drain_move(workers, [request(1, excluded=frozenset({"c"}))], {}, 4, NOW) == Move(1, "b")
    assert drain_move(workers, [request(1, "b"), request(2)], {}, 4, NOW) == Move(2, "c")
    assert drain_move(workers[1:], [request(1, "b")], {}, 4, NOW) is None


def test_a_few_at_a_time() -> None:
    workers = [worker("a", is_draining=True), worker("b")]
    assert drain_move(workers, [request(1)], {"a": 3, "b": 9}, 4, NOW) == Move(1, "b")
    assert drain_move(workers, [request(1)], {"a": 4}, 4, NOW) is None
    assert drain_move(workers, [request(1), request(2, num_remaining=50), request(3)], {}, 4, NOW) == Move(2, "b")


def test_a_leg_that_fits_nowhere_with_what_its_handoff_reserves_stays() -> None:
    source = worker("a", is_draining=True)
    for other in (
        worker("b", free=17),
        worker("b", free=18, num_running=1),
        worker("b", held_blocks=83),
        worker("b", is_up=False),
        worker("b", is_draining=True),
        worker("b", is_listed=False),
        worker("b", "prefill"),
        worker("b", max_context_tokens=79),
    ):
        assert drain_move([source, other], [request(1)], {}, 4, NOW) is None
    assert offered_tokens(40, 40, 4) == 18 * 4
    assert drain_move([source, worker("b", free=18)], [request(1)], {}, 4, NOW) == Move(1, "b")
    assert drain_move([source, worker("b", free=19, num_running=1)], [request(1)], {}, 4, NOW) == Move(1, "b")
    assert drain_move([source, worker("b", free=12)], [request(1, num_remaining=9)], {}, 4, NOW) is None
    assert drain_move([source, worker("b", free=13)], [request(1, num_remaining=9)], {}, 4, NOW) == Move(1, "b")


def test_a_leg_with_two_blocks_of_tokens_to_make_ends_where_it_drains() -> None:
    workers = [worker("a", is_draining=True), worker("b")]
    assert drain_move(workers, [request(1, num_remaining=8)], {}, 4, NOW) is None
    assert drain_move(workers, [request(1, num_remaining=9)], {}, 4, NOW) == Move(1, "b")


def test_after_a_move_that_failed_a_leg_rests() -> None:
    workers = [worker("a", is_draining=True), worker("b")]
    assert drain_move(workers, [request(1, moved_at=NOW - 1, moved_from="a")], {}, 4, NOW) is None
    assert drain_move(workers, [request(1, moved_at=NOW - REST_S, moved_from="a")], {}, 4, NOW) == Move(1, "b")
    assert drain_move(workers, [request(1, moved_at=NOW - 1, moved_from="c")], {}, 4, NOW) == Move(1, "b")


def test_short_is_less_than_each_that_runs_may_fill_while_one_moves() -> None:
    assert slack_tokens(1, 4) == 8 * 4
    assert is_short_of_blocks(worker("a", free=31, num_running=4))
    assert not is_short_of_blocks(worker("a", free=32, num_running=4))
    assert not is_short_of_blocks(worker("a", free=0))


def test_the_youngest_goes_where_there_is_room_for_all_of_it() -> None:
    source = worker("a", free=2, num_running=4)
    workers = [source, worker("b", free=60), worker("c", free=50)]
    assert relief(workers, source, [request(1), request(3), request(2), request(9, "b")], NOW) == Move(3, "b")
    assert relief(workers, source, [request(1), request(3, num_remaining=300)], NOW) == Move(1, "b")
    assert relief([source, worker("b", free=27)], source, [request(1)], NOW) is None
    assert relief([source, worker("b", free=28)], source, [request(1)], NOW) == Move(1, "b")
    assert relief([source, worker("b", free=28, num_running=1)], source, [request(1)], NOW) is None
    assert relief([source, worker("p", "prefill")], source, [request(1)], NOW) is None


def test_what_may_end_before_its_move_is_done_stays() -> None:
    source = worker("a", free=2, num_running=4)
    workers = [source, worker("b")]
    assert relief(workers, source, [request(1, num_remaining=8)], NOW) is None
    assert relief(workers, source, [request(1, num_remaining=9)], NOW) == Move(1, "b")
    assert relief(workers, source, [request(1), request(2, num_remaining=1)], NOW) == Move(1, "b")
    enough = worker("a", free=20, num_running=4)  # for 20 tokens of each
    assert relief([enough, worker("b")], enough, [request(1, num_remaining=20)], NOW) is None
    assert relief([enough, worker("b")], enough, [request(1, num_remaining=21)], NOW) == Move(1, "b")


def test_what_is_cheaper_to_compute_again_is_not_moved() -> None:
    source, slow, fast = worker("a", free=2, num_running=4), worker("b"), worker("c", free=50)
    slow.load.links.add(incarnation="a", num_bytes=10**7, read_s=1e3)
    slow.take(slow.load)
    assert relief([source, slow], source, [request(1)], NOW) is None
    assert relief([source, slow, fast], source, [request(1)], NOW) == Move(1, "c")
    source.load.num_prefill_tokens = 10**6
    assert relief([source, fast], source, [request(1)], NOW) is None


def test_nobody_moves_twice_in_a_row() -> None:
    source = worker("a", free=2, num_running=4)
    assert relief([source, worker("b")], source, [request(1), request(2, moved_at=NOW - 1)], NOW) == Move(1, "b")
    assert relief([source, worker("b")], source, [request(1, moved_at=NOW - 1)], NOW) is None
    assert relief([source, worker("b")], source, [request(1, moved_at=NOW - REST_S)], NOW) == Move(1, "b")


def test_costs_are_measured_where_they_can_be() -> None:
    a, b = worker("a"), worker("b")
    assert link_bytes_s(a, b) == DEFAULT_LINK_BYTES_S
    b.load.links.add(incarnation="a", num_bytes=100, read_s=1.0)
    b.take(b.load)
    assert link_bytes_s(a, b) == DEFAULT_LINK_BYTES_S
    b.load.links[0].num_bytes = 4 << 20
    b.take(b.load)
    assert link_bytes_s(a, b) == 4 << 20
    b.load.links.add(incarnation="d", num_bytes=8 << 20, read_s=1.0)
    b.take(b.load)
    assert link_bytes_s(a, b) == 4 << 20
    assert link_bytes_s(worker("c"), b) == 6 << 20  # by all that it has pulled
    del b.load.links[1]
    b.take(b.load)
    assert math.isclose(pull_s(a, b, 4096), PULL_LATENCY_S + 4096e3 / (4 << 20))
    assert math.isclose(compute_s(a, 50, [a, b]), 0.5)
    fresh = worker("c", num_prefill_tokens=0, prefill_s=0.0)
    assert math.isclose(compute_s(fresh, 50, [fresh, a]), 0.5)
    assert compute_s(fresh, 50, [fresh]) < 0.01


def test_no_sequence_moves_to_other_weights() -> None:
    old, new = worker("a", is_draining=True, revision="old"), worker("b", revision="new")
    assert drain_move([old, new], [request(1)], {}, 4, NOW) is None
    assert drain_move([old, new, worker("c", free=40, revision="old")], [request(1)], {}, 4, NOW) == Move(1, "c")
    short = worker("a", free=2, num_running=4, revision="old")
    lasting = request(1, num_tokens=100, num_remaining=100)
    assert relief([short, worker("b", revision="old")], short, [lasting], NOW) is not None
    assert relief([short, new], short, [lasting], NOW) is None
