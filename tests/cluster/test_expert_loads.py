import json
from pathlib import Path

import pytest

from diptych.cluster.expert_loads import add_up, balance, imbalance, save
from diptych.proto import worker_pb2
from diptych.workers.errors import ConfigError
from diptych.workers.models.expert_placement import read_loads


def state(**layers: list[int]) -> worker_pb2.WorkerState:
    named = [worker_pb2.LayerExperts(layer=int(name[1:]), tokens=tokens) for name, tokens in layers.items()]
    return worker_pb2.WorkerState(experts=named)


def test_workers_are_added_up_by_layer() -> None:
    assert add_up([state(l2=[1, 2], l0=[3, 4, 5]), state(), state(l2=[10, 0])]) == {0: [3, 4, 5], 2: [11, 2]}
    assert add_up([]) == {}


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
