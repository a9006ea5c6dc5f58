"""gRPC server of the endpoint picker: Envoy's external processing, and grpc.health.v1.

Health is answered under four names: `liveness` serves while the process does; `readiness`, the service's own name and
the empty one once every router has been asked. It is on a port of its own too, without TLS: a kubelet speaks none.
"""

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ...proto import envoy_ext_proc_pb2, envoy_ext_proc_pb2_grpc
from ...workers.common.channel import bind
from ...workers.common.errors import DiptychError, InvalidRequest
from ...workers.common.tls import make_identity
from ..common.quota import Quota
from .choice import RouterAsk, pick
from .exchange import Exchange
from .messages import Request, Response
from .metrics import PICKED, PickerMetrics
from .reading import ReadingRules, RequestHead
from .watch import RouterAccess, Routers

SERVICE = envoy_ext_proc_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
LIVENESS, READINESS = "liveness", "readiness"
MAX_MESSAGE_BYTES = 16 << 20  # a chunk is as large as Envoy's buffer of a connection

if TYPE_CHECKING:  # the class is generic in its stubs only
    Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class PickerConfig:
    """Settings of an endpoint picker. `routers`: HOST:PORT of their HTTP ports. `num_fallbacks`: further endpoints that
    the proxy may try. `certificate`: chain and key, PEM; None: one is made, that no authority has signed."""

    routers: tuple[str, ...]
    access: RouterAccess = field(default_factory=RouterAccess)
    rules: ReadingRules = field(default_factory=ReadingRules)
    num_fallbacks: int = 0
    max_body_bytes: int = 8 << 20
    max_kept_bytes: int = 64 << 20  # of the bodies that are being read
    body_timeout_s: float = 60.0
    certificate: tuple[bytes, bytes] | None = field(default=None, repr=False)
    has_tls: bool = True
    drain_s: float = 600.0  # that open streams get when it ends


class PickerPolicy:
    """RouterChoice of the routers that are watched."""

    def __init__(self, config: PickerConfig) -> None:
        self.routers = Routers(config.routers, config.access)
        self.metrics = PickerMetrics(self.routers.views)
        self._num = 1 + config.num_fallbacks
        self._turns = itertools.count()

    def choose(self, head: RequestHead, subset: frozenset[str] | None, call: str) -> list[str]:
        ask = RouterAsk(subset, call, head.key, head.ttft_s, head.is_sheddable, next(self._turns), head.computes)
        began, outcome = time.perf_counter(), PICKED
        try:
            found = pick(self.routers.views(), ask, self._num)
        except DiptychError as e:
            outcome = e.code
            raise
        finally:
            self.metrics.choosing.observe(time.perf_counter() - began)
            self.metrics.requests.labels(outcome).inc()
        if head.computes:
            self.routers.sent(found[0])
        return found

    def doubt(self, endpoints: Sequence[str]) -> None:
        self.metrics.doubts.inc(len(endpoints))
        for endpoint in endpoints:
            self.routers.doubt(endpoint)


class PickerService(envoy_ext_proc_pb2_grpc.ExternalProcessorServicer):
    def __init__(self, policy: PickerPolicy, config: PickerConfig) -> None:
        self._policy = policy
        self._config = config
        self._kept = Quota(config.max_kept_bytes, "the bodies of other requests are being read: try again later")

    async def Process(  # type: ignore[override]  # the stubs know no handler that reads and writes by its context
        self, _: object, context: "Context"
    ) -> None:
        try:
            with self._kept.share() as held:
                exchange = Exchange(self._policy, self._config.rules, held, self._config.max_body_bytes)
                try:
                    async with asyncio.timeout(self._config.body_timeout_s):
                        while exchange.is_choosing and await _step(exchange, context):
                            pass
                except TimeoutError:
                    await _write(exchange.on_slow_body(), context)
            while not exchange.is_over and await _step(exchange, context):
                pass
        except InvalidRequest as e:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, e.message)


async def _step(exchange: Exchange, context: "Context") -> bool:
    """Answer a message. False: the stream has ended."""
    message = await context.read()
    if not isinstance(message, Request):
        return False
    await _write(exchange.on(message), context)
    return True


async def _write(answers: Iterable[Response], context: "Context") -> None:
    for answer in answers:
        await context.write(answer)


class PickerServer:
    """Endpoint picker on its ports. `start` and `stop` on one event loop."""

    def __init__(self, config: PickerConfig) -> None:
        self.policy = PickerPolicy(config)
        self._config = config
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            # These pings find a proxy that left without a FIN (power loss, a cut cable).
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ]
        self._server = grpc.aio.server(options=options)
        self._probed = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._health = health.aio.HealthServicer()

    async def start(self, host: str, port: int, health_port: int | None = None) -> tuple[int, int | None]:
        """Listen on host:port, and for health without TLS on `health_port`; return the ports (0: the kernel chooses).
        Raises PortInUse, ConfigError."""
        envoy_ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server(
            PickerService(self.policy, self._config), self._server
        )
        for server in (self._server, self._probed):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        bound = bind(self._server, host, port, self._credentials())
        probed = None if health_port is None else bind(self._probed, host, health_port)
        await self.policy.routers.start()
        await self._report_health()
        await self._server.start()
        await self._probed.start()
        self._becoming_ready = asyncio.create_task(self._report_ready())
        return bound, probed

    async def stop(self, grace_s: float) -> None:
        """Take no new stream, give open ones `grace_s` to end: answers that a proxy streams pass through them."""
        self._becoming_ready.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        await self._probed.stop(0)
        await self.policy.routers.stop()

    def _credentials(self) -> grpc.ServerCredentials | None:
        config = self._config
        if not config.has_tls:
            return None
        if config.certificate is None:
            made = make_identity("endpoint picker")
            config = replace(config, certificate=(made.cert, made.key))
        assert config.certificate is not None
        chain, key = config.certificate
        return grpc.ssl_server_credentials([(key, chain)])

    async def _report_ready(self) -> None:
        await self.policy.routers.synced()
        await self._report_health()

    async def _report_health(self) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if self.policy.routers.is_synced else response.NOT_SERVING
        await self._health.set(LIVENESS, response.SERVING)
        for name in ("", READINESS, SERVICE):
            await self._health.set(name, status)
