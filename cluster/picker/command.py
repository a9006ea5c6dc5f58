"""`diptych endpoint-picker`: chooses a router for each request that a gateway gets.

flags read -> ports bound, routers watched -> serves until SIGTERM or Ctrl-C -> open streams end
"""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...workers.common.errors import ConfigError
from ...workers.common.settings import read_secret
from ...workers.common.tls import server_certificate_end
from ...workers.config.extras import check_installed
from ...workers.telemetry.logs import configure_logs
from ..common.config_file import KEY_VARIABLES

if TYPE_CHECKING:
    import ssl

NEEDED = ("cryptography", "grpcio-health-checking", "starlette")
KEYS = (KEY_VARIABLES["metrics_key"], KEY_VARIABLES["api_key"])


def endpoint_picker(  # noqa: PLR0913, PLR0917  typer makes a flag of each parameter
    router: Annotated[
        list[str],
        typer.Option(metavar="HOST:PORT", help="HTTP port of routers, at all addresses of the name. Repeatable."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for the gateway; 0: any.")] = 9002,
    health_port: Annotated[int, typer.Option(min=0, max=65535, help="Port for gRPC health checks without TLS.")] = 9003,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Port for Prometheus.")] = 9090,
    fallbacks: Annotated[int, typer.Option(min=0, max=7, help="Further endpoints that the gateway may try.")] = 0,
    objective: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PRIORITY", help="Of an InferenceObjective. Repeatable.")
    ] = None,
    model_rewrite: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MODEL", help="Model to ask the routers for. Repeatable.")
    ] = None,
    model_rewrite_header: Annotated[
        bool,
        typer.Option(
            "--model-rewrite-header", help="Obey x-gateway-model-name-rewrite: where the gateway keeps clients from it."
        ),
    ] = False,
    key_file: Annotated[
        Path | None, typer.Option(help=f"With the routers' metrics key; else {' or '.join(KEYS)}, where set.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM; default: one that no authority has signed.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM.")] = None,
    tls: Annotated[bool, typer.Option("--tls/--no-tls", help="Serve the gateway with TLS.")] = True,
    router_ca: Annotated[Path | None, typer.Option(help="PEM, of the routers' certificates: they speak TLS.")] = None,
    router_name: Annotated[str | None, typer.Option(help="Name in the routers' certificates.")] = None,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that open streams get after SIGTERM.")] = 600.0,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log JSON, one object a line.")] = False,
) -> None:
    """Choose a router for each request of a gateway, by the Gateway API Inference Extension (docs/gateway.md)."""
    check_installed("`diptych endpoint-picker`", NEEDED)
    from .reading import ReadingRules
    from .server import PickerConfig
    from .serving import run
    from .watch import RouterAccess

    configure_logs("json" if json_logs else "text", "endpoint-picker")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every question to a router
    access = RouterAccess(_key(key_file), _router_tls(router_ca), router_name)
    priorities = {name: _priority(name, text) for name, text in _pairs("--objective", objective or ())}
    config = PickerConfig(
        routers=tuple(router),
        access=access,
        rules=ReadingRules(priorities, dict(_pairs("--model-rewrite", model_rewrite or ())), model_rewrite_header),
        num_fallbacks=fallbacks,
        certificate=_certificate(tls_cert, tls_key),
        has_tls=tls,
        drain_s=drain,
    )
    run(config, host, port, health_port, metrics_port)


def _key(path: Path | None) -> str | None:
    if path is not None:
        return read_secret(path, "--key-file", "key")
    return next((found for name in KEYS if (found := os.environ.get(name))), None)


def _router_tls(ca: Path | None) -> "ssl.SSLContext | None":
    if ca is None:
        return None
    import ssl

    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as e:  # also of what is no certificate
        raise ConfigError(f"--router-ca: cannot use {ca} ({e.strerror or e}): give a PEM file") from e


def _certificate(cert: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key belong together: give both, or neither")
    server_certificate_end("--tls-cert", cert, key)
    return cert.read_bytes(), key.read_bytes()


def _pairs(flag: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ConfigError(f"{flag}: {text!r} is not NAME=VALUE")
        yield name, value


def _priority(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--objective: the priority of {name} is a whole number, got {text!r}") from None
