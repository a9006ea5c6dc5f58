"""Starts processes; the only file that starts Ray actors. Knows no fleet and no request.

    supervisor   named, detached, restarted by Ray        diptych:<cluster>:supervisor
    worker       one placement group and one actor each   diptych:<cluster>:worker:<worker id>
    rank host    one actor on each of a worker's other machines, in the worker's placement group
                                                          diptych:<cluster>:ranks:<worker id>.<number>
    gang         one placement group for all its workers, on one node (gang.py)
    router       one placement group and one actor each   diptych:<cluster>:router:<router id>

All are detached, so that a new supervisor finds what the last one started while requests go on. No actor but the
supervisor is restarted by Ray: starting a worker again is the supervisor's decision. A process that dies is noticed by
a call to it that lasts (`run_until_stopped`): Ray ends that call within milliseconds. The call is made again each
minute: where a connection has broken, the actor still has the call, and may have a thousand of them.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.experimental.internal_kv import internal_kv_get_gcs_client
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...workers.common.errors import ConfigError, DiptychError, InternalError, Unavailable
from ...workers.telemetry.logs import configure_logs
from ..common.config import ClusterConfig
from ..common.deployment import NAMESPACE, Deployment, first_worker_ids, make_router_id, owns, supervisor_name
from ..common.gang import gang_of, rank_of
from ..common.handles import RouterStarted, SettingsGeneration, WorkerStarted
from .actor_calls import ask
from .audit_log import audited
from .place import Place, bundle_of, give_back
from .router_actor import RouterActor
from .supervisor_name import Refused
from .worker_actor import RankHostActor, WorkerActor

if TYPE_CHECKING:
    from ..common.demand import ControlReport
    from ..control.status import ClusterStatus
    from ..routing.fleet import WorkerInfo

CALL_S = 60.0
STOP_S = 3.0  # for a worker to close its sockets and memory; then it is killed
KV_NAMESPACE = b"diptych"
ON_HEAD = {"node:__internal_head__": 0.001}  # the resource that Ray gives to the node of its own head

log = logging.getLogger("diptych.placement")


class SupervisorActor:
    """The supervisor's process. Ray starts it again if it dies; then it takes over what lives."""

    def __init__(self, deployment: Deployment, *, has_help: bool = False) -> None:
        configure_logs(deployment.config.shared.telemetry.log_format, "supervisor")
        from ..control.supervisor import Supervisor

        is_first = not ray.get_runtime_context().was_current_actor_reconstructed
        self._launcher = RayLauncher(deployment, finds_existing=not (has_help and is_first))
        self._supervisor = Supervisor(deployment.config, self._launcher, deployment.token, deployment.tls)
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._supervisor.run()
        except Exception as e:
            # The process's top loop: Ray starts a new supervisor when this one fails.
            log.exception("the supervisor failed")
            error = InternalError(f"it failed ({type(e).__name__}: {e}); its log has the traceback")
            if not self._supervisor.note_failure("the supervisor", error):
                os._exit(1)

    async def status(self) -> "ClusterStatus":
        await self._supervisor.adopted()
        return self._supervisor.status()

    async def experts(self, pool: str | None) -> dict[int, list[int]] | Refused:
        try:
            return await self._supervisor.experts(pool)
        except DiptychError as e:
            return Refused.because(e)

    async def audit(self) -> dict[str, str]:
        return await self._supervisor.audit()

    async def scale(self, replicas: dict[str, int], who: str) -> Refused | None:
        try:
            with audited(who, "scale", replicas):
                return self._supervisor.scale(replicas)
        except DiptychError as e:
            return Refused.because(e)

    async def watch_fleet(self, version: int) -> "tuple[int, list[WorkerInfo]]":
        return await self._supervisor.watch_fleet(version)

    async def deployment(self) -> Deployment:
        """Return what a router needs that joins."""
        return self._launcher.deployment

    async def start_id(self) -> str:
        return self._launcher.deployment.start_id

    async def upgrade(self, config: str, in_place: bool, who: str) -> Refused | None:
        """`config`: a ClusterConfig, as JSON."""
        if (refused := await self._refused()) is not None:  # it would wait for workers that have no place
            return refused
        try:
            with audited(who, "upgrade"):
                return self._supervisor.upgrade(ClusterConfig.model_validate_json(config), in_place=in_place)
        except DiptychError as e:
            return Refused.because(e)

    async def drain_node(self, node: str, who: str) -> list[str] | Refused:
        if (refused := await self._refused()) is not None:  # it would say that nobody is there
            return refused
        with audited(who, f"drain {node}"):
            return self._supervisor.drain_node(node)

    async def _refused(self) -> Refused | None:
        """Refuse what cannot be done while it does not know the workers that an earlier supervisor started."""
        if await self._supervisor.adopted():
            return None
        return Refused.because(Unavailable("the supervisor cannot call its workers, as its log says: try again then"))

    async def report(self, router: str, num_waiting: int) -> "ControlReport":
        return self._supervisor.report(router, num_waiting)

    async def shutdown(self, who: str) -> None:
        with audited(who, "stop"):
            self._loop.cancel()
            await self._supervisor.stop()
            end_all(self._launcher.deployment.config.name)  # what it had not taken over yet
            self._launcher.forget()


class _Placed:
    """An actor in a place of its own, found by name if it already lives."""

    def __init__(self, place: Place) -> None:
        self._place, self._group = place, place.take()
        self._actor: Any = None
        self._rank_hosts: list[Any] = []

    def _make(self, name: str, index: int, cls: type, *args: Any) -> Any:
        """The actor of that name, in a bundle of the place."""
        bundle = self._place.bundle
        return (
            ray.remote(cls)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources={k: v for k, v in bundle.items() if k not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )
            .remote(*args)
        )

    def begin(self) -> None:
        """Begin what `start` does, so that `start` need not wait as long."""
        self._actor.start.remote()

    async def alive(self) -> None:
        await ask(self._actor, "alive")

    async def waiting_for(self) -> str:
        state = await asyncio.to_thread(lambda: placement_group_table(self._group).get("state"))
        return "" if state == "CREATED" else self._place.needs

    async def wait(self) -> DiptychError:
        try:
            while True:
                await ask(self._actor, "run_until_stopped", CALL_S)
        except DiptychError as e:
            return e

    async def kill(self) -> None:
        actors = self._actor, *self._rank_hosts
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                for actor in actors:
                    with suppress(DiptychError):
                        await ask(actor, "stop")
        for actor in actors:
            ray.kill(actor, no_restart=True)


class _PlacedWorker(_Placed):
    """A worker, and a rank host in each bundle of its place that is on another machine."""

    def __init__(self, place: Place, deployment: Deployment, pool: str, worker_id: str) -> None:
        super().__init__(place)
        # By the group: what an earlier supervisor placed may have had other settings.
        num_bundles = 1 if place.is_gang else self._group.bundle_count
        self._rank_hosts = [
            self._make(deployment.rank_host_name(worker_id, index), index, RankHostActor, deployment, pool)
            for index in range(1, num_bundles)
        ]
        name, args = deployment.worker_name(worker_id), (deployment, pool, worker_id, self._rank_hosts)
        self._actor = self._make(name, place.index, WorkerActor, *args)

    async def start(self) -> WorkerStarted:
        return await ask(self._actor, "start")


class _PlacedRouter(_Placed):
    def __init__(self, place: Place, deployment: Deployment) -> None:
        super().__init__(place)
        self._actor = self._make(place.group, place.index, RouterActor, deployment)

    async def start(self) -> RouterStarted:
        return await ask(self._actor, "start")

    async def kill(self) -> None:
        await super().kill()
        give_back(self._place.group)


PlacedT = TypeVar("PlacedT", _PlacedWorker, _PlacedRouter)


class RayLauncher:
    """handles.Launcher on the Ray cluster that this process is connected to. `finds_existing`: whether workers may live
    that an earlier supervisor started."""

    def __init__(self, deployment: Deployment, *, finds_existing: bool = True) -> None:
        self._deployment = deployment
        self._finds_existing = finds_existing
        self._thread = ThreadPoolExecutor(1, "placement")

    async def worker(self, worker_id: str, pool: str, settings: SettingsGeneration) -> _PlacedWorker:
        deployment, config = self._deployment.with_settings(settings), settings.config
        own = config.pools.get(pool)
        machines, size = own.parallel.machines_per_worker, own.parallel.data_parallel
        bundle = bundle_of(own.num_cpus, config.gpus_of(own), own.resources, machines)
        group, labels = deployment.worker_name(gang_of(worker_id)), own.label_selector
        place = Place(group, bundle, labels, rank_of(worker_id), size * machines, is_spread=machines > 1)
        return await self._placed(lambda: _PlacedWorker(place, deployment, pool, worker_id))

    def vacate(self, gang_id: str) -> None:
        give_back(self._deployment.worker_name(gang_id))

    async def router(self, router_id: str, before: RouterStarted | None) -> _PlacedRouter:
        settings = self._deployment.config.router
        name = self._deployment.router_name(router_id)
        place = Place(name, bundle_of(settings.num_cpus, 0, settings.resources), settings.label_selector)
        deployment = self._deployment.listening_at(before) if before else self._deployment
        return await self._placed(lambda: _PlacedRouter(place, deployment))

    async def _placed(self, make: Callable[[], PlacedT]) -> PlacedT:
        """Make one at a time, on a thread: it asks Ray's GCS, and waits as long as that is away. Whoever is cancelled
        meanwhile would not know what there is to end, so it is ended here."""
        making = asyncio.get_running_loop().run_in_executor(self._thread, make)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await (await making).kill()
            raise

    def existing(self) -> list[tuple[str, str]]:
        if not self._finds_existing:
            return []
        names = list_named_actors()
        gangs = {gang_of(name) for name in names}
        for group in placement_group_table().values():
            name = str(group["name"])
            if self._deployment.owns(name) and name not in gangs and group["state"] != "REMOVED":
                give_back(name)
        ids = [self._deployment.worker_id(name) for name in names]
        return [(worker_id, worker_id.partition("-")[0]) for worker_id in ids if worker_id]

    def remember(self, replicas: Mapping[str, int]) -> None:
        _kv().internal_kv_put(self._key("targets"), json.dumps(dict(replicas)).encode(), True, KV_NAMESPACE)

    def recall(self) -> dict[str, int] | None:
        kept = _kv().internal_kv_get(self._key("targets"), KV_NAMESPACE)
        return json.loads(kept) if kept else None

    def use(self, settings: SettingsGeneration) -> None:
        self._deployment = self._deployment.with_settings(settings)

    @property
    def deployment(self) -> Deployment:
        """The cluster as routers know it."""
        return self._deployment

    def keep_upgrade(self, text: str) -> None:
        _kv().internal_kv_put(self._key("upgrade"), text.encode(), True, KV_NAMESPACE)

    def recall_upgrade(self) -> str | None:
        kept = _kv().internal_kv_get(self._key("upgrade"), KV_NAMESPACE)
        return kept.decode() if kept else None

    def forget(self) -> None:
        for kind in ("targets", "upgrade"):
            _kv().internal_kv_del(self._key(kind), False, KV_NAMESPACE)

    def _key(self, kind: str) -> bytes:
        """Key of this start of the cluster: what is left of one that could not forget is no other's."""
        return f"{kind}-{self._deployment.config.name}-{self._deployment.start_id}".encode()


async def start_ahead(deployment: Deployment) -> None:
    """Have what a new supervisor will want start before it: it finds them under the names that it would give."""
    launcher, settings = RayLauncher(deployment), SettingsGeneration(deployment.generation, deployment.config)
    for worker_id, pool in first_worker_ids(deployment.config.pools):
        (await launcher.worker(worker_id, pool, settings)).begin()
    for number in range(deployment.config.router.replicas):
        (await launcher.router(make_router_id(number), None)).begin()


def end_all(cluster: str) -> None:
    """End the cluster's workers and routers with their places, where no supervisor does."""
    for group in placement_group_table().values():
        if owns(cluster, str(group["name"])) and group["state"] != "REMOVED":
            give_back(group["name"])


def start_supervisor(deployment: Deployment, *, has_help: bool = False) -> Any:
    """`has_help`: `start_ahead` was called. Raises ConfigError if a cluster of that name already runs on this Ray."""
    name = supervisor_name(deployment.config.name)
    # Beside Ray's head, without which it can do nothing: so the loss of another machine is not its own.
    actor = ray.remote(SupervisorActor).options(
        name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=-1, num_cpus=0, resources=ON_HEAD
    )
    try:
        return actor.remote(deployment, has_help=has_help)
    except ValueError as e:
        raise ConfigError(
            f"a cluster named {deployment.config.name!r} already runs on this Ray: stop it with "
            f"`diptych stop --name {deployment.config.name}`, or choose another --name"
        ) from e


def _kv() -> Any:
    client = internal_kv_get_gcs_client()
    assert client is not None, "this process is connected to Ray"
    return client
