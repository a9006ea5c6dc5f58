"""The end of a cluster whose supervisor cannot end it; Ray itself is in tests/e2e."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError

from diptych.cluster.placement import placement, supervisor_calls
from diptych.cluster.placement.supervisor_calls import SupervisorClient

NAMES = ("worker:mixed-1", "router:router-1", "supervisor")
GROUPS = [(f"diptych:{cluster}:{name}", "CREATED") for cluster in ("mine", "mine-too") for name in NAMES]


def stopped(monkeypatch: pytest.MonkeyPatch, answer: RayError | None) -> list[str]:
    """Stop the cluster `mine`, whose supervisor answers so; return what is done."""
    done = list[str]()

    def get(_: object, timeout: float) -> None:
        if answer:
            raise answer

    ray = SimpleNamespace(get=get, kill=lambda actor, no_restart: done.append(f"kill {actor.name}"))
    groups = [*GROUPS, ("diptych:mine:worker:mixed-2", "REMOVED"), ("another's", "CREATED")]
    table: dict[str, Any] = {str(i): {"name": name, "state": state} for i, (name, state) in enumerate(groups)}
    monkeypatch.setattr(supervisor_calls, "ray", ray)
    monkeypatch.setattr(placement, "placement_group_table", lambda: table)
    monkeypatch.setattr(placement, "give_back", done.append)
    actor = SimpleNamespace(name="supervisor", shutdown=SimpleNamespace(remote=lambda who: None))
    SupervisorClient(actor, "mine").shutdown()
    return done


@pytest.mark.parametrize("answer", [ActorUnavailableError("it restarts", None), GetTimeoutError("it hangs")])
def test_what_a_supervisor_cannot_end_is_ended_with_its_place(
    monkeypatch: pytest.MonkeyPatch, answer: RayError
) -> None:
    ended = ["diptych:mine:worker:mixed-1", "diptych:mine:router:router-1"]
    assert stopped(monkeypatch, answer) == ["kill supervisor", *ended]


@pytest.mark.parametrize("answer", [None, ActorDiedError()])
def test_what_is_of_the_name_later_is_left_alone(monkeypatch: pytest.MonkeyPatch, answer: RayError | None) -> None:
    """Where the supervisor has ended all, or somebody else has ended the cluster."""
    assert stopped(monkeypatch, answer) == ["kill supervisor"]
