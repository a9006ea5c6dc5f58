"""gRPC channels and servers between our own processes: message limits, keepalive, and the cluster's token. No torch."""

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from ...proto import worker_pb2
from .errors import ConfigError, PortInUse, Unauthenticated
from .tls import SERVER_NAME, LinkTls, TlsIdentity
from .wire import GRPC_OPTIONS

log = logging.getLogger("diptych.tls")

TOKEN_KEY = "authorization"
ERROR_KEY = "diptych-error"  # trailing metadata: the name of the exception in errors.py
# Health checks come from orchestrators without a token, and answer only "serving".
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
MAX_BATCH_BYTES = 64 << 10  # of messages that are sent as one

Metadata = tuple[tuple[str, str], ...]
M = TypeVar("M", worker_pb2.RouterMessage, worker_pb2.WorkerMessage)


def auth_metadata(token: str | None) -> Metadata:
    """Metadata of every call to one of our processes. On the call, not by an interceptor of the channel: grpc.aio's
    leave a task behind for every stream that breaks."""
    return ((TOKEN_KEY, f"Bearer {token}"),) if token else ()


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """Credentials of a caller in the cluster: the token, and a certificate where TLS is on."""

    token: str | None = None
    tls: LinkTls | None = None


def open_channel(address: str, tls: LinkTls | None = None) -> grpc.aio.Channel:
    """A channel to one of our processes. Raises ConfigError for a certificate that cannot be used."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=GRPC_OPTIONS)
    options = [*GRPC_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.aio.secure_channel(address, _channel_credentials(tls), options=options)


class RequireKey(grpc.aio.ServerInterceptor):
    """Refuses calls whose metadata `authorization` is not accepted, with `refusal`."""

    def __init__(self, accepts: Callable[[bytes], bool], refusal: str) -> None:
        self._accepts = accepts

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
        given = authorization(handler_call_details.invocation_metadata)
        if handler_call_details.method.startswith(OPEN_SERVICES) or self._accepts(given):
            return await continuation(handler_call_details)
        return self._refuse


def authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """Value of `authorization` in a call's metadata; empty where there is none."""
    given = next((v for k, v in metadata or () if k == TOKEN_KEY), "")
    return given if isinstance(given, bytes) else given.encode()


def make_server(token: str | None) -> grpc.aio.Server:
    """A server that refuses calls without `token`, where there is one, in constant time."""
    expected = f"Bearer {token}".encode()
    check = RequireKey(partial(hmac.compare_digest, expected), "the cluster's token is missing or wrong")
    return grpc.aio.server(options=GRPC_OPTIONS, interceptors=[check] if token else [])


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


def _channel_credentials(tls: LinkTls) -> grpc.ChannelCredentials:
    """Credentials of a new connection to a peer. Raises ConfigError."""
    found = tls.load()
    return grpc.ssl_channel_credentials(found.ca, found.key, found.cert)


def server_credentials(tls: LinkTls) -> grpc.ServerCredentials:
    """Credentials of a server that requires a certificate of its callers. Raises ConfigError."""
    first = tls.load()
    reload: Any = _reloader(tls, first)  # may return None, which its type does not know
    return grpc.dynamic_ssl_server_credentials(_configuration(first), reload, True)


def _reloader(tls: LinkTls, first: TlsIdentity) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """A function that gRPC calls before each handshake. It returns None unless the certificate has changed."""
    current, problem = first, ""

    def reload() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current, problem
        try:
            found = tls.load()
        except ConfigError as e:  # files are replaced one by one, so this may last a moment
            if e.message != problem:
                log.warning("%s. The certificate that was read before stays in use", e.message)
            problem = e.message
            return None
        problem = ""
        if found == current:
            return None
        current = found
        log.info("a new certificate is in use, valid until %s", f"{found.valid_until:%Y-%m-%d %H:%M} UTC")
        return _configuration(found)

    return reload


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.ca)


class SendQueue(Generic[M]):
    """Messages that wait to be sent on one stream between a router and a worker. Those that wait together are sent as
    one: a message costs each side as much as the tokens of fifty sequences."""

    def __init__(self, join: Callable[[Sequence[M]], M]) -> None:
        """`join`: makes one message of several, as `join_router_messages` does."""
        self._join = join
        self._messages: deque[M] = deque()
        self._has_news = asyncio.Event()
        self._is_ended = False

    def put(self, message: M) -> None:
        self._messages.append(message)
        self._has_news.set()

    def end(self) -> None:
        """Let `take` return None after the messages that wait."""
        self._is_ended = True
        self._has_news.set()

    def clear(self) -> None:
        self._messages.clear()

    async def take(self) -> M | None:
        """Wait for messages. Returns those that wait, as one; None: no more come."""
        while not self._messages:
            if self._is_ended:
                return None
            self._has_news.clear()
            await self._has_news.wait()
        first = self._messages.popleft()
        if not self._messages:
            return first
        batch, num_bytes = [first], first.ByteSize()
        while self._messages and (num_bytes := num_bytes + self._messages[0].ByteSize()) <= MAX_BATCH_BYTES:
            batch.append(self._messages.popleft())
        return self._join(batch) if len(batch) > 1 else first


def join_router_messages(messages: Sequence[worker_pb2.RouterMessage]) -> worker_pb2.RouterMessage:
    return worker_pb2.RouterMessage(batch=worker_pb2.RouterMessages(messages=messages))


def join_worker_messages(messages: Sequence[worker_pb2.WorkerMessage]) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(batch=worker_pb2.WorkerMessages(messages=messages))


def each_of(message: M) -> Iterable[M]:
    """Messages that were sent as one."""
    if not message.HasField("batch"):
        return (message,)
    return message.batch.messages  # type: ignore[return-value]  # of the same kind
