"""Prometheus metrics of one router. Each router has its own registry; workers appear with their load reports.

Names and units are vLLM's where the meaning is the same, under the prefix `diptych_`.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...workers.common.errors import Overloaded, RequestAborted
from ...workers.common.request import FinishReason, RequestLevel
from ..common.demand import KNOWN_S, ControlSeries
from ..common.prediction import Level
from ..common.timings import RequestTimes, RequestTimings
from ..common.worker_stats import TransferStats
from .fleet import FleetWorker

TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

HANDOFF_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_FINISHED = frozenset(reason.value for reason in FinishReason) - {FinishReason.ABORT.value}
_JUDGEMENTS = {
    (False, False): "met",
    (True, False): "missed_ttft",
    (False, True): "missed_tpot",
    (True, True): "missed_both",
}
_LABELS = ("worker", "worker_name", "pool", "role")
_TRANSFER_LABELS = ("worker", "worker_name", "source", "source_name", "transport")
_GAUGES: tuple[tuple[str, str, Callable[[FleetWorker], float]], ...] = (
    ("worker_up", "1 while this router has a link to the worker", lambda w: w.is_up),
    ("worker_draining", "1 when the worker takes nothing new", lambda w: w.is_draining),
    ("worker_requests_in_flight", "Requests of this router there", lambda w: w.num_in_flight),
    ("worker_running", "Sequences that run", lambda w: w.load.num_running),
    ("worker_waiting", "Sequences that wait", lambda w: w.load.num_waiting),
    ("worker_waiting_tokens", "Tokens that wait for their prefill", lambda w: w.load.num_waiting_tokens),
    ("worker_late_tokens", "Of those, of late prompts, which let others go first", lambda w: w.load.num_late_tokens),
    ("worker_kv_blocks", "KV blocks", lambda w: w.num_blocks),
    ("worker_kv_block_tokens", "Tokens in a KV block", lambda w: w.block_size),
    ("worker_kv_blocks_used", "KV blocks held by sequences", lambda w: w.num_blocks - w.load.num_free_blocks),
    ("worker_kv_blocks_free", "KV blocks free or evictable", lambda w: w.load.num_free_blocks),
    ("worker_prefix_hit_rate", "Of its prompt tokens so far, from the prefix cache", lambda w: w.prefix_hit_rate),
    ("worker_kv_blocks_leased", "KV blocks of open hand-offs", lambda w: w.load.num_leased_blocks),
    ("worker_kv_blocks_quarantined", "KV blocks held aside", lambda w: w.load.num_quarantined_blocks),
    ("worker_leases_open", "Hand-offs whose blocks it holds for a sink", lambda w: w.load.num_open_leases),
    ("worker_leases_late", "Of those, not renewed for half of their time", lambda w: w.load.num_late_leases),
)
_COUNTERS: tuple[tuple[str, str, Callable[[FleetWorker], float]], ...] = (
    ("worker_prefill_tokens", "Tokens prefilled", lambda w: w.load.num_prefill_tokens),
    ("worker_decode_tokens", "Tokens decoded", lambda w: w.load.num_decode_tokens),
    ("worker_forced_tokens", "Output tokens without a step of their own", lambda w: w.load.num_forced_tokens),
    ("worker_prompt_tokens", "Prompt tokens of sequences that were admitted", lambda w: w.load.num_prompt_tokens),
    ("worker_cached_tokens", "Of those, found in the prefix cache", lambda w: w.load.num_cached_tokens),
    ("worker_preemptions", "Sequences preempted", lambda w: w.load.num_preemptions),
    ("worker_failed_steps", "Steps that raised, and ended their sequences", lambda w: w.load.num_failed_steps),
    ("worker_handoffs_sent", "Hand-offs sealed", lambda w: w.load.num_handoffs_sent),
    ("worker_handoffs_received", "Hand-offs committed", lambda w: w.load.num_handoffs_received),
    ("worker_handoffs_failed", "Hand-offs that failed at the sink", lambda w: w.load.num_handoffs_failed),
    ("worker_leases_expired", "Leases that lapsed: their blocks came back", lambda w: w.load.num_expired_leases),
    ("worker_handoff_bytes", "KV bytes pulled", lambda w: w.load.handoff_bytes),
    ("worker_checksum_failures", "Pulls whose KV was not what the source had", lambda w: w.load.num_checksum_failures),
    ("worker_migrations_out", "Running sequences handed to another worker", lambda w: w.load.num_migrated_out),
    ("worker_prefixes_pulled", "Cached prefixes from another worker", lambda w: w.load.num_prefixes_pulled),
    ("worker_traces_dropped", "Requests whose spans were not sent", lambda w: w.load.num_dropped_traces),
)
_TRANSFER_COUNTERS: tuple[tuple[str, str, Callable[[TransferStats], float]], ...] = (
    ("link_bytes", "KV bytes that the worker read from the source", lambda stats: stats.num_bytes),
    ("link_read_seconds", "Time in which a read was under way", lambda stats: stats.read_s),
    ("link_reads", "Reads that succeeded", lambda stats: stats.num_reads),
    ("link_failures", "Pulls that failed", lambda stats: stats.num_failed),
)
_HANDOFF_PHASES: tuple[tuple[str, str, Callable[[RequestTimings], float]], ...] = (
    ("handoff_announce_to_pull", "From the first announcement to the first read", lambda t: t.announce_to_pull_s),
    ("handoff_pull", "With a read under way", lambda t: t.pull_s),
    ("handoff_last_segment", "From the first token to the last read", lambda t: t.last_segment_s),
    ("handoff_commit", "From the last read to the first decode step", lambda t: t.commit_s),
)


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """Counts of a router since its start."""

    ended: Mapping[str, int]  # requests, by outcome
    levels: Mapping[str, int]  # of those, by how they met their level; see judged()
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_resumes: int
    num_migrations: int
    num_failed_migrations: int


class RouterMetrics:
    """Counters, gauges and histograms of one router. `views` returns the workers at scrape time."""

    def __init__(self, views: Callable[[], Iterable[FleetWorker]]) -> None:
        self._registry = CollectorRegistry()
        r = self._registry
        self.requests = Counter("diptych_requests", "Requests that ended", ["outcome"], registry=r)
        self._levels = Counter(
            "diptych_level_requests", "Requests that ended, by their level", ["model", "tier", "outcome"], registry=r
        )
        self.in_flight = Gauge("diptych_requests_in_flight", "Requests that run or wait", registry=r)
        self.prompt_tokens = Counter("diptych_prompt_tokens", "Prompt tokens of requests that began", registry=r)
        self.cached_tokens = Counter("diptych_cached_prompt_tokens", "Of those, found in a prefix cache", registry=r)
        self.resumes = Counter("diptych_request_resumes", "Attempts after the first, where workers failed", registry=r)
        self.migrations = Counter("diptych_request_migrations", "Moves of running sequences", registry=r)
        self.failed_migrations = Counter(
            "diptych_request_migrations_failed", "Of which nothing came: the sequence ran on where it was", registry=r
        )
        self._ttft = _histogram("time_to_first_token", "From receipt to the first token", REQUEST_BUCKETS_S, r)
        self._tokens = _Tokens()
        r.register(self._tokens)
        self._e2e = _histogram("request", "From receipt to the end", REQUEST_BUCKETS_S, r)
        self._queue = _histogram("request_queue", "From receipt to the first step", REQUEST_BUCKETS_S, r)
        self._prefill = _histogram("request_prefill", "From the first step to the first token", REQUEST_BUCKETS_S, r)
        self._first_decode = _histogram("request_first_decode", "Making the second token", TOKEN_BUCKETS_S, r)
        self._handoff = [(_histogram(name, what, HANDOFF_BUCKETS_S, r), value) for name, what, value in _HANDOFF_PHASES]
        r.register(_Workers(views))
        self.control = _Control()
        r.register(self.control)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def families(self) -> Iterable[Metric]:
        return self._registry.collect()

    def began(self, num_prompt_tokens: int) -> None:
        self.in_flight.inc()
        self.prompt_tokens.inc(num_prompt_tokens)

    def delivered(self, times: RequestTimes, num_tokens: int, now: float) -> None:
        last = times.last_token_at
        if last is None:
            self._ttft.observe(now - times.started_at)
        else:
            self._tokens.observe(now - last)
        times.last_token_at = now
        self._tokens.num_tokens += num_tokens

    def ended(self, times: RequestTimes, outcome: str, now: float, timings: RequestTimings | None = None) -> None:
        """Count a request that ended. `timings`: None where there was no first token."""
        self.in_flight.dec()
        self.requests.labels(outcome).inc()
        if outcome == Overloaded.code:
            return
        self._e2e.observe(now - times.started_at)
        if timings is None:
            self._queue.observe((now if times.routed_at is None else times.routed_at) - times.started_at)
            return
        self._queue.observe(timings.queue_s)
        self._prefill.observe(timings.prefill_s)
        if times.num_delivered > 1:
            self._first_decode.observe(timings.first_decode_s)
        if timings.transport:
            for histogram, value in self._handoff:
                histogram.observe(value(timings))

    def judged(self, times: RequestTimes, asked: RequestLevel, level: Level, outcome: str) -> None:
        """Count a request that ended by whether it met its level. One that its client left tells nothing."""
        has_left = outcome == RequestAborted.code or (outcome in _FINISHED and not times.delivered_at)
        if not has_left:
            self._levels.labels(asked.model, asked.tier, _judgement(times, level, outcome)).inc()

    def totals(self) -> RequestTotals:
        return RequestTotals(
            _by_label(self.requests, "outcome"),
            _by_label(self._levels, "outcome"),
            _total(self.prompt_tokens),
            _total(self.cached_tokens),
            self._tokens.num_tokens,
            _total(self.resumes),
            _total(self.migrations),
            _total(self.failed_migrations),
        )

    def refused(self, num_sequences: int) -> None:
        self.requests.labels(Overloaded.code).inc(num_sequences)


def _by_label(counter: Counter, label: str) -> dict[str, int]:
    """Values of a counter, added up over its other labels."""
    found: dict[str, int] = {}
    for sample in (s for family in counter.collect() for s in family.samples if s.name.endswith("_total")):
        found[sample.labels[label]] = found.get(sample.labels[label], 0) + int(sample.value)
    return found


def _total(counter: Counter) -> int:
    return sum(int(s.value) for family in counter.collect() for s in family.samples if s.name.endswith("_total"))


def _judgement(times: RequestTimes, level: Level, outcome: str) -> str:
    if outcome not in _FINISHED:
        return "refused" if outcome == Overloaded.code else "failed"
    first_at, last_at = times.delivered_at[0], times.last_token_at or 0.0
    is_late = first_at - times.started_at > level.ttft_s
    is_slow = last_at - first_at > level.tpot_s * (times.num_delivered - 1)
    return _JUDGEMENTS[is_late, is_slow]


def _histogram(name: str, what: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"diptych_{name}_seconds", what, buckets=buckets, registry=registry)


class _Tokens(Collector):
    """Counts that change with every token: kept on one thread without the library's locks, exported at scrape time."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._counts = [0] * (len(TOKEN_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, latency_s: float) -> None:
        self._counts[bisect_left(TOKEN_BUCKETS_S, latency_s)] += 1
        self._sum_s += latency_s

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("diptych_generation_tokens", "Tokens delivered", self.num_tokens)
        bounds = [*map(str, TOKEN_BUCKETS_S), "+Inf"]
        yield HistogramMetricFamily(
            "diptych_inter_token_latency_seconds",
            "Between two deliveries of tokens",
            list(zip(bounds, map(float, accumulate(self._counts)), strict=True)),
            self._sum_s,
        )


class _Control(Collector):
    """Metrics of the controller, as the supervisor has reported them last; none where that is long ago."""

    def __init__(self) -> None:
        self._series: tuple[ControlSeries, ...] = ()
        self._known_at = float("-inf")

    def take(self, series: tuple[ControlSeries, ...], now: float) -> None:
        self._series, self._known_at = series, now

    def collect(self) -> Iterator[Metric]:
        if time.monotonic() - self._known_at > KNOWN_S:
            return
        for series in self._series:
            kind = CounterMetricFamily if series.is_counter else GaugeMetricFamily
            family = kind(f"diptych_{series.name}", series.what, labels=(series.label,))
            for label, value in series.values:
                family.add_metric([label], value)
            yield family


class _Workers(Collector):
    """Metrics of workers, made at scrape time, so that a worker that is gone leaves no series behind."""

    def __init__(self, views: Callable[[], Iterable[FleetWorker]]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        views = list(self._views())
        for name, what, value in _GAUGES:
            yield _filled(GaugeMetricFamily(f"diptych_{name}", what, labels=_LABELS), views, value)
        for name, what, value in _COUNTERS:
            yield _filled(CounterMetricFamily(f"diptych_{name}", what, labels=_LABELS), views, value)
        names = {view.incarnation: view.info.name for view in views}
        for name, what, count in _TRANSFER_COUNTERS:
            family = CounterMetricFamily(f"diptych_{name}", what, labels=_TRANSFER_LABELS)
            for view in views:
                for stats in view.transfer_stats:
                    ends = [view.incarnation, view.info.name, stats.source, names.get(stats.source, "")]
                    family.add_metric([*ends, stats.transport], count(stats))
            yield family
        yield from _expert_families(views)
        yield from _draft_families(views)


def _expert_families(views: list[FleetWorker]) -> Iterator[Metric]:
    """Series of each expert and of each layer, but not of each expert of each layer: a large model has thousands."""
    what = "Tokens that went to an expert, over all layers"
    tokens = CounterMetricFamily("diptych_worker_expert_tokens", what, labels=(*_LABELS, "expert"))
    what = "Tokens of a layer's busiest expert by those of its experts on average"
    imbalance = GaugeMetricFamily("diptych_worker_expert_imbalance", what, labels=(*_LABELS, "layer"))
    for view in views:
        labels = _labels(view)
        for expert, num_tokens in enumerate(view.load.expert_tokens):
            tokens.add_metric([*labels, str(expert)], num_tokens)
        for layer, ratio in enumerate(view.load.expert_imbalance):
            if ratio:
                imbalance.add_metric([*labels, str(layer)], ratio)
    yield tokens
    yield imbalance


def _draft_families(views: list[FleetWorker]) -> Iterator[Metric]:
    """Series of workers that have verified drafts, or computed for some, or failed to."""
    labels = (*_LABELS, "method")
    drafted = CounterMetricFamily("diptych_worker_drafted_tokens", "Tokens drafted and verified", labels=labels)
    accepted = CounterMetricFamily("diptych_worker_accepted_tokens", "Of those, accepted", labels=labels)
    what = "Tokens that a verification of drafts yielded: those accepted, and the one after them"
    yields = HistogramMetricFamily("diptych_worker_verification_tokens", what, labels=_LABELS)
    what = "Tokens whose KV in the model that drafts was computed later than in the model that is served"
    anew = CounterMetricFamily("diptych_worker_draft_tokens_computed_anew", what, labels=_LABELS)
    what = "Calls of the model that drafts in which an exception was raised"
    failures = CounterMetricFamily("diptych_worker_draft_failures", what, labels=_LABELS)
    what = "1: the model that drafts failed so often that it is off"
    off = GaugeMetricFamily("diptych_worker_draft_off", what, labels=_LABELS)
    for view in views:
        if view.load.num_draft_failures:
            failures.add_metric(_labels(view), view.load.num_draft_failures)
            off.add_metric(_labels(view), view.load.is_draft_off)
        if view.load.drafts or view.load.num_draft_tokens_anew:
            anew.add_metric(_labels(view), view.load.num_draft_tokens_anew)
        for counts in view.load.drafts:
            drafted.add_metric([*_labels(view), counts.method], counts.num_drafted)
            accepted.add_metric([*_labels(view), counts.method], counts.num_accepted)
        if numbers := view.load.draft_yields:
            bounds = [*(f"{n}.0" for n in range(1, len(numbers) + 1)), "+Inf"]
            sums = [*accumulate(numbers), sum(numbers)]
            buckets = list(zip(bounds, map(float, sums), strict=True))
            yields.add_metric(_labels(view), buckets, sum(n * num for n, num in enumerate(numbers, 1)))
    yield drafted
    yield accepted
    yield anew
    yield failures
    yield off
    yield yields


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, views: list[FleetWorker], value: Callable[[FleetWorker], float]
) -> Metric:
    for view in views:
        family.add_metric(_labels(view), value(view))
    return family


def _labels(view: FleetWorker) -> list[str]:
    return [view.incarnation, view.info.name, view.info.pool, view.role.value]
