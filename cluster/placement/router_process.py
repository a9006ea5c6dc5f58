"""Router process: the front door over a Router, on its listeners. Knows no Ray; the supervisor tells it the fleet.

ports bound -> tokenizer read -> router dials workers -> HTTP and gRPC listen ... -> listeners close, router hangs up
"""

import asyncio
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.registry import Collector

from ... import __version__
from ...workers.common.errors import InternalError
from ...workers.common.garbage import collect_rarely, loading
from ...workers.telemetry.export import SpanExport
from ..common.config import ClusterConfig, RouterConfig
from ..common.demand import ControlReport, WaitingRequests
from ..common.deployment import Deployment
from ..common.handles import RouterStarted
from ..dialects.dialect import find_dialect
from ..front.access.key_file import KeyFile
from ..front.access.key_ring import KeyRing
from ..front.access.metrics import KeyMetrics
from ..front.dashboard.snapshots import RouterIdentity, Snapshots
from ..front.front_door import FrontDoor
from ..front.grpc.api import InferenceServer
from ..front.http.api import make_app
from ..front.http.edge import AccessPolicy
from ..front.http.metrics import HttpMetrics
from ..front.http.server import bind, serve_http
from ..front.levels import ServiceLevels
from ..front.limits import ConnectionLimits, RequestLimits
from ..front.responses.store import StoreLimits
from ..routing.fleet import WorkerInfo
from ..routing.policy import RoutingConfig
from ..routing.router import Router
from ..telemetry.call_trace import Tracer
from ..telemetry.metrics import TraceMetrics
from ..telemetry.vllm_metrics import VllmMetrics
from ..tokens.tokenizer import Tokenizer

DRAIN_POLL_S = 0.1
READY_POLL_S = 0.1
JOIN_S = 5.0  # for a router that starts where workers serve
GRACE_S = 2.0  # for open calls, when the process is stopped


class RouterProcess:
    """`start` and `stop` on one running event loop. `router`: whose front door it is."""

    def __init__(self, deployment: Deployment) -> None:
        self._config = deployment.config
        self._routing = RoutingConfig.of(deployment.config)
        self.router = Router(self._routing, deployment.token, deployment.tls)
        self._stop = asyncio.Event()
        self._export: SpanExport | None = None  # None: traces are off
        self._http: asyncio.Task[None] | None = None  # once it serves

    def update_fleet(self, workers: Iterable[WorkerInfo]) -> None:
        self.router.update_fleet(workers)

    @property
    def waiting(self) -> WaitingRequests:
        """Requests for which there is no worker."""
        return self.router.waiting

    def on_control(self, report: ControlReport) -> None:
        self.router.on_control(report)

    async def start(self) -> RouterStarted:
        """Raises PortInUse, ConfigError or CheckpointError."""
        settings = self._config.router
        shares_port = settings.replicas > 1
        # First, so that a port in use is reported before the tokenizer is read.
        sock = bind(settings.host, settings.http_port, reuse_port=shares_port)
        path = settings.api_keys_file
        keys = KeyRing(settings.api_key, KeyFile(Path(path)) if path else None, max(settings.replicas, 1))
        self._export = open_traces(self._config)
        tracer = None if self._export is None else Tracer(self._export)
        with loading():
            tokenizer = await asyncio.to_thread(Tokenizer.load, Path(self._config.shared.model.model))
        collect_rarely()
        limits = RequestLimits(
            max_timeout_s=settings.request_timeout_s, strict=settings.strict, body_timeout_s=settings.body_timeout_s
        )
        levels = ServiceLevels(self._config.service_level, self._config.served_models)
        dialect = find_dialect(tokenizer.template, settings.tool_parser, settings.reasoning_parser)
        self._door = door = FrontDoor(self.router, tokenizer, limits, levels, dialect, needs_key=not keys.is_open)
        await door.open()
        bounds = _connection_limits(settings)
        self._grpc = InferenceServer(
            door, keys, tls=settings.grpc_tls, reuse_port=shares_port, limits=bounds, tracer=tracer
        )
        await self.router.start()
        await self._join()
        grpc_port = await self._grpc.start(settings.host, settings.grpc_port)
        metrics = HttpMetrics((KeyMetrics(keys), *self._telemetry()))
        self._reloading = asyncio.create_task(keys.keep_current())
        access = AccessPolicy(keys, settings.metrics_key, settings.cors_origins)
        snapshots = Snapshots(self.router, self._routing.level, RouterIdentity.here(settings.replicas))
        app = make_app(door, access, metrics, kept_responses(settings), tracer, snapshots)
        tls = settings.http_tls
        self._http = asyncio.create_task(
            serve_http(app, sock, self._stop, grace_s=GRACE_S, tls=tls, limits=bounds, metrics=metrics)
        )
        return RouterStarted(settings.host, sock.getsockname()[1], grpc_port, os.getpid())

    async def _join(self) -> None:
        """Wait until a worker has joined, if there are workers, at most JOIN_S: requests that came before would be
        refused."""
        deadline = time.monotonic() + JOIN_S
        while self.router.workers() and not self.router.health().ready and time.monotonic() < deadline:
            await asyncio.sleep(READY_POLL_S)

    def _telemetry(self) -> list[Collector]:
        """Metrics of traces, and those by vLLM's names."""
        found: list[Collector] = [TraceMetrics(self._export)]
        if self._config.router.vllm_metrics:
            found.append(VllmMetrics(self.router.metric_families, self._config.shared.model.name))
        return found

    def check(self) -> None:
        """Raises InternalError where the HTTP server, which was started, has ended by itself."""
        if self._http is not None and self._http.done() and not self._stop.is_set():
            raise InternalError("the HTTP server ended: see the router's log for the reason")

    async def ready(self) -> None:
        """Wait until a worker has joined, or none needs to."""
        while not self.router.health().ready:
            await asyncio.sleep(READY_POLL_S)

    async def drain(self, timeout_s: float) -> int:
        """Be ready no more, and wait until no request is open, at most `timeout_s`; return how many are. New ones are
        served meanwhile, for load balancers learn late."""
        self._door.readiness.leave()
        deadline = time.monotonic() + timeout_s
        while (num := self.router.health().num_requests) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        return num

    async def stop(self) -> None:
        """Take nothing new, give open calls a moment, end the rest with an error."""
        self._stop.set()
        if self._http is not None:
            self._reloading.cancel()
            await asyncio.gather(self._http, self._grpc.stop(GRACE_S))
        await self.router.stop()
        await self._door.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close)


def open_traces(config: ClusterConfig) -> SpanExport | None:
    """Export of the spans of a router. None: traces are off. Raises ConfigError."""
    resource = {
        "service.name": "diptych-router",
        "service.instance.id": uuid.uuid4().hex,
        "service.version": __version__,
        "service.namespace": config.name,
    }
    return SpanExport.open(config.shared.telemetry.trace_settings(os.environ), resource)


def kept_responses(settings: RouterConfig) -> StoreLimits:
    """Limits of the responses that a router keeps."""
    return StoreLimits(
        max_bytes=settings.max_kept_response_bytes,
        max_entries=settings.max_kept_responses,
        lifetime_s=settings.kept_response_lifetime_s,
    )


def _connection_limits(settings: RouterConfig) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=settings.max_connections,
        max_connections_per_address=settings.max_connections_per_address,
        max_header_bytes=settings.max_header_bytes,
        header_timeout_s=settings.header_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        send_timeout_s=settings.send_timeout_s,
    )
