"""Metrics of an endpoint picker, for Prometheus."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .choice import RouterView

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1)
PICKED = "picked"


class PickerMetrics:
    """`views`: of the routers, now."""

    def __init__(self, views: Callable[[], Sequence[RouterView]]) -> None:
        self.registry = r = CollectorRegistry()
        what = "Requests, by what became of them: picked, or the code of the error"
        self.requests = Counter("diptych_picker_requests", what, ["outcome"], registry=r)
        what = "Time to choose routers for a request"
        self.choosing = Histogram("diptych_picker_choice_seconds", what, buckets=BUCKETS_S, registry=r)
        what = "Routers that did not take a request which the proxy sent them"
        self.doubts = Counter("diptych_picker_doubts", what, registry=r)
        r.register(_Routers(views))


class _Routers(Collector):
    """Series of the routers that are known now."""

    def __init__(self, views: Callable[[], Sequence[RouterView]]) -> None:
        self._views = views

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("diptych_picker_router_ready", "1: requests are sent there", labels=["endpoint"])
        load = GaugeMetricFamily(
            "diptych_picker_router_requests", "Requests that it has in flight", labels=["endpoint"]
        )
        for view in self._views():
            ready.add_metric([view.endpoint], view.is_ready)
            if view.is_ready:
                load.add_metric([view.endpoint], view.outlook.num_requests)
        yield ready
        yield load
