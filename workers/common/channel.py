"""gRPC channels and servers between our own processes: message limits, keepalive, and the cluster's token. No torch."""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from .errors import ConfigError, PortInUse, Unauthenticated
from .wire import GRPC_OPTIONS

TOKEN_KEY = "authorization"
ERROR_KEY = "diptych-error"  # trailing metadata: the name of the exception in errors.py
# Health checks come from orchestrators without a token, and answer only "serving".
OPEN_SERVICES = ("/grpc.health.v1.Health/",)


Metadata = tuple[tuple[str, str], ...]


def auth_metadata(token: str | None) -> Metadata:
    """Metadata of every call to one of our processes. On the call, not by an interceptor of the channel: grpc.aio's
    leave a task behind for every stream that breaks."""
    return ((TOKEN_KEY, f"Bearer {token}"),) if token else ()


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to one of our processes."""
    return grpc.aio.insecure_channel(address, options=GRPC_OPTIONS)


class _RequireToken(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, in constant time."""

    def __init__(self, token: str, refusal: str) -> None:
        self._expected = f"Bearer {token}".encode()

        async def refuse(_: object, context: Any) -> None:
            name = ((ERROR_KEY, Unauthenticated.__name__),)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal, trailing_metadata=name)

        # Whatever the call's kind: a handler of streams is called before the first message has come.
        self._refuse = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        given = next((v for k, v in handler_call_details.invocation_metadata if k == TOKEN_KEY), "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if handler_call_details.method.startswith(OPEN_SERVICES) or hmac.compare_digest(given_bytes, self._expected):
            return await continuation(handler_call_details)
        return self._refuse


def make_server(
    token: str | None,
    *,
    refusal: str = "the cluster's token is missing or wrong",
    options: Sequence[tuple[str, Any]] = GRPC_OPTIONS,
) -> grpc.aio.Server:
    """A server that answers calls without `token`, where there is one, with `refusal`."""
    return grpc.aio.server(options=options, interceptors=[_RequireToken(token, refusal)] if token else [])


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> int:
    """Listen on host:port (0: the kernel chooses), with TLS where there are credentials, and return the port. Raises
    PortInUse or ConfigError."""
    address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as e:
        if port:
            raise PortInUse(f"cannot listen on {host}:{port}: {e}. Choose another port, or 0 for any free one") from e
        raise ConfigError(f"cannot listen on {host}: {e}. Is it an address of this machine?") from e
    if bound == 0:
        raise PortInUse(f"cannot listen on {host}:{port}: it is in use. Choose another port, or 0 for any free one")
    return bound
