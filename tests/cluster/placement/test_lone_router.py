"""Routers that the supervisor does not keep: when they end by themselves, and what share of limits is theirs.
tests/e2e/test_cluster_joined.py runs one."""

import asyncio
import os
import signal
from typing import Any

import pytest
from ray.exceptions import RayError

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.common.handles import RouterStarted
from diptych.cluster.placement import lone_router, supervisor_name
from diptych.cluster.placement.lone_router import lone, serve_router, until_failed
from diptych.cluster.placement.supervisor_name import Refused
from diptych.workers.common.errors import InternalError, Unavailable


def deployment(token: str, **router: Any) -> Deployment:
    return Deployment(build({"model": "tiny", "router": router}), token, is_local=False)


class Router:
    """A router that says of itself what it is told."""

    refused: Refused | None = None
    started = RouterStarted("127.0.0.1", 8000, 9000, 1)

    def __init__(self) -> None:
        self.asked = asyncio.Event()  # whether it is ready
        self.has_worker = asyncio.Event()
        self.has_ended = False

    async def start(self) -> RouterStarted:
        return self.started

    async def ready(self) -> None:
        self.asked.set()
        await self.has_worker.wait()

    async def alive(self) -> Refused | None:
        return self.refused

    async def drain(self, timeout_s: float) -> int:
        return 0

    async def stop(self) -> None:
        self.has_ended = True


class Supervisors:
    """What is found under the cluster's name, one look after another: a start's id, or an error."""

    def __init__(self, *found: str | Exception) -> None:
        self._found = iter(found)

    @property
    def start_id(self) -> "Supervisors":
        return self

    async def remote(self) -> str:
        found = next(self._found)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lone_router, "LOOK_S", 0.0)


async def test_a_router_ends_when_its_cluster_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = deployment("a token"), deployment("another token")
    gone = [RayError("it died"), Unavailable("none is there")]
    found = Supervisors(before.start_id, *gone, before.start_id, after.start_id)
    monkeypatch.setattr(supervisor_name, "find_supervisor", lambda name: found if name == "default" else None)
    router: Any = Router()
    error = await until_failed(router, before)
    assert isinstance(error, Unavailable)
    assert error.message == "the cluster 'default' was started again: start this router again"


async def test_a_router_ends_when_its_front_door_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_name, "find_supervisor", lambda _: Supervisors())
    router: Any = Router()
    router.refused = Refused.because(InternalError("the HTTP server ended"))
    error = await until_failed(router, deployment("a token"))
    assert (type(error), error.message) == (InternalError, "the HTTP server ended")


@pytest.mark.parametrize("has_worker", [True, False])
async def test_it_is_announced_once_a_worker_has_joined(has_worker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given, router, announced = deployment("a token"), Router(), asyncio.Event()
    monkeypatch.setattr(lone_router, "RouterActor", lambda _: router)
    monkeypatch.setattr(lone_router, "LOOK_S", 1000.0)
    serving = asyncio.create_task(serve_router(given, lambda _: announced.set(), 1.0))
    await router.asked.wait()
    assert not announced.is_set()
    if has_worker:
        router.has_worker.set()
        await announced.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert router.has_ended
    assert announced.is_set() == has_worker


def test_limits_of_keys_are_divided_by_the_most_routers() -> None:
    given = deployment("a token", replicas=0, http_port=8123)
    assert given.config.router.replicas == 0
    settings = lone(given, 8).config.router
    assert (settings.replicas, settings.http_port) == (8, 8123)
    assert lone(given, 8).start_id == given.start_id


def test_the_name_of_a_start_tells_nothing_of_the_token() -> None:
    first, second = deployment("a token").start_id, deployment("a tokem").start_id
    assert first != second
    assert "token" not in first
