"""Dashboards and alert rules: each metric that they name is one that a router has, with the labels that they use."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from diptych.cluster.common.prediction import Level
from diptych.cluster.common.timings import RequestTimes, RequestTimings
from diptych.cluster.common.worker_stats import TransferStats
from diptych.cluster.control.decisions import ForecastStatus
from diptych.cluster.control.series import series_of
from diptych.cluster.control.status import ClusterStatus, PoolStatus
from diptych.cluster.front.access.key_ring import KeyRing
from diptych.cluster.front.access.metrics import KeyMetrics
from diptych.cluster.front.http.metrics import HttpMetrics
from diptych.cluster.routing.fleet import FleetWorker, WorkerInfo
from diptych.cluster.routing.metrics import RouterMetrics
from diptych.cluster.telemetry.metrics import TraceMetrics
from diptych.proto import worker_pb2
from diptych.workers.common.request import RequestLevel
from diptych.workers.telemetry.export import SpanExport
from diptych.workers.telemetry.settings import TraceSettings

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
RULES, TESTS = FOLDER / "rules" / "diptych.rules.yaml", FOLDER / "rules" / "diptych.tests.yaml"
DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
OF_PROMETHEUS = {"job", "instance", "le"}  # labels that it adds, and the buckets'
USED = re.compile(r"(?<![\w:])(diptych[_:][\w:]+)\s*(?:\{([^}]*)\})?")
SELECTED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPED = re.compile(r"\bby\s*\(([^)]*)\)")
CALLED = re.compile(r"\b([a-z_]+)\s*\(")
CALLS = {"sum", "max", "count", "rate", "increase", "histogram_quantile", "by"}
WIDTH = 24  # of a dashboard


def router_page() -> str:
    """Page of metrics of a router on which every series has been shown once."""
    view = FleetWorker(WorkerInfo("w", "w:1", "decode", "decode", "decode-1"), is_up=True, num_blocks=8)
    drafts = [worker_pb2.DraftCounts(method="ngram", num_drafted=9, num_accepted=4)]
    view.take(worker_pb2.LoadReport(expert_tokens=[5], expert_imbalance=[1.5], drafts=drafts, draft_yields=[2]))
    view.transfer_stats = (TransferStats("a", "nixl", 640, 0.5, 3, 0),)
    metrics, times = RouterMetrics(lambda: [view]), RequestTimes(1.0)
    metrics.began(1)
    times.delivered(2, 2.0)
    metrics.ended(times, "stop", 3.0, RequestTimings(*[0.5] * 10, 7, "nixl"))
    metrics.judged(times, RequestLevel(model="m"), Level(1.0, 1.0), "stop")
    pools, kinds = (PoolStatus("decode", 1, 1, 0, 0, 1, 1, 2.0, 1),), {"budgets": 1}
    forecasts = (ForecastStatus("decode", 1.0, 1.0, 0, 0, 0.5, 0.5),)
    status = ClusterStatus("c", "m", 1, pools, (), (), None, (), (), kinds, kinds, kinds, forecasts=forecasts)
    metrics.control.take(series_of(status), now=float("inf"))
    keys = KeyRing("a key of the clients")
    keys.accounts[0].totals.num_refused["tokens"] += 1
    export = SpanExport(TraceSettings("grpc"), lambda _: True, lambda: None)
    http = HttpMetrics((KeyMetrics(keys), TraceMetrics(export)))
    http.answered("/health", 200)
    export.close()
    return (metrics.exposition() + http.exposition()).decode()


def known_series() -> dict[str, set[str]]:
    """Labels of each series that a router shows."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(router_page()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def recorded() -> dict[str, set[str]]:
    """Labels of the series that the rules record."""
    rules = (rule for group in groups() for rule in group["rules"] if "record" in rule)
    return {rule["record"]: labels_by(rule["expr"]) - {"le"} for rule in rules}


def groups() -> list[dict[str, Any]]:
    return yaml.safe_load(RULES.read_text())["groups"]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in groups() for rule in group["rules"] if "alert" in rule}


def labels_by(expression: str) -> set[str]:
    return {label.strip() for found in GROUPED.findall(expression) for label in found.split(",")}


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression, with where it stands."""
    for group in groups():
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"]


def test_every_metric_is_one_of_a_router() -> None:
    series = known_series() | recorded()
    assert len(series) > 80
    num = 0
    for where, expression in expressions():
        used = USED.findall(expression)
        assert used, where
        for name, selector in used:
            num += 1
            assert name in series, f"{where}: a router has no {name}"
            selected = set(SELECTED.findall(re.sub(r'"[^"]*"', "", selector)))
            assert selected <= series[name] | OF_PROMETHEUS, f"{where}: {name} has no label {selected - series[name]}"
        all_labels = set.union(OF_PROMETHEUS, *(series[name] for name, _ in used))
        assert labels_by(expression) <= all_labels, f"{where}: {labels_by(expression) - all_labels}"
    assert num > 100


def test_expressions_are_written_as_prometheus_reads_them() -> None:
    for where, expression in expressions():
        bare = re.sub(r'"[^"]*"', "", expression)
        assert set(CALLED.findall(bare)) - {"or", "and", "unless"} <= CALLS, where
        for opening, closing in ("()", "[]", "{}"):
            depth = 0
            for letter in bare:
                depth += (letter == opening) - (letter == closing)
                assert depth >= 0, where
            assert depth == 0, where
        assert set(re.findall(r"\[([^]]*)\]", bare)) <= {"5m", "10m", "30m", "1h", "$__rate_interval"}, where


def test_alerts_say_what_is_wrong_and_what_helps() -> None:
    for name, rule in alerts().items():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}, name
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name
        assert rule["annotations"].keys() == {"summary", "description"}, name
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        groups_by = labels_by(rule["expr"])
        for record, labels in recorded().items():
            groups_by |= labels if record in rule["expr"] else set()
        assert shown <= groups_by, f"{name} shows labels that its expression has not: {shown - groups_by}"


def test_every_alert_is_tried() -> None:
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    fired = {tried["alertname"] for test in tests for tried in test["alert_rule_test"] if tried["exp_alerts"]}
    quiet = {tried["alertname"] for test in tests for tried in test["alert_rule_test"] if not tried["exp_alerts"]}
    assert fired == quiet == alerts().keys()


@pytest.mark.promtool
def test_promtool_finds_what_the_rules_say() -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing: install Debian's prometheus, or put promtool on the PATH"
    for command in (["check", "rules", RULES.name], ["test", "rules", TESTS.name]):
        run = subprocess.run([promtool, *command], cwd=RULES.parent, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_can_be_loaded_anywhere_and_changed(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["editable"]
    assert "id" not in board  # Grafana gives one
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "job"}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < WIDTH
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"


def test_dashboards_have_names_of_their_own() -> None:
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len(boards) == len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 2
