"""The process of one router: the front door, and the fleet as the supervisor tells it. A Ray actor where the supervisor
places routers; alone in its process where something else starts them (lone_router.py)."""

import asyncio
import platform
import uuid
from dataclasses import replace
from functools import partial

from ray.exceptions import RayError
from ray.util import get_node_ip_address

from ...workers.common.errors import DiptychError, Unavailable
from ...workers.telemetry.logs import configure_logs
from ..common.config import WILDCARD_HOSTS
from ..common.deployment import Deployment
from ..common.handles import RouterStarted
from .fleet_watch import Report, Watch, follow, report_waiting
from .supervisor_name import Refused, found_supervisor


class RouterActor:
    """The process of one router: the front door, and the fleet as the supervisor tells it."""

    def __init__(self, deployment: Deployment) -> None:
        configure_logs(deployment.config.shared.telemetry.log_format, "router")
        self._deployment = deployment
        # Not at the top: each process imports only what it runs, so that starts do not wait for more.
        from .router_process import RouterProcess

        self._process = RouterProcess(deployment)
        self._name = uuid.uuid4().hex  # in its reports
        self._life: asyncio.Future[RouterStarted | Refused] | None = None
        self._followers: list[asyncio.Task[None]] = []
        self._has_started = False

    async def start(self) -> RouterStarted | Refused:
        if self._life is None:
            self._life = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._life)

    async def _open(self) -> RouterStarted | Refused:
        process, away = self._process, (RayError, Unavailable)
        lives = (
            follow(self._watch, process.update_fleet, away),
            report_waiting(self._report, process.waiting, process.on_control, away),
        )
        self._followers = [asyncio.create_task(life) for life in lives]  # first: it serves once it has joined a worker
        try:
            started = await process.start()
        except DiptychError as e:
            self._follow_no_more()
            return Refused.because(e, "" if self._deployment.is_local else platform.node())
        self._has_started = True
        if started.host in WILDCARD_HOSTS and not self._deployment.is_local:
            return replace(started, host=get_node_ip_address())
        return started

    async def _watch(self) -> Watch:
        """Raises Unavailable."""
        return (await found_supervisor(self._deployment.config.name)).watch_fleet.remote

    async def _report(self) -> Report:
        """Raises Unavailable."""
        return partial((await found_supervisor(self._deployment.config.name)).report.remote, self._name)

    async def alive(self) -> Refused | None:
        """Answered by the event loop that serves requests."""
        try:
            self._process.check()
        except DiptychError as e:
            return Refused.because(e)
        return None

    async def ready(self) -> None:
        """Wait until it is ready for requests."""
        await self._process.ready()

    async def drain(self, timeout_s: float) -> int:
        """Be ready no more, and wait until no request is open, at most `timeout_s`; return how many are."""
        return await self._process.drain(timeout_s)

    async def run_until_stopped(self, within_s: float) -> None:
        await asyncio.sleep(within_s)

    async def stop(self) -> None:
        self._follow_no_more()
        if self._has_started:
            await self._process.stop()

    def _follow_no_more(self) -> None:
        for follower in self._followers:
            follower.cancel()
