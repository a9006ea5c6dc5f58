"""Proof between two processes of a cluster that both know its token, on a new TCP connection. No torch.

    caller  -> 32 random bytes          both: HMAC-SHA256(token, who says it, the caller's bytes, the listener's)
    listener -> 32 random bytes, its proof
    caller  -> its proof

It proves who has connected; it hides nothing, and what follows can be changed on the way: the ranks of a worker use it
on networks that are trusted (`trusted_network`).
"""

import hmac
import os
import socket
import struct

from ..common.errors import RankLost

NONCE_BYTES = 32
DEADLINE_S = 10.0
KEEPALIVE_S = 5  # from the last byte to the first probe, and between probes
NUM_PROBES = 3


def prove_to_listener(link: socket.socket, token: str | None) -> None:
    """Prove it as the caller. Raises RankLost, or OSError where the connection ends."""
    own = os.urandom(NONCE_BYTES)
    link.sendall(own)
    said = _receive(link, 2 * NONCE_BYTES)
    theirs, proof = said[:NONCE_BYTES], said[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"listener", own, theirs)):
        raise RankLost("the rank host has another token: give both the token of one cluster")
    link.sendall(_proof(token, b"caller", own, theirs))


def prove_to_caller(link: socket.socket, token: str | None) -> None:
    """Prove it as the listener. Raises RankLost, or OSError where the connection ends."""
    own, theirs = os.urandom(NONCE_BYTES), _receive(link, NONCE_BYTES)
    link.sendall(own + _proof(token, b"listener", theirs, own))
    if not hmac.compare_digest(_receive(link, NONCE_BYTES), _proof(token, b"caller", theirs, own)):
        raise RankLost("who connected has another token: give both the token of one cluster")


def set_deadline(link: socket.socket, seconds: float | None) -> None:
    """Bound each receive and send, also those by the descriptor alone; None: none is bounded."""
    whole, rest = divmod(seconds or 0.0, 1.0)
    bound = struct.pack("ll", int(whole), int(rest * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, bound)


def keep_alive(link: socket.socket) -> None:
    """Have the kernel end a connection whose other machine is gone, and send small messages at once."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, NUM_PROBES),
        (socket.TCP_USER_TIMEOUT, (1 + NUM_PROBES) * KEEPALIVE_S * 1000),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def _proof(token: str | None, who: bytes, of_caller: bytes, of_listener: bytes) -> bytes:
    return hmac.digest((token or "").encode(), b"diptych ranks " + who + of_caller + of_listener, "sha256")


def _receive(link: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = link.recv(num_bytes - len(found))
        if not part:
            raise ConnectionResetError("the connection was closed")
        found += part
    return found
