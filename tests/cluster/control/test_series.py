"""Metrics of the controller: their values, and that docs/observability.md names exactly these."""

import re
from dataclasses import replace
from pathlib import Path

from diptych.cluster.common.demand import DecisionNote, PoolNote
from diptych.cluster.control.decisions import DecisionStatus, ForecastStatus
from diptych.cluster.control.series import report_of, series_of
from diptych.cluster.control.status import ClusterStatus, PoolStatus, WorkerStatus

DOCS = Path(__file__).parents[3] / "docs" / "observability.md"
WORKERS = (
    WorkerStatus("mixed-1", "mixed", "mixed", "ready", 1.0, prefill_budget=2047, target_prefill_budget=256),
    WorkerStatus("mixed-2", "mixed", "mixed", "ready", 1.0, prefill_budget=2048, target_prefill_budget=2048),
    WorkerStatus("mixed-3", "mixed", "mixed", "starting", 1.0),
)
STATUS = ClusterStatus(
    name="default",
    model="m",
    supervisor_pid=1,
    pools=(PoolStatus("mixed", 3, 2, 1, 0, 1, 4, start_s=12.5, needed=4), PoolStatus("decode", 0, 0, 0, 0, 0, 0)),
    workers=WORKERS,
    routers=(),
    num_decisions={"budgets": 5, "replicas": 2},
    num_verified_decisions={"budgets": 3},
    num_failed_decisions={"replicas": 1},
    forecasts=(ForecastStatus("mixed", 750.0, 10.0, 1, 0, 0.25, 0.125),),
)


def test_each_metric_has_its_value() -> None:
    found = {(series.name, label): value for series in series_of(STATUS) for label, value in series.values}
    assert found == {
        ("pool_target_replicas", "mixed"): 3.0,
        ("pool_target_replicas", "decode"): 0.0,
        ("pool_ready_replicas", "mixed"): 2.0,
        ("pool_ready_replicas", "decode"): 0.0,
        ("pool_needed_replicas", "mixed"): 4.0,
        ("pool_start_seconds", "mixed"): 12.5,
        ("pool_prefill_budget_tokens", "mixed"): 4095.0,
        ("pool_prefill_budget_tokens", "decode"): 0.0,
        ("pool_target_prefill_budget_tokens", "mixed"): 2304.0,
        ("pool_target_prefill_budget_tokens", "decode"): 0.0,
        ("controller_decisions", "budgets"): 5.0,
        ("controller_decisions", "replicas"): 2.0,
        ("controller_decisions_verified", "budgets"): 3.0,
        ("controller_decisions_failed", "replicas"): 1.0,
        ("forecast_prompt_tokens_per_second", "mixed"): 750.0,
        ("forecast_decoding_sequences", "mixed"): 10.0,
        ("forecast_missed_ratio", "mixed"): 0.25,
        ("forecast_best_missed_ratio", "mixed"): 0.125,
    }


def test_the_documentation_names_these_metrics() -> None:
    section = DOCS.read_text().partition("## Decisions of the controller")[2].partition("| field |")[0]
    named = set(re.findall(r"`diptych_(\w+)`", section))
    shown = {series.name + "_total" * series.is_counter for series in series_of(STATUS)}
    assert named == shown


def test_a_router_is_told_of_decisions_and_pools_too() -> None:
    decision = DecisionStatus(2.5, "budgets", "mixed", "flip 1", "it pays", "it did", has_failed=False)
    before = PoolStatus("decode", 1, 1, 0, 0, 0, 0, last_error="of long ago")
    failing = PoolStatus("mixed", 3, 2, 1, 0, 1, 4, num_failures=2, last_error="mixed-3: no memory")
    report = report_of(4.0, replace(STATUS, decisions=(decision,), pools=(before, failing)))
    assert report.ready_in_s == 4.0 and report.series == series_of(replace(STATUS, pools=(before, failing)))
    assert report.decisions == (DecisionNote(2.5, "budgets", "mixed", "flip 1", "it pays", "it did", False),)
    assert report.pools == (PoolNote("decode", 1, 1, 0, 0), PoolNote("mixed", 3, 2, 1, 0, "mixed-3: no memory"))
