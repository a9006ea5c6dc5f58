"""Options of stream sockets between the machines of one worker. No torch."""

import socket
import struct

KEEPALIVE_S = 5  # from the last byte to the first probe, and between probes
NUM_PROBES = 3
_TIMEVAL = struct.Struct("@ll")  # seconds, microseconds


def set_deadline(link: socket.socket, seconds: float | None) -> None:
    """Bound each receive and send by the kernel, also those by the descriptor alone, which then raise BlockingIOError;
    None: none is bounded."""
    whole, rest = divmod(seconds or 0.0, 1.0)
    bound = _TIMEVAL.pack(int(whole), int(rest * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, bound)


def keep_alive(link: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other machine is gone, and send small messages at once."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, NUM_PROBES),
        (socket.TCP_USER_TIMEOUT, (1 + NUM_PROBES) * KEEPALIVE_S * 1000),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
