"""Asks a running supervisor, from the CLI's process. Synchronous; every call has a deadline."""

import asyncio
import math
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError

from ...workers.common.errors import ConfigError, Unavailable, from_wire
from ..common.config import ClusterConfig
from ..common.deployment import Deployment
from ..common.plurals import count
from ..control.status import ClusterStatus
from .audit_log import caller
from .fleet_watch import last_line
from .place import RESOURCE_DIGITS
from .placement import end_all, start_ahead, start_supervisor
from .supervisor_name import Refused, find_supervisor

REPLY_S = 30.0
SHUTDOWN_S = 15.0
END_S = 5.0
RETRY_S = 0.2


class SupervisorGone(Unavailable):
    """Ray has ended it, and will not start it again."""


class SupervisorClient:
    """Needs a process that is connected to Ray."""

    def __init__(self, actor: Any, cluster: str) -> None:
        self._actor, self._cluster = actor, cluster

    @classmethod
    def start(cls, deployment: Deployment) -> Self:
        # On a Ray that is not new, workers may be running: a supervisor decides about them.
        if deployment.is_local:
            asyncio.run(start_ahead(deployment))
        return cls(start_supervisor(deployment, has_help=deployment.is_local), deployment.config.name)

    @classmethod
    def find(cls, cluster: str) -> Self:
        return cls(find_supervisor(cluster), cluster)

    def status(self, within_s: float = REPLY_S) -> ClusterStatus:
        """Raises Unavailable, SupervisorGone."""
        return self._ask("status", within_s=within_s)

    def restart(self) -> None:
        """Kill it: Ray starts another in its place, which takes over what lives. Requests go on meanwhile."""
        with suppress(RayError):
            ray.kill(self._actor, no_restart=False)

    def audit(self) -> dict[str, str]:
        """Return, for each worker, what is wrong with its block bookkeeping; empty text where nothing is. Raises
        Unavailable."""
        return self._ask("audit")

    def experts(self, pool: str | None) -> dict[int, list[int]]:
        """Return, for each layer, each expert's token count on all workers or on one pool's. Raises Unavailable,
        WorkerLost."""
        return self._ask("experts", pool)

    def scale(self, replicas: Mapping[str, int]) -> None:
        """Set new targets; `status` tells when they are reached. Raises ConfigError, Unavailable."""
        self._ask("scale", dict(replicas), caller())

    def upgrade(self, config: ClusterConfig, *, in_place: bool) -> None:
        """Have all workers replaced by others with these settings; `status` tells how far it is. Raises ConfigError,
        Unavailable."""
        self._ask("upgrade", config.model_dump_json(exclude_unset=True), in_place, caller())

    def deployment(self) -> Deployment:
        """Return what a router needs that joins the cluster. Raises Unavailable."""
        return self._ask("deployment")

    def drain_node(self, node: str) -> list[str]:
        """Drain the workers on a machine, by its name, and start others in their place; return the ids of those that
        are there still. May be asked again. Raises Unavailable."""
        return self._ask("drain_node", node, caller())

    def shutdown(self) -> None:
        """End every worker and router, then the supervisor. What it does not end, because it hangs or restarts, is
        ended with its place: nothing would find it later."""
        is_left = False
        try:
            ray.get(self._actor.shutdown.remote(caller()), timeout=SHUTDOWN_S)
        except ActorDiedError:
            pass  # somebody else has ended the cluster; by now another one may have its name
        except (RayError, TimeoutError):
            is_left = True
        ray.kill(self._actor, no_restart=True)
        if is_left:
            # On a thread: it waits for Ray's GCS, which may be away.
            ending = threading.Thread(target=end_all, args=(self._cluster,), daemon=True)
            ending.start()
            ending.join(END_S)

    def _ask(self, method: str, *args: Any, within_s: float = REPLY_S) -> Any:
        """Asks again while Ray brings a supervisor back that died: what can be asked may be asked twice."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                left_s = max(deadline - time.monotonic(), 0.1)
                answer = ray.get(getattr(self._actor, method).remote(*args), timeout=left_s)
                break
            except GetTimeoutError as e:
                raise Unavailable(f"the supervisor did not answer within {within_s:g} s") from e
            except ActorUnavailableError as e:
                if time.monotonic() > deadline:
                    raise Unavailable(f"the supervisor did not restart within {within_s:g} s") from e
                time.sleep(RETRY_S)
            except ActorDiedError as e:
                raise SupervisorGone("the supervisor was ended") from e
            except RayError as e:
                raise Unavailable(f"the supervisor is gone: {last_line(e)}") from e
        if isinstance(answer, Refused):
            raise from_wire(answer.error, answer.message)
        return answer


def check_placeable(config: ClusterConfig) -> None:
    """Raises ConfigError for pools whose workers the one machine of a local Ray could never take."""
    have: Mapping[str, float] = ray.cluster_resources()
    labels: dict[str, str] = ray.nodes()[0].get("Labels", {})
    for pool_name, pool in config.pools.items():
        key = f"pools.{pool_name}"
        if not pool.bounds[1]:
            continue
        what = "worker" if pool.parallel.data_parallel == 1 else f"gang of {pool.parallel.data_parallel} workers"
        for name, each in {"CPU": pool.num_cpus, "GPU": config.gpus_of(pool), **pool.resources}.items():
            amount = each * pool.parallel.data_parallel  # they are on one machine
            if amount > have.get(name, 0.0):
                raise ConfigError(
                    f"{key}: each {what} needs {amount:g} {name} and this machine has {have.get(name, 0.0):g}. "
                    "Lower it, or set RAY_ADDRESS to join a Ray that has enough"
                )
        for label, value in pool.label_selector.items():
            if label not in labels and not value.startswith("!"):
                raise ConfigError(
                    f"{key}.label_selector: this machine has no label {label}. "
                    "Leave it out, or set RAY_ADDRESS to join a Ray whose nodes have it"
                )
    _check_gpus(config, have.get("GPU", 0.0))
    _check_cpus(config, have.get("CPU", 0.0))


def _check_cpus(config: ClusterConfig, num_here: float) -> None:
    """Raises ConfigError where workers and routers together are more than a Ray of our own takes: those left over would
    wait for ever."""
    wanted = sum(pool.replicas * pool.parallel.data_parallel * pool.num_cpus for _, pool in config.pools.items())
    wanted += config.router.replicas * config.router.num_cpus
    if round(wanted, RESOURCE_DIGITS) > num_here:
        workers = count(config.pools.num_workers, "worker")
        routers = count(config.router.replicas, "router")
        raise ConfigError(
            f"{workers} and {routers} need {wanted:g} CPU in total, but Ray starts here with {num_here:g}: start "
            "fewer, lower num_cpus, or set RAY_ADDRESS to join a Ray of more machines"
        )


def _check_gpus(config: ClusterConfig, num_here: float) -> None:
    """Raises ConfigError where all workers together ask for more GPUs: those left over would wait for ever."""
    asking = [(name, pool) for name, pool in config.pools.items() if pool.replicas and config.gpus_of(pool)]
    wanted = sum(pool.replicas * pool.parallel.data_parallel * config.gpus_of(pool) for _, pool in asking)
    if round(wanted, RESOURCE_DIGITS) <= num_here:
        return
    num_workers = sum(pool.replicas * pool.parallel.data_parallel for _, pool in asking)
    names = " and ".join(f"pools.{name}" for name, _ in asking)
    remedy = "start fewer (`--mixed 1` instead of pools is one worker that does both)"
    if all(pool.parallel.tensor_parallel == pool.parallel.data_parallel == 1 for _, pool in asking):  # else whole ones
        share = math.floor(100 / math.ceil(num_workers / num_here)) / 100
        remedy = f"set num_gpus: {share:g} in {names} (--config), so that they share what is there, or {remedy}"
    raise ConfigError(
        f"{names}: {count(num_workers, 'worker')} would take {wanted:g} GPU in total, but this machine has "
        f"{num_here:g}: {remedy}, or set RAY_ADDRESS to join a Ray that has more"
    )
