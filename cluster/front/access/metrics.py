"""Metrics of a router's API keys, made at scrape time, so that a key that is gone leaves no series behind."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .key_ring import KeyRing
from .usage import Totals

_TOTALS: tuple[tuple[str, str, Callable[[Totals], int]], ...] = (
    ("requests", "Calls that began", lambda totals: totals.num_requests),
    ("prompt_tokens", "Prompt tokens of calls that ended", lambda totals: totals.prompt_tokens),
    ("cached_tokens", "Of those, found in a prefix cache", lambda totals: totals.cached_tokens),
    ("output_tokens", "Tokens of the answers", lambda totals: totals.completion_tokens),
)


class KeyMetrics(Collector):
    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        if self._keys.is_open:
            return
        yield GaugeMetricFamily("diptych_api_keys", "API keys that are accepted", len(self._keys.accounts))
        yield from self._used()
        what = "Looks at the file of API keys that failed: the keys stayed as they were"
        yield CounterMetricFamily("diptych_api_key_file_failures", what, self._keys.num_failed_loads)

    def _used(self) -> Iterator[Metric]:
        accounts = self._keys.accounts
        for name, what, value in _TOTALS:
            family = CounterMetricFamily(f"diptych_api_key_{name}", what, labels=["key"])
            for account in accounts:
                family.add_metric([account.name], value(account.totals))
            yield family
        running = GaugeMetricFamily("diptych_api_key_requests_in_flight", "Calls that run", labels=["key"])
        refused = CounterMetricFamily("diptych_api_key_refusals", "Calls beyond a limit", labels=["key", "reason"])
        for account in accounts:
            running.add_metric([account.name], account.limits.num_running)
            for reason, num in account.totals.num_refused.items():
                refused.add_metric([account.name, reason], num)
        yield running
        yield refused
