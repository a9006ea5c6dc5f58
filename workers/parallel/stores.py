"""Places where the ranks of a worker find each other's addresses, as torch's collectives need one.

One machine        a file, in a folder closed to other users; all talk over the loopback interface
several machines   a store of rank 0's process, at an address of its machine; each machine talks over an address of its
                   own. Neither torch's store nor its collectives ask who connects: see `trusted_network`
"""

import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as torch_distributed

from ..common.errors import ConfigError

STALL = timedelta(seconds=60)  # the ranks of a step are milliseconds apart: one that is so late is stuck
LOOPBACK = "127.0.0.1"
DEVICES = "devices"  # name of the group of a worker's GPUs
_BACKLOG = 128

distributed: Any = torch_distributed  # its stubs do not export stores


@dataclass(frozen=True, slots=True)
class NetworkPlace:
    """A place of ranks on several machines."""

    address: str  # HOST:PORT of the store
    own_host: str  # address of this machine at which the other ranks reach this one
    group: str = ""  # name of those who meet there


Place = Path | NetworkPlace


def place_named(text: str, own_host: str) -> Place:
    """text: a file's path, or HOST:PORT of a store."""
    return Path(text) if text.startswith("/") else NetworkPlace(text, own_host)


def place_beside(place: Place, group: str) -> Place:
    """Return the place of another group of the same ranks."""
    if isinstance(place, NetworkPlace):
        return replace(place, group=group)
    return place.with_name(f"{place.name}-{group}")


def host_of(place: Place) -> str:
    """Address at which this rank listens for the others."""
    return place.own_host if isinstance(place, NetworkPlace) else LOOPBACK


def store_at(place: Place) -> Any:
    """Connect to the store of a place. Raises RuntimeError where there is none within STALL."""
    if isinstance(place, NetworkPlace):
        host, _, port = place.address.rpartition(":")
        store = distributed.TCPStore(host, int(port), is_master=False, timeout=STALL)
        return distributed.PrefixStore(place.group, store)
    store = distributed.FileStore(str(place), -1)
    store.set_timeout(STALL)  # without its file it would ask for minutes
    return store


class NetworkStore:
    """Store of rank 0's process, until it is closed."""

    def __init__(self, host: str) -> None:
        """host: an address of this machine. Raises ConfigError where it is none."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.bind((host, 0))
            listener.listen(_BACKLOG)
        except OSError as e:
            listener.close()
            raise ConfigError(
                f"ranks on other machines cannot connect to {host} ({e}): set host to an address of this machine"
            ) from e
        port = listener.getsockname()[1]
        self.host, self.address = host, f"{host}:{port}"
        self._store: Any = distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=STALL, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._store = None
