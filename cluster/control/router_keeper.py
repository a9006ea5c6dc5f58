"""Keeps the routers of a cluster: starts each, watches it, and starts it again when it is lost. Knows no Ray.

starting ──it reports its ports──> ready ──it dies or hangs──> starting, after the back-off of plan.py
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial

from ...workers.common.errors import DiptychError
from ..common.config import ClusterConfig
from ..common.handles import Launcher, RouterHandle, RouterStarted
from .plan import Failures, after_failure
from .status import RouterStatus
from .worker_watch import until_lost, until_started

log = logging.getLogger("diptych.supervisor")


class RouterKeeper:
    """Owner of the routers' processes. `on_change` is called after each start and loss; `on_error` with the error of a
    router that is lost otherwise than while it serves. No router is started again once `is_over`."""

    def __init__(
        self,
        launcher: Launcher,
        config: ClusterConfig,
        on_change: Callable[[], None],
        on_error: Callable[[str, DiptychError], object],
        is_over: Callable[[], bool],
    ) -> None:
        self._launcher, self._start_timeout_s = launcher, config.start_timeout_s
        self._on_change = on_change
        self._on_error = on_error
        self._is_over = is_over
        self._statuses: dict[str, RouterStatus] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()

    @property
    def statuses(self) -> tuple[RouterStatus, ...]:
        return tuple(self._statuses.values())

    def start(self, router_id: str, *, is_new: bool) -> None:
        """Keep a router until `stop`. is_new: no earlier supervisor has started it."""
        _keep(self._tasks, self._run(router_id, is_new=is_new))

    async def stop(self) -> None:
        """End every router."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*self._ends)

    async def _run(self, router_id: str, *, is_new: bool) -> None:
        failures = Failures()
        started: RouterStarted | None = None
        self._statuses[router_id] = RouterStatus(router_id, "starting")
        while True:
            handle: RouterHandle | None = None
            ready_at = None
            try:
                handle = await self._launcher.router(router_id, started)
                on_wait = partial(self._on_wait, router_id)
                started = await until_started(handle, on_wait, self._start_timeout_s, is_new=is_new)
                self._statuses[router_id] = _ready(router_id, started, failures.last_error)
                ready_at = time.monotonic()
                self._on_change()
                error = (await until_lost(handle)).message
            except DiptychError as e:
                error = e.message
                self._on_error(router_id, e)
            except Exception as e:
                # The router's top loop: it is started again, whatever a call of Ray raises.
                log.exception("%s could not be kept", router_id)
                error = f"the supervisor failed to keep it ({type(e).__name__}: {e})"
            finally:
                if handle:
                    await asyncio.shield(_keep(self._ends, handle.kill()))
            is_new, now = True, time.monotonic()
            log.warning("lost %s: %s", router_id, error)
            failures = after_failure(failures, error, lived_s=now - ready_at if ready_at else 0.0, now=now)
            self._statuses[router_id] = RouterStatus(
                router_id, "starting", last_error=error, num_failures=failures.count
            )
            self._on_change()
            if self._is_over():
                return
            await asyncio.sleep(max(failures.retry_at - now, 0.0))

    def _on_wait(self, router_id: str, waiting_for: str) -> None:
        self._statuses[router_id] = replace(self._statuses[router_id], waiting_for=waiting_for)


def _ready(router_id: str, started: RouterStarted, last_error: str) -> RouterStatus:
    return RouterStatus(router_id, "ready", started.host, started.http_port, started.grpc_port, started.pid, last_error)


def _keep(tasks: "set[asyncio.Task[None]]", life: Coroutine[None, None, None]) -> "asyncio.Task[None]":
    """Start a task, and hold it until it ends."""
    task = asyncio.create_task(life)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
