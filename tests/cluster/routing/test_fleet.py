"""What the router knows of its workers."""

from dataclasses import replace

import pytest

from diptych.cluster.common.prediction import Level
from diptych.cluster.routing.fleet import Fleet, FleetWorker, RequestLoad, WorkerInfo
from diptych.proto import worker_pb2
from diptych.workers.common.errors import ConfigError, InternalError, LayoutMismatch, Unavailable
from diptych.workers.common.role import Role
from diptych.workers.common.wire import ROLE_TO_PROTO
from diptych.workers.core.runner import ModelInfo
from diptych.workers.kv.layout import LAYER_MAJOR, KVLayout

MODEL = ModelInfo("fake", "FakeForCausalLM", 1000, 512, (0,), "float32")
LAYOUT = KVLayout("float32", 4, num_layers=1, num_kv_heads=1, head_dim=1, model_id="fake")


def info(name: str, role: str = "mixed") -> WorkerInfo:
    return WorkerInfo(name, f"{name}:1", role, role)


def hello(
    model: ModelInfo = MODEL, layout: KVLayout = LAYOUT, role: Role = Role.MIXED, num_blocks: int = 10
) -> worker_pb2.Hello:
    return worker_pb2.Hello(
        model=model.to_proto("0"), layout=layout.to_proto(), num_blocks=num_blocks, role=ROLE_TO_PROTO[role]
    )


def load(num_free: int = 10, **fields: int) -> worker_pb2.LoadReport:
    return worker_pb2.LoadReport(num_blocks=10, num_free_blocks=num_free, **fields)


def test_a_worker_is_available_while_listed_up_and_not_draining() -> None:
    fleet = Fleet()
    assert fleet.update([info("a")]) == [info("a")]
    view = fleet.view("a")
    assert not view.is_available
    fleet.register("a", hello())
    assert view.is_available
    fleet.down("a", "gone")
    assert (view.is_available, view.problem) == (False, "gone")
    fleet.register("a", hello())
    assert (view.is_available, view.problem) == (True, "")
    assert fleet.update([]) == []
    assert not view.is_available
    assert fleet.update([info("a")]) == []
    assert view.is_available
    fleet.report("a", load(draining=True))
    fleet.report("a", load(draining=False))
    assert not view.is_available
    fleet.forget("a")
    assert fleet.views() == []
    fleet.down("a", "late")


def test_the_model_is_the_first_workers_and_its_context_the_smallest() -> None:
    fleet = Fleet()
    fleet.update([info("a"), info("b")])
    with pytest.raises(Unavailable, match="no worker has joined"):
        fleet.model()
    fleet.register("a", hello())
    assert fleet.model() == MODEL
    fleet.register("b", hello(replace(MODEL, max_context_tokens=100)))
    assert fleet.model().max_context_tokens == 100
    fleet.down("b", "")
    assert fleet.model().max_context_tokens == 512
    fleet.down("a", "")
    assert fleet.model() == MODEL


def test_workers_whose_kv_can_be_converted_are_welcome() -> None:
    fleet = Fleet()
    fleet.update([info("a"), info("b")])
    fleet.register("a", hello())
    other = replace(LAYOUT, block_size=8, dtype="bfloat16", axis_order=LAYER_MAJOR)
    fleet.register("b", hello(replace(MODEL, dtype="bfloat16"), layout=other))
    assert (fleet.view("a").block_size, fleet.view("b").block_size) == (4, 8)
    assert fleet.block_sizes() == {4, 8}
    assert fleet.model() == MODEL


def test_a_layout_that_cannot_be_is_refused_even_from_the_first() -> None:
    fleet = Fleet()
    fleet.update([info("a"), info("b")])
    with pytest.raises(LayoutMismatch, match="head_dim: 0 there is not in"):
        fleet.register("a", hello(layout=replace(LAYOUT, head_dim=0)))
    fleet.register("b", hello())


def test_another_model_or_layout_is_refused_side_by_side() -> None:
    fleet = Fleet()
    fleet.update([info("a"), info("b")])
    fleet.register("a", hello())
    with pytest.raises(ConfigError, match="name: other, served: fake"):
        fleet.register("b", hello(replace(MODEL, name="other")))
    with pytest.raises(LayoutMismatch, match=r"num_target_layers: 1 here, 2 there.*block_size 4 \| 8"):
        fleet.register("b", hello(layout=replace(LAYOUT, block_size=8, num_layers=2)))
    with pytest.raises(ConfigError, match="count of 0"):
        fleet.register("b", hello(num_blocks=0))
    assert not fleet.view("b").is_up


def test_a_load_report_that_cannot_be_is_refused() -> None:
    fleet = Fleet()
    fleet.update([info("a")])
    fleet.register("a", hello())
    for bad in (load(num_free=11), worker_pb2.LoadReport(num_blocks=11, num_free_blocks=1)):
        with pytest.raises(InternalError, match="load report"):
            fleet.report("a", bad)
    bad = load(links=[worker_pb2.PeerLink(incarnation="b", read_s=-1)])
    with pytest.raises(InternalError, match="duration"):
        fleet.report("a", bad)
    assert fleet.view("a").load.num_free_blocks == 10


def test_the_workers_own_word_on_its_role_counts() -> None:
    fleet = Fleet()
    fleet.update([info("a", "prefill")])
    assert fleet.view("a").role is Role.PREFILL
    fleet.register("a", hello(role=Role.PREFILL))
    fleet.report("a", load(role=worker_pb2.ROLE_DECODE))
    assert fleet.view("a").role is Role.DECODE


def test_what_we_sent_counts_until_a_report_tells_more() -> None:
    fleet = Fleet()
    fleet.update([info("a")])
    fleet.register("a", hello())
    view = fleet.view("a")
    for handle, tokens in ((1, 9), (2, 5)):
        fleet.add_request(handle, RequestLoad("a", num_tokens=tokens, num_blocks=3))
    assert (view.waiting_tokens, view.num_sequences, view.used_blocks) == (14, 2, 6)
    fleet.report("a", load(num_free=1, num_waiting_tokens=20, num_running=3, num_waiting=1))
    assert (view.waiting_tokens, view.num_sequences, view.used_blocks) == (20, 4, 9)
    fleet.end_prefill(1)
    assert (view.waiting_tokens, view.num_sequences) == (11, 4)
    fleet.report("a", load())
    assert (view.waiting_tokens, view.num_sequences) == (0, 2)
    for handle in (1, 2, 2, 3):
        fleet.remove_request(handle)
    assert (view.pending_tokens, view.num_in_flight, view.held_blocks) == (0, 0, 0)


def a_worker() -> tuple[Fleet, FleetWorker]:
    fleet = Fleet()
    fleet.update([info("a")])
    fleet.register("a", hello())
    return fleet, fleet.view("a")


def test_a_report_tells_how_much_of_a_prompt_is_left() -> None:
    fleet, view = a_worker()
    fleet.add_request(1, RequestLoad("a", num_tokens=100_000, num_blocks=1))
    found: list[int] = []
    for computed in range(0, 100_000, 20_000):
        left = 100_000 - computed
        fleet.report("a", load(num_waiting_tokens=left, num_prefill_tokens=computed, num_running=1))
        found.append(view.waiting_tokens)
    assert found == [100_000, 80_000, 60_000, 40_000, 20_000]
    fleet.end_prefill(1)
    fleet.remove_request(1)
    assert (view.pending_tokens, view.earlier_pending) == (0, 0)


def test_a_request_counts_until_reports_must_know_it() -> None:
    fleet, view = a_worker()
    known = {"num_waiting_tokens": 30, "num_running": 1}  # another router's
    fleet.report("a", load(num_prefill_tokens=1, **known))
    fleet.add_request(1, RequestLoad("a", num_tokens=50, num_blocks=1))
    for _ in range(5):  # a long step: the same report again and again
        fleet.report("a", load(num_prefill_tokens=1, **known))
        assert view.waiting_tokens >= 50
    fleet.report("a", load(num_prefill_tokens=9, **known))  # made before the request came
    assert view.waiting_tokens == 50
    fleet.report("a", load(num_prefill_tokens=17, num_waiting_tokens=64, num_running=2))
    assert view.waiting_tokens == 64


@pytest.mark.parametrize("num_reports", range(4))
@pytest.mark.parametrize("ends_prefill", [False, True])
def test_no_token_stays_pending(num_reports: int, *, ends_prefill: bool) -> None:
    fleet, view = a_worker()
    for handle in range(6):
        fleet.add_request(handle, RequestLoad("a", num_tokens=10 + handle, num_blocks=1))
        if handle % 2:
            for number in range(num_reports):
                told = handle * 10 + number
                fleet.report("a", load(num_prefill_tokens=told, num_waiting_tokens=told))
                assert view.pending_tokens >= view.earlier_pending >= 0
    for handle in (3, 0, 5, 1, 4, 2):
        if ends_prefill:
            fleet.end_prefill(handle)
        fleet.remove_request(handle)
        assert view.pending_tokens >= view.earlier_pending >= 0
    assert view.pending_tokens == 0


def test_what_ended_since_a_report_counts_no_more() -> None:
    fleet = Fleet()
    fleet.update([info("a")])
    fleet.register("a", hello())
    view = fleet.view("a")
    fleet.add_request(1, RequestLoad("a", num_tokens=9, num_blocks=3))
    fleet.report("a", load(num_free=5, num_waiting_tokens=9, num_running=1, num_decoding=1))
    assert (view.waiting_tokens, view.num_sequences, view.used_blocks, view.state.num_decodes) == (9, 1, 5, 1)
    fleet.end_prefill(1)
    fleet.remove_request(1)
    assert (view.waiting_tokens, view.num_sequences, view.used_blocks, view.state.num_decodes) == (0, 0, 2, 0)


def test_the_level_of_a_worker_is_that_of_the_sequences_which_decode_there() -> None:
    fleet = Fleet()
    fleet.update([info("a")])
    fleet.register("a", hello())
    cost = worker_pb2.StepCost(decode_s=0.001, decode_is_measured=True, prefill_is_measured=True)
    fleet.report("a", load(step_cost=cost))
    usual = Level(ttft_s=1.0, tpot_s=0.1)

    def goal_s() -> float:
        return fleet.view("a").times(fleet.costs, usual).goal_s

    assert goal_s() == 0.1
    tpots = {1: None, 2: 0.02, 3: 0.02, 4: 60.0, 5: 0.0001}
    for handle, own_s in tpots.items():
        fleet.add_request(handle, RequestLoad("a", 9, 1, tpot_s=own_s))
    fleet.add_request(6, RequestLoad("a", 9, 1, decodes=False, tpot_s=0.001))  # it decodes elsewhere
    fleet.remove_request(5)  # the shortest leaves no trace
    exact = (sum((tpots[handle] or 0.1) ** -4 for handle in (1, 2, 3, 4)) / 4) ** -0.25
    assert goal_s() == pytest.approx(exact, rel=1e-6)
    fleet.report("a", load(num_running=9, num_decoding=9, step_cost=cost))  # five are other routers'
    assert goal_s() == pytest.approx(((exact**-4 * 4 + 5 * 0.1**-4) / 9) ** -0.25, rel=1e-6)
    for handle in (1, 2, 3):
        fleet.remove_request(handle)
    fleet.report("a", load(num_running=1, num_decoding=1, step_cost=cost))
    assert goal_s() == pytest.approx(60.0, rel=1e-3)
    fleet.remove_request(4)
    assert goal_s() == 0.1


def test_health_counts_who_is_available_by_role() -> None:
    fleet = Fleet()
    fleet.update([info(name, name) for name in ("prefill", "decode", "mixed")])
    assert not fleet.health(0).ready
    for role in Role:
        fleet.register(role.value, hello(role=role))
    fleet.drains("mixed")
    health = fleet.health(7)
    assert health.ready
    assert (health.num_prefill_workers, health.num_decode_workers, health.num_mixed_workers) == (1, 1, 0)
    assert health.num_requests == 7


def test_other_weights_are_another_revision_only_of_another_generation() -> None:
    fleet = Fleet()
    fleet.update([info("a"), info("b"), replace(info("c"), generation=1)])
    fleet.register("a", hello())
    other = hello(layout=replace(LAYOUT, model_id="other weights", block_size=8, num_layers=2))
    with pytest.raises(LayoutMismatch, match="model_id"):
        fleet.register("b", other)
    fleet.register("c", other)
    assert [view.revision for view in fleet.views() if view.is_up] == ["fake", "other weights"]
    with pytest.raises(ConfigError, match="vocab_size: 999, served: 1000"):
        fleet.register("c", hello(replace(MODEL, vocab_size=999)))


def test_weights_of_a_generation_that_has_left_are_forgotten() -> None:
    """A roll-back to a folder that was overwritten: nobody serves what it was."""
    fleet = Fleet()
    fleet.update([info("a")])
    fleet.register("a", hello())
    fleet.update([info("b")])
    other = hello(layout=replace(LAYOUT, model_id="other weights"))
    with pytest.raises(LayoutMismatch, match="model_id"):
        fleet.register("b", other)
    fleet.forget("a")
    fleet.register("b", other)


def test_a_route_is_chosen_among_workers_of_one_revision() -> None:
    fleet = Fleet()
    fleet.update([info("a"), info("b"), replace(info("c"), generation=1)])
    assert fleet.candidates("", 1, 0) is fleet.by_incarnation(), "nothing is copied where there is one revision"
    for name in ("a", "b"):
        fleet.register(name, hello())
    fleet.register("c", hello(layout=replace(LAYOUT, model_id="new"), model=replace(MODEL, max_context_tokens=100)))
    chosen = [sorted(fleet.candidates("", 10, sample)) for sample in range(6)]
    assert chosen == [["a", "b"], ["a", "b"], ["c"]] * 2, "new requests: by the number of workers"
    assert all(sorted(fleet.candidates("", 101, sample)) == ["a", "b"] for sample in range(6)), "and by what they hold"
    assert [sorted(fleet.candidates("fake", 10, sample)) for sample in range(3)] == [["a", "b"]] * 3
    fleet.drains("a")
    assert sorted(fleet.candidates("fake", 10, 2)) == ["a", "b"]
    fleet.down("b", "")
    assert sorted(fleet.candidates("fake", 10, 2)) == ["c"], "none of its revision takes requests"
    assert sorted(fleet.of_revision("fake")) == ["a", "b"], "a hand-off never goes elsewhere"
    fleet.forget("a")
    fleet.forget("b")
    assert fleet.candidates("fake", 10, 0) is fleet.by_incarnation()
