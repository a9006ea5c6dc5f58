"""Metrics of the controller. The supervisor has no HTTP port: routers show them (common/demand.py). Pure."""

from collections.abc import Callable, Iterable, Mapping

from ..common.demand import ControlReport, ControlSeries, DecisionNote, PoolNote
from .decisions import ForecastStatus
from .status import ClusterStatus, PoolStatus, WorkerStatus

_POOLS: tuple[tuple[str, str, Callable[[PoolStatus], float | None]], ...] = (
    ("pool_target_replicas", "Workers that the pool should have", lambda p: p.target),
    ("pool_ready_replicas", "Workers that are ready", lambda p: p.num_ready),
    ("pool_needed_replicas", "Workers needed by the forecast, when one that starts now serves", lambda p: p.needed),
    ("pool_start_seconds", "Time that a start of a worker takes at most, by the last ones", lambda p: p.start_s),
)
_BUDGETS: tuple[tuple[str, str, Callable[[WorkerStatus], float]], ...] = (
    ("pool_prefill_budget_tokens", "Prefill budgets that workers report, in all", lambda w: w.prefill_budget),
    (
        "pool_target_prefill_budget_tokens",
        "Prefill budgets that they should have",
        lambda w: w.target_prefill_budget or 0,
    ),
)
_DECISIONS: tuple[tuple[str, str, Callable[[ClusterStatus], Mapping[str, int]]], ...] = (
    ("controller_decisions", "Decisions", lambda s: s.num_decisions),
    ("controller_decisions_verified", "Decisions whose result was good", lambda s: s.num_verified_decisions),
    ("controller_decisions_failed", "Decisions that did nothing", lambda s: s.num_failed_decisions),
)
_FORECASTS: tuple[tuple[str, str, Callable[[ForecastStatus], float]], ...] = (
    ("forecast_prompt_tokens_per_second", "Prompt tokens that are expected", lambda f: f.prompt_tokens_per_s),
    ("forecast_decoding_sequences", "Sequences that are expected to decode", lambda f: f.num_decodes),
    ("forecast_missed_ratio", "Requests expected to miss their level, as budgets are", lambda f: f.expected_misses),
    ("forecast_best_missed_ratio", "The same with the best budgets", lambda f: f.best_expected_misses),
)


def report_of(ready_in_s: float | None, status: ClusterStatus) -> ControlReport:
    """Return what a router is told. `ready_in_s`: see ControlReport."""
    decisions = tuple(
        DecisionNote(d.age_s, d.kind, d.subject, d.action, d.reason, d.result, d.has_failed) for d in status.decisions
    )
    pools = tuple(
        PoolNote(p.name, p.target, p.num_ready, p.num_starting, p.num_draining, p.last_error if p.num_failures else "")
        for p in status.pools
    )
    return ControlReport(ready_in_s, series_of(status), decisions, pools)


def series_of(status: ClusterStatus) -> tuple[ControlSeries, ...]:
    """Return the metrics of a cluster. Those without a value have no entry for that label."""
    ready = [w for w in status.workers if w.phase == "ready"]
    found = [
        ControlSeries(name, what, "pool", _values((p.name, value(p)) for p in status.pools))
        for name, what, value in _POOLS
    ]
    found += [
        ControlSeries(name, what, "pool", _values((p.name, _sum(ready, p.name, value)) for p in status.pools))
        for name, what, value in _BUDGETS
    ]
    found += [
        ControlSeries(name, what, "kind", _values(counts(status).items()), is_counter=True)
        for name, what, counts in _DECISIONS
    ]
    found += [
        ControlSeries(name, what, "pools", _values((f.pools, value(f)) for f in status.forecasts))
        for name, what, value in _FORECASTS
    ]
    return tuple(found)


def _sum(workers: list[WorkerStatus], pool: str, value: Callable[[WorkerStatus], float]) -> float:
    return sum(value(w) for w in workers if w.pool == pool)


def _values(pairs: Iterable[tuple[str, float | None]]) -> tuple[tuple[str, float], ...]:
    return tuple((label, float(value)) for label, value in pairs if value is not None)
