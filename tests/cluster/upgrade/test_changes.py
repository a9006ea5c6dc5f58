"""What an upgrade may change, and how it is kept for the next supervisor."""

from dataclasses import replace
from typing import Any

import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.upgrade.changes import check_changes, named_alike
from diptych.cluster.upgrade.progress import Upgrade, UpgradePhase, from_json, to_json
from diptych.workers.common.errors import CheckpointError, ConfigError, WorkerLost

BEFORE: dict[str, Any] = {
    "model": "/models/first",
    "pools": {"prefill": {"threads": 1}, "decode": {}},
    "router": {"api_key": "a key of the clients", "cors_origins": ["https://example.com"]},
    "service_level": {"tpot_s": 0.05},
}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "/models/second"},
        {"block_size": 32, "kv_dtype": "int8"},
        {"pools": {"prefill": {"threads": 2, "num_cpus": 2}, "decode": {"label_selector": {"zone": "a"}}}},
    ],
)
def test_settings_of_workers_may_change(change: dict[str, Any]) -> None:
    before = build(BEFORE)
    after = named_alike(before, build(BEFORE | change))
    check_changes(before, after)
    assert after.shared.model.name == "first"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"router": {}}, "router"),
        ({"drain_timeout_s": 1}, "drain_timeout_s"),
        ({"pools": {"prefill": {"threads": 1}, "decode": {"max_replicas": 2}}}, r"pools\.decode\.max_replicas"),
        ({"pools": {"prefill": {"threads": 1}, "decode": {}, "mixed": {}}}, r"pools\.mixed\.replicas"),
        ({"log_format": "json"}, "traces and logs"),
    ],
)
def test_what_else_differs_is_named(change: dict[str, Any], name: str) -> None:
    before = build(BEFORE)
    with pytest.raises(ConfigError, match=f"and not .*{name}.*: leave that out"):
        check_changes(before, named_alike(before, build(BEFORE | change)))


def test_it_is_kept_as_it_is() -> None:
    first, second = build(BEFORE), build(BEFORE | {"model": "/models/second"})
    upgrade = Upgrade(3, 2, UpgradePhase.ROLLING_BACK, in_place=True, num_losses=1, reason="why", tried=("a", "b"))
    generations, found = from_json(to_json({2: first, 3: second}, upgrade))
    assert (generations, found) == ({2: first, 3: second}, upgrade)
    assert generations[2].service_level.model_fields_set == {"tpot_s"}, "what was not given stays so"


def test_it_goes_back_at_a_fault_and_at_a_second_loss() -> None:
    running = Upgrade(1, 0)
    back = running.failed("decode-3", CheckpointError("a shard is missing"))
    assert (back.wanted, back.other, back.phase) == (0, 1, UpgradePhase.ROLLING_BACK)
    assert back.reason == "decode-3: a shard is missing"
    lost = running.failed("decode-3", WorkerLost("killed"))
    assert (lost.wanted, lost.phase) == (1, UpgradePhase.RUNNING)
    assert lost.failed("decode-4", WorkerLost("killed")).phase is UpgradePhase.ROLLING_BACK
    tried_again = back.failed("decode-5", WorkerLost("killed"))
    assert tried_again == replace(back, setback="decode-5: killed"), "what comes back is tried until it is there"
    assert tried_again.finished().setback == ""
    assert back.finished().phase is UpgradePhase.ROLLED_BACK
    assert running.finished().finished().phase is UpgradePhase.DONE
