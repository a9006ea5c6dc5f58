"""Finds the supervisor of a cluster by its name in Ray, and carries its errors through Ray."""

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import list_named_actors

from ...workers.common.errors import DiptychError
from ..common.address_file import no_cluster
from ..common.deployment import NAMESPACE, cluster_of, supervisor_name


@dataclass(frozen=True, slots=True)
class Refused:
    """A DiptychError on its way through Ray, which would wrap an exception in one of its own."""

    error: str
    message: str

    @classmethod
    def because(cls, error: DiptychError, node: str = "") -> "Refused":
        """`node`: the machine where it happened, if it may be another one than the reader's."""
        return cls(type(error).__name__, f"{error.message} (on {node})" if node else error.message)


def find_supervisor(cluster: str) -> Any:
    """Raises Unavailable if this Ray runs no cluster of that name."""
    try:
        return ray.get_actor(supervisor_name(cluster), namespace=NAMESPACE)
    except ValueError as e:
        running = sorted(found for name in list_named_actors() if (found := cluster_of(name)))
        raise no_cluster(cluster, "on this Ray", running) from e


async def found_supervisor(cluster: str) -> Any:
    """`find_supervisor` for an event loop that serves requests. It asks Ray's GCS, and waits as long as that is away:
    on a thread, therefore."""
    return await asyncio.to_thread(find_supervisor, cluster)
