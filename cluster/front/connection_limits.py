"""Limits of connections to each of a router's two ports."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 4096
    max_connections_per_address: int = 2048  # of HTTP only: gRPC's library does not count them
    max_header_bytes: int = 16 << 10
    header_timeout_s: float = 10.0  # for the TLS handshake, and again for the head of a request
    idle_timeout_s: float = 75.0  # without a request; longer than clients keep connections, so that they close first
    send_timeout_s: float = 30.0  # in which a client must read some of the data that waits for it
