"""Calls of actors whose connections break, or that die."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from diptych.cluster.placement import actor_calls
from diptych.cluster.placement.actor_calls import ask
from diptych.workers.common.errors import WorkerLost

BROKEN = ActorUnavailableError("recvmsg: Connection reset by peer", None)


async def call(monkeypatch: pytest.MonkeyPatch, *answers: RayError | int) -> tuple[int, list[int]]:
    """Ask an actor that answers so, one after the other; return its answer, and the arguments of each call."""
    monkeypatch.setattr(actor_calls, "RETRY_S", 0.0)
    given, coming = list[int](), iter(answers)

    async def double(number: int) -> int:
        given.append(number)
        answer = next(coming)
        if isinstance(answer, RayError):
            raise answer
        return answer

    return await ask(SimpleNamespace(double=SimpleNamespace(remote=double)), "double", 21), given


async def test_a_connection_that_breaks_is_not_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where something between two machines drops its connections: all workers would be ended at once."""
    assert await call(monkeypatch, BROKEN, BROKEN, 42) == (42, [21, 21, 21])


async def test_a_process_that_is_gone_after_its_connection_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerLost, match="its process ended"):
        await call(monkeypatch, BROKEN, ActorDiedError())
