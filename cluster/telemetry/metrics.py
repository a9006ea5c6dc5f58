"""Metrics of the traces of one router process."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...workers.telemetry.export import SpanExport


class TraceMetrics(Collector):
    """Counts of a router's traces; none where traces are off."""

    def __init__(self, export: SpanExport | None) -> None:
        self._export = export

    def collect(self) -> Iterator[Metric]:
        if (export := self._export) is not None:
            yield CounterMetricFamily("diptych_trace_spans", "Spans that the collector took", export.num_spans)
            what = "Calls whose spans were not sent: too many waited, or the collector did not take them"
            yield CounterMetricFamily("diptych_traces_dropped", what, export.num_dropped)
            yield GaugeMetricFamily("diptych_traces_waiting", "Calls whose spans wait to be sent", export.num_waiting)
