"""Running cluster as its processes know it: the settings, the secret, the names. Frozen; knows no Ray."""

import hashlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ...workers.common.cores import usable_cores
from ...workers.common.tls import LinkTls
from ...workers.config.worker_config import WorkerConfig
from .config import ClusterConfig, Pools
from .gang import gang_of, members, rank_of
from .handles import RouterStarted, SettingsGeneration

NAMESPACE = "diptych"
WORKER, ROUTER = "worker", "router"


@dataclass(frozen=True, slots=True)
class Deployment:
    config: ClusterConfig
    token: str  # what workers ask of routers, of each other and of the supervisor
    is_local: bool  # Diptych started Ray here: workers listen on loopback and share cores and memory
    tls: LinkTls | None = None  # of every connection between the cluster's processes
    generation: int = 0  # of the settings, which an upgrade changes

    @property
    def start_id(self) -> str:
        """Name of this start of the cluster, which tells nothing of its token."""
        return hashlib.blake2b(b"start", key=self.token.encode()[:64], digest_size=16).hexdigest()

    def worker_name(self, worker_id: str) -> str:
        return process_name(self.config.name, WORKER, worker_id)

    def rank_host_name(self, worker_id: str, index: int) -> str:
        """`index`: of the worker's machine, from 1. No worker's name: a rank host is part of a worker."""
        return f"diptych:{self.config.name}:ranks:{worker_id}.{index}"

    def router_name(self, router_id: str) -> str:
        return process_name(self.config.name, ROUTER, router_id)

    def owns(self, name: str) -> bool:
        """Return whether it is the name of one of this cluster's workers or routers."""
        return owns(self.config.name, name)

    def worker_id(self, name: str) -> str | None:
        """The id in a worker's name; None for a name that is not one of this cluster's workers."""
        prefix = self.worker_name("")
        return name.removeprefix(prefix) if name.startswith(prefix) else None

    def with_settings(self, settings: SettingsGeneration) -> Self:
        return replace(self, config=settings.config, generation=settings.number)

    def listening_at(self, before: RouterStarted) -> Self:
        """Deployment with the ports that a router got where it asked for any."""
        ports = {"http_port": before.http_port, "grpc_port": before.grpc_port}
        router = self.config.router.model_copy(update=ports)
        return replace(self, config=self.config.model_copy(update={"router": router}))

    def num_cores(self, pool: str) -> int:
        """Number of cores that each worker of the pool has for itself on each of its machines; 0: it shares them. On a
        machine that is not ours alone, it is above 0 only where the settings say so."""
        settings = self.config.pools.get(pool)
        if settings.cores is not None:
            return settings.cores // settings.parallel.machines_per_worker
        return (self.config.worker(pool).threads or self._fair_cores(pool)) if self.is_local else 0

    def num_threads(self, pool: str) -> int:
        """Number of compute threads that each worker of the pool has on each of its machines."""
        return max(self._all_threads(pool) // self.config.pools.get(pool).parallel.machines_per_worker, 1)

    def _all_threads(self, pool: str) -> int:
        return self.config.worker(pool).threads or self.config.pools.get(pool).cores or self._fair_cores(pool)

    def _fair_cores(self, pool: str) -> int:
        if not self.is_local:
            return max(int(self.config.pools.get(pool).num_cpus), 1)
        return max(len(usable_cores()) // max(self.config.pools.num_workers, 1), 1)

    def worker_config(self, pool: str, host: str, worker_id: str, rank_hosts: tuple[str, ...] = ()) -> WorkerConfig:
        """`host`: the address on which a worker outside this machine listens. `rank_hosts`: those of its other
        machines."""
        config, settings = self.config, self.config.pools.get(pool)
        # Of the node's memory: a gang is on one node, which others may use too. Whole GPUs belong to one worker.
        share = max(config.pools.num_workers, 1) if self.is_local else settings.parallel.data_parallel
        if config.is_on_gpus and config.gpus_of(settings) >= 1:
            share = 1
        worker, gang_id = config.worker(pool), gang_of(worker_id)
        return worker.changed(
            role=pool,
            threads=self._all_threads(pool),
            data_rank=rank_of(worker_id),
            rendezvous=self._rendezvous(gang_id) if worker.parallel.data_parallel > 1 else None,
            rank_hosts=rank_hosts,
            kv_memory_fraction=worker.kv_memory_fraction / share,
            ttft_s=config.service_level.ttft_s,
            tpot_s=step_tpot_s(config),
            host="127.0.0.1" if self.is_local else host,
            auth_token=self.token,
            tls=self.tls,
        )

    def _rendezvous(self, gang_id: str) -> str:
        """A folder on the machine of the gang, whose name is a secret of this start of it."""
        name = hashlib.blake2b(f"{self.config.name} {gang_id}".encode(), key=self.token.encode()[:64], digest_size=8)
        return str(Path(tempfile.gettempdir()) / f"diptych-{name.hexdigest()}")


def step_tpot_s(config: ClusterConfig) -> float | None:
    """Time per token that the settings promise; None: they promise none."""
    level = config.service_level
    return level.tpot_s if "tpot_s" in level.model_fields_set else None


def make_worker_id(pool: str, number: int) -> str:
    """Return the name of a gang. `number`: counts all gangs that the cluster has started, from 1."""
    return f"{pool}-{number}"


def make_router_id(number: int) -> str:
    """`number`: from 0."""
    return f"router-{number + 1}"


def first_worker_ids(pools: Pools) -> list[tuple[str, str]]:
    """(worker id, pool) of the workers that a new cluster starts."""
    gangs = [(name, pool.parallel.data_parallel) for name, pool in pools.items() for _ in range(pool.replicas)]
    return [
        (worker_id, name)
        for number, (name, size) in enumerate(gangs, 1)
        for worker_id in members(make_worker_id(name, number), size)
    ]


def process_name(cluster: str, kind: str, name: str) -> str:
    """`kind`: WORKER or ROUTER."""
    return f"diptych:{cluster}:{kind}:{name}"


def owns(cluster: str, name: str) -> bool:
    """Return whether it is the name of one of the cluster's workers or routers."""
    return name.startswith(tuple(process_name(cluster, kind, "") for kind in (WORKER, ROUTER)))


def supervisor_name(cluster: str) -> str:
    return f"diptych:{cluster}:supervisor"


def cluster_of(name: str) -> str | None:
    """The cluster whose supervisor has that name; None for a name that is no supervisor's."""
    cluster = name.removeprefix("diptych:").removesuffix(":supervisor")
    return cluster if name == supervisor_name(cluster) else None
