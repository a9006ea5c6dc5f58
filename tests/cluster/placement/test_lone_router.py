"""Routers that the supervisor does not keep: when they end by themselves, and what share of limits is theirs.
tests/e2e/test_cluster_joined.py runs one."""

from typing import Any

import pytest
from ray.exceptions import RayError

from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.placement import lone_router, supervisor_name
from diptych.cluster.placement.lone_router import lone, until_failed
from diptych.cluster.placement.supervisor_name import Refused
from diptych.workers.common.errors import InternalError, Unavailable


def deployment(token: str, **router: Any) -> Deployment:
    return Deployment(build({"model": "tiny", "router": router}), token, is_local=False)


class Router:
    """A router that says of itself what it is told."""

    refused: Refused | None = None

    async def alive(self) -> Refused | None:
        return self.refused


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
