"""Metrics of one router's HTTP port. Those of its Router are in cluster/routing/metrics.py."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.registry import Collector

from .operations import OPERATIONS

_PATHS = [operation.path.replace(":path}", "}") for operation in OPERATIONS.values()]
ROUTES = frozenset(path for path in _PATHS if "{" not in path)
_NAMED = {path.partition("{")[0]: path for path in _PATHS if path.endswith("}")}  # by their beginning
OTHER = "other"  # stands for all paths that are not served, because clients may request any number of them
NO_ROUTE = "none"  # the connection was refused, or its request could not be read


class HttpMetrics:
    def __init__(self, others: Iterable[Collector] = ()) -> None:
        """`others`: shown with them."""
        self._registry = CollectorRegistry()
        for other in others:
            self._registry.register(other)
        r = self._registry
        labels = ["route", "status"]
        self._answers = Counter("diptych_http_responses", "HTTP answers that began", labels, registry=r)
        self._known: dict[tuple[str, str], Counter] = {}  # cached because the library's look-up takes a lock
        self._connections = Gauge("diptych_http_connections", "Open connections to the HTTP port", registry=r)

    def answered(self, path: str, status: int) -> None:
        series = (route_of(path), str(status))
        if (answers := self._known.get(series)) is None:
            answers = self._known[series] = self._answers.labels(*series)
        answers.inc()

    def refused(self, status: int) -> None:
        """Count an answer that was sent before a request was read."""
        self._answers.labels(NO_ROUTE, str(status)).inc()

    def connected(self, num_connections: int) -> None:
        self._connections.set(num_connections)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


def route_of(path: str) -> str:
    if path in ROUTES:
        return path
    return next((route for start, route in _NAMED.items() if path.startswith(start)), OTHER)
