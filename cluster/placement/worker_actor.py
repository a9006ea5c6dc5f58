"""Processes of one worker, as Ray actors: the worker's own, and a rank host on each of its other machines.

    rank hosts listen ──addresses──> the worker asks them for its ranks ──> all serve ──> the worker ends, its ranks too

A rank host serves on until it is stopped. One that is lost ends the worker, which the supervisor notices.
"""

import asyncio
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.util import get_node_ip_address

from ...workers.common.cores import usable_cores
from ...workers.common.errors import DiptychError
from ...workers.telemetry.logs import configure_logs
from ..common.cores import CoreClaim
from ..common.deployment import Deployment
from ..common.handles import WorkerStarted
from .actor_calls import ask
from .supervisor_name import Refused


@dataclass(frozen=True, slots=True)
class RankHostStarted:
    address: str  # host:port
    node: str  # the machine's name


class RankHostActor:
    """The process that starts a worker's ranks on a machine other than the worker's own."""

    def __init__(self, deployment: Deployment, pool: str) -> None:
        configure_logs(deployment.config.shared.telemetry.log_format, "rank host")
        # Inherited by the ranks, and read when these import torch.
        os.environ["OMP_NUM_THREADS"] = str(deployment.num_threads(pool))
        self._token, self._claim = deployment.token, CoreClaim()
        self._cores = self._claim.take(usable_cores(), deployment.num_cores(pool))
        self._life: asyncio.Future[RankHostStarted | Refused] | None = None
        self._host: Any = None

    async def start(self) -> RankHostStarted | Refused:
        if self._life is None:
            self._life = asyncio.ensure_future(asyncio.to_thread(self._listen))
        return await asyncio.shield(self._life)

    def _listen(self) -> RankHostStarted | Refused:
        from ...workers.server.rank_host import RankHost

        try:
            self._host = RankHost(get_node_ip_address(), 0, self._token, self._cores)
            return RankHostStarted(self._host.start_in_thread(), platform.node())
        except DiptychError as e:
            return Refused.because(e, platform.node())

    async def stop(self) -> None:
        if self._host is not None:
            await asyncio.to_thread(self._host.stop)


class WorkerActor:
    """The process of one worker. `rank_hosts`: actors of its other machines."""

    def __init__(self, deployment: Deployment, pool: str, worker_id: str, rank_hosts: Sequence[Any] = ()) -> None:
        configure_logs(deployment.config.shared.telemetry.log_format, "worker")
        self._node = "" if deployment.is_local else platform.node()
        self._deployment, self._pool, self._worker_id = deployment, pool, worker_id
        self._rank_hosts = rank_hosts
        # Read when torch is first imported, which is in `_load`.
        os.environ["OMP_NUM_THREADS"] = str(deployment.num_threads(pool))
        self._claim = CoreClaim()
        self._cores = self._claim.take(usable_cores(), deployment.num_cores(pool))
        self._life: asyncio.Future[WorkerStarted | Refused] | None = None
        self._process: Any = None
        self._end: asyncio.Future[DiptychError] | None = None

    async def start(self) -> WorkerStarted | Refused:
        if self._life is None:
            self._life = asyncio.ensure_future(self._begin())
        return await asyncio.shield(self._life)

    async def _begin(self) -> WorkerStarted | Refused:
        try:
            starting = (ask(host, "start", who="the process of a rank host") for host in self._rank_hosts)
            hosts: list[RankHostStarted] = await asyncio.gather(*starting)
        except DiptychError as e:
            return Refused.because(e)
        return await asyncio.to_thread(self._load, hosts)

    def _load(self, hosts: Sequence[RankHostStarted]) -> WorkerStarted | Refused:
        from ...workers.server.worker import WorkerProcess

        deployment, addresses = self._deployment, tuple(host.address for host in hosts)
        try:
            config = deployment.worker_config(self._pool, get_node_ip_address(), self._worker_id, addresses)
            self._process = WorkerProcess(replace(config, cores=self._cores))
            at = self._process.start_in_thread()
        except DiptychError as e:
            return Refused.because(e, self._node)
        node, others = platform.node(), tuple(host.node for host in hosts)
        return WorkerStarted(at.address, at.incarnation, at.pid, node, self._cores, deployment.generation, others)

    async def alive(self) -> None:
        """Answered by the event loop."""

    async def run_until_stopped(self, within_s: float) -> Refused | None:
        """Serve after `start` until stopped; return why it ended, or None after `within_s`."""
        end = self._end = self._end or asyncio.wrap_future(self._process.ended)
        await asyncio.wait([end], timeout=within_s)
        return Refused.because(end.result()) if end.done() else None

    async def stop(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
