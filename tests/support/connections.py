"""Breaks TCP connections, as what lies between two machines does that is set up anew: both ends live."""

import socket
import subprocess
from collections.abc import Collection

import psutil

Connection = tuple[tuple[str, int], tuple[str, int]]


def between(processes: Collection[psutil.Process], without: Collection[int] = ()) -> set[Connection]:
    """Connections that one of these processes has accepted, but for those to the ports `without`."""
    pids = {process.pid for process in processes}
    found = [each for each in psutil.net_connections("tcp") if each.pid in pids]
    ports = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN} - {*without}
    accepted = [each for each in found if each.status == psutil.CONN_ESTABLISHED and each.laddr.port in ports]
    return {((each.laddr.ip, each.laddr.port), (each.raddr.ip, each.raddr.port)) for each in accepted}


def has_joined(client: int, servers: Collection[int]) -> bool:
    """Return whether one process has connections to all ports of others, by their numbers."""
    found = psutil.net_connections("tcp")
    ports = {each.laddr.port for each in found if each.pid in servers and each.status == psutil.CONN_LISTEN}
    return ports <= {each.raddr.port for each in found if each.pid == client and each.raddr}


def cut(connections: Collection[Connection]) -> None:
    """Needs root, and Debian's iproute2."""
    for port in {local[1] for local, _ in connections}:
        subprocess.run(["ss", "--kill", "sport", "=", f":{port}"], capture_output=True, check=True)


def can_cut() -> bool:
    """Return whether the kernel breaks connections for this user."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        with accepted:
            try:
                cut([(accepted.getsockname(), accepted.getpeername())])
            except (OSError, subprocess.CalledProcessError):
                return False
            accepted.settimeout(1.0)
            try:
                return not accepted.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True
