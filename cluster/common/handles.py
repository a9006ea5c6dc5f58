"""Interfaces through which the supervisor starts and stops processes: placement.py implements them with Ray, tests
without."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ...workers.common.errors import DiptychError
from .config import ClusterConfig


@dataclass(frozen=True, slots=True)
class SettingsGeneration:
    """Settings of workers. `number`: 0, and one more with each upgrade."""

    number: int
    config: ClusterConfig


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    address: str  # host:port of its gRPC server
    incarnation: str
    pid: int
    node: str  # the machine's name
    cores: tuple[int, ...] | None = None  # that it has for itself
    generation: int = 0  # of its settings
    rank_host_nodes: tuple[str, ...] = ()  # its other machines' names

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all of its machines."""
        return self.node, *self.rank_host_nodes


@dataclass(frozen=True, slots=True)
class RouterStarted:
    host: str
    http_port: int
    grpc_port: int
    pid: int


Started_co = TypeVar("Started_co", WorkerStarted, RouterStarted, covariant=True)


class Startable(Protocol[Started_co]):
    async def start(self) -> Started_co:
        """Returns once the process serves, at once if it already does. Raises DiptychErrors."""
        ...

    async def alive(self) -> None:
        """Returns as soon as the process answers; raises a DiptychError where it says that it cannot serve."""
        ...

    async def waiting_for(self) -> str:
        """Return what must happen before it can be placed; empty once it is placed."""
        ...


class WorkerHandle(Startable[WorkerStarted], Protocol):
    async def wait(self) -> DiptychError:
        """Returns when the process has died, saying why."""
        ...

    async def kill(self) -> None:
        """End the process. Idempotent."""
        ...


class RouterHandle(Startable[RouterStarted], Protocol):
    async def wait(self) -> DiptychError: ...
    async def kill(self) -> None:
        """End the process and give its place back. Idempotent."""
        ...


class Launcher(Protocol):
    """Starts processes, or finds those that an earlier supervisor started under the same id."""

    async def worker(self, worker_id: str, pool: str, settings: SettingsGeneration) -> WorkerHandle:
        """`settings`: of one that has to be started."""
        ...

    def vacate(self, gang_id: str) -> None:
        """Give back the place of a gang, all of whose workers were killed. Idempotent."""
        ...

    async def router(self, router_id: str, before: RouterStarted | None) -> RouterHandle:
        """`before`: where the one listened that this one replaces; its clients expect it there."""
        ...

    def existing(self) -> list[tuple[str, str]]:
        """(worker id, pool) of the workers that live already; gives back the places of those that do not any more."""
        ...

    def remember(self, replicas: Mapping[str, int]) -> None:
        """Keep the targets for the supervisor that may follow this one."""
        ...

    def recall(self) -> dict[str, int] | None: ...
    def use(self, settings: SettingsGeneration) -> None:
        """Start routers with these settings, and tell them to those that join."""
        ...

    def keep_upgrade(self, text: str) -> None:
        """Keep the last upgrade for the supervisor that may follow this one."""
        ...

    def recall_upgrade(self) -> str | None: ...
