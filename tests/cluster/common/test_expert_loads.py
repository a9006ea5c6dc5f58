import json
from pathlib import Path

import pytest

from diptych.cluster.common.expert_loads import MAX_EXPERTS, MAX_LAYERS, add_up, balance, check_counts, imbalance, save
from diptych.cluster.routing.fleet import Fleet, WorkerInfo
from diptych.proto import worker_pb2
from diptych.workers.common.errors import ConfigError, InternalError
from diptych.workers.core.runner import ModelInfo
from diptych.workers.kv.layout import KVLayout
from diptych.workers.models.plan.expert_placement import read_loads


def state(**layers: list[int]) -> worker_pb2.WorkerState:
    named = [worker_pb2.LayerExperts(layer=int(name[1:]), tokens=tokens) for name, tokens in layers.items()]
    return worker_pb2.WorkerState(experts=named)


def test_workers_are_added_up_by_layer() -> None:
    assert add_up([state(l2=[1, 2], l0=[3, 4, 5]), state(), state(l2=[10, 0])]) == {0: [3, 4, 5], 2: [11, 2]}
    assert add_up([]) == {}


def test_workers_that_count_unlike_layers_are_told_apart() -> None:
    with pytest.raises(InternalError, match="2 and 3 experts in layer 2: they serve different models"):
        add_up([state(l2=[1, 2]), state(l2=[1, 2, 3])])


@pytest.mark.parametrize(("num_experts", "num_layers"), [(MAX_EXPERTS + 1, 1), (1, MAX_LAYERS + 1)])
def test_a_report_of_more_experts_than_a_model_has_is_refused(num_experts: int, num_layers: int) -> None:
    """By routers, which would make a series of each, and by the supervisor."""
    load = worker_pb2.LoadReport(num_blocks=8, expert_tokens=[1] * num_experts, expert_imbalance=[1.0] * num_layers)
    with pytest.raises(InternalError, match="a load report counts"):
        check_counts(load)
    fleet = Fleet()
    fleet.update([WorkerInfo("w", "w:1", "decode", "decode")])
    layout = KVLayout("float32", 4, num_layers=1, num_kv_heads=1, head_dim=1, model_id="fake")
    model = ModelInfo("fake", "FakeForCausalLM", 1000, 512, (0,), "float32")
    fleet.register("w", worker_pb2.Hello(model=model.to_proto("0"), layout=layout.to_proto(), num_blocks=8))
    with pytest.raises(InternalError, match="a load report counts"):
        fleet.report("w", load)


def test_what_is_saved_is_what_a_placement_reads(tmp_path: Path) -> None:
    counts = {1: [3, 4, 5], 2: [11, 2]}
    save(counts, tmp_path / "loads.json")
    assert read_loads(tmp_path / "loads.json", [3, 2]) == [[3, 4, 5], [11, 2]]
    assert json.loads((tmp_path / "loads.json").read_text()) == [[3, 4, 5], [11, 2]]
    with pytest.raises(ConfigError, match="cannot be written"):
        save(counts, tmp_path / "nowhere" / "loads.json")


def test_balance_of_placements() -> None:
    assert imbalance([6, 1, 1, 0]) == 3.0
    assert imbalance([0, 0]) == 0.0
    # In order: 7 and 1. Dealt out: 7 and 1. By load: 6 and 2, and with a copy of the first on either rank 4 and 4.
    assert balance({0: [6, 1, 1, 0]}, 2, 0) == {"contiguous": 1.75, "round_robin": 1.75, "by load": 1.5}
    assert balance({0: [6, 1, 1, 0]}, 2, 1)["by load"] == 1.0
    # Another layer with as much, in which all is even by order.
    assert balance({0: [6, 1, 1, 0], 4: [2, 2, 2, 2]}, 2, 0)["contiguous"] == 11 / 8
    assert balance({0: [0, 0]}, 2, 0)["by load"] == 0.0
