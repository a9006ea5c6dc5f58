"""Serves an endpoint picker until a signal: the gateway's port, that of health checks, that of metrics."""

import asyncio
import signal
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from rich.console import Console

from ...workers.common.errors import PortInUse
from ...workers.common.event_loop import new_event_loop
from .server import PickerConfig, PickerServer


def run(config: PickerConfig, host: str, port: int, health_port: int, metrics_port: int) -> None:
    """Raises PortInUse."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(config, host, port, health_port, metrics_port))


async def _serve(config: PickerConfig, host: str, port: int, health_port: int, metrics_port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = PickerServer(config)
    metrics, thread = _serve_metrics(server.policy.metrics.registry, host, metrics_port)
    try:
        bound, probed = await server.start(host, port, health_port)
        ports = f"gateway {host}:{bound}    health {host}:{probed}    metrics {host}:{metrics.server_port}"
        Console().print(f"Ready: {ports}", soft_wrap=True)
        try:
            await stop.wait()
        finally:
            await server.stop(config.drain_s)
    finally:
        await asyncio.to_thread(metrics.shutdown)
        metrics.server_close()
        thread.join()


def _serve_metrics(registry: CollectorRegistry, host: str, port: int) -> tuple[WSGIServer, Thread]:
    try:
        return start_http_server(port, host, registry)
    except OSError as e:
        raise PortInUse(f"cannot listen on {host}:{port} ({e.strerror}): choose another --metrics-port") from e
