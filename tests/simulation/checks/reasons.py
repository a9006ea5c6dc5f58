"""Reasons for which a request may fail while its cluster lives: what troubled the workers that it was sent to, and for
how long.

    DeadlineExceeded   of its time all but ENOUGH_S was lost to trouble at the workers of its attempts, went by with
                       no worker there to take it, while its worker computed what had come before it, or, while it was
                       late and had to wait for what could still be in time (waiting_queue.py), whatever else
    Unavailable        its attempts are used up, each by trouble there; or no worker was there for as long as it waits

Anything else that fails is a Violation: a router that gives up early, or waits for nothing, finds no reason here.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diptych.cluster.routing.actions import Actions, OfferPrefix
from diptych.cluster.routing.request_state import RequestState
from diptych.workers.common.errors import DiptychError, PromptReturned, WorkerDraining
from diptych.workers.common.request import Request

from .violation import demand

if TYPE_CHECKING:
    from ..world import Client, World

TTFT_S = 0.5  # of the level of requests that name none
LINGER_S = 6.0  # after a fault's end, until both sides have noticed it, ended what they did, and reconnected
MOMENT_S = 1e-6  # a trouble is often what ends an attempt in the same instant
ENOUGH_S = 3.0  # of quiet time: any request would have ended
SHORT_S = 1.0  # until a worker is known and connected


@dataclass(frozen=True, slots=True)
class Trouble:
    began: float
    ended: float
    hosts: tuple[str, ...]  # one: its process; two: what goes between them


class Troubles:
    """Troubles in the order of their beginnings."""

    def __init__(self) -> None:
        self._all: list[Trouble] = []

    def add(self, began: float, ended: float, *hosts: str) -> None:
        self._all.append(Trouble(began, ended, hosts))

    def spans(
        self, hosts: Iterable[str], began: float, ended: float, *, linger_s: float = LINGER_S, of: str = ""
    ) -> list[tuple[float, float]]:
        """Return the spans of [began, ended] in which one of these hosts, or the network between two of them, was in
        trouble. `of`: only what has to do with that host."""
        near = {*hosts}
        mine = (t for t in self._all if near.issuperset(t.hosts) and (not of or of in t.hosts))
        spans = [(max(t.began, began), min(t.ended + linger_s, ended)) for t in mine]
        return [span for span in spans if span[0] < span[1]]


class Turns:
    """Times in which each worker computed, with the one of its requests that had come first."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        """request_ids: in the order in which the requests come."""
        self._places = {request_id: place for place, request_id in enumerate(request_ids)}
        self._all: list[tuple[float, float, str, frozenset[int]]] = []

    def add(self, began: float, ended: float, host: str, request_ids: Iterable[str]) -> None:
        places = frozenset(self._places[request_id] for request_id in request_ids)
        if places:
            self._all.append((began, ended, host, places))

    def before(
        self, request_id: str, hosts: Iterable[str], began: float, ended: float, waits_until: float
    ) -> list[tuple[float, float]]:
        """Return the spans of [began, ended] in which one of these hosts computed what had come before the request, or,
        up to `waits_until`, anything but it."""
        place, near = self._places[request_id], {*hosts}
        spans: list[tuple[float, float]] = []
        for start, end, host, places in self._all:
            if host in near and (min(places) < place or (place not in places and start < waits_until)):
                spans.append((max(start, began), min(end, ended)))
        return [span for span in spans if span[0] < span[1]]


@dataclass(slots=True)
class Attempt:
    began: float
    hosts: set[str]
    ended: float = float("inf")
    error: DiptychError | None = None


@dataclass(slots=True)
class Story:
    """Story of a request."""

    router: str
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    failed_at: float | None = None

    def quiet_s(
        self, troubles: Troubles, turns: Turns, request: Request, began: float, ended: float, due: float
    ) -> float:
        """Return the time (s) in which its workers, or those that it waited for, had no fault, and were free for it.
        `due`: when it is late, if it has no token."""
        waits_until = due + max(0.0, began + request.timeout_s - due) / 2
        spans: list[tuple[float, float]] = []
        at = began
        for attempt in self.attempts:
            spans += troubles.spans((self.router, fleet_of(self.router)), at, attempt.began)
            at = min(attempt.ended, ended)
            spans += troubles.spans(attempt.hosts, attempt.began, at)
            spans += turns.before(request.request_id, attempt.hosts, attempt.began, at, waits_until)
        spans += troubles.spans((self.router, fleet_of(self.router)), at, ended)
        return ended - began - length_of(spans)


class WatchedState(RequestState):
    """Tells the world what becomes of its attempts."""

    def __init__(self, world: "World", *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._world = world
        self.story = Story(asyncio.get_running_loop().name)  # type: ignore[attr-defined]

    def begin(self, *args: object, **kwargs: object) -> Actions:
        self.story.attempts.append(Attempt(self._world.clock.now, {self.story.router}))
        return self._met(super().begin(*args, **kwargs))  # type: ignore[arg-type]

    def begin_sink(self, *args: object) -> Actions:
        return self._met(super().begin_sink(*args))  # type: ignore[arg-type]

    def migrate(self, worker: str, handoff_id: str, handles: Iterator[int]) -> Actions:
        self._world.moves.add(handoff_id)
        return self._met(super().migrate(worker, handoff_id, handles))

    def _resume(self, error: DiptychError) -> Actions:
        attempt = self.story.attempts[-1]
        attempt.ended, attempt.error = self._world.clock.now, error
        actions = super()._resume(error)
        self._note_failure()
        return actions

    def fail(self, error: DiptychError) -> Actions:
        actions = super().fail(error)
        self._note_failure()
        return actions

    def _note_failure(self) -> None:
        if self.error is not None and self.story.failed_at is None:
            self.story.failed_at = self._world.clock.now

    def _met(self, actions: Actions) -> Actions:
        attempt = self.story.attempts[-1]
        attempt.hosts |= {worker_request.worker.partition(".")[0] for worker_request in self._worker_requests.values()}
        attempt.hosts |= {action.worker.partition(".")[0] for action in actions if isinstance(action, OfferPrefix)}
        return actions


def fleet_of(router: str) -> str:
    """Stands for the workers that a router can reach: faulty if there is none."""
    return f"fleet of {router}"


def check_failure(world: "World", client: "Client") -> None:
    """`client` got an Unavailable or a DeadlineExceeded."""
    name, error = client.request.request_id, client.error
    state, troubles = world.states[name], world.network.troubles
    ended = state.story.failed_at
    assert error is not None and ended is not None
    if state.failures.num_attempts >= state.failures.max_attempts:
        for attempt in state.story.attempts:
            is_blameless = attempt.error is None or isinstance(attempt.error, WorkerDraining | PromptReturned)
            met = is_blameless or troubles.spans(attempt.hosts, attempt.began - LINGER_S, attempt.ended + MOMENT_S)
            demand(met, f"{name}: an attempt at {sorted(attempt.hosts)} failed by nobody's fault: {attempt.error!r}")
        return
    request, began = client.request, client.arrives_at
    due = began + (request.level.ttft_s or TTFT_S)
    quiet_s = state.story.quiet_s(troubles, world.turns, request, began, ended, due)
    demand(quiet_s <= ENOUGH_S, f"{name} failed after {quiet_s:.1f} s in which nothing was wrong: {error!r}")
    if error.code == "service_unavailable":
        waited = state.story.attempts[-1].ended if state.story.attempts else client.arrives_at
        gone_s = length_of(troubles.spans((state.story.router, fleet_of(state.story.router)), waited, ended))
        jumped_s = world.routers.at(state.story.router).jumped_s
        demand(
            gone_s + jumped_s >= world.no_worker_wait_s - SHORT_S,
            f"{name} was given up after {gone_s:.1f} s: {error!r}",
        )


def length_of(spans: list[tuple[float, float]]) -> float:
    """Length of the spans' union."""
    length, at = 0.0, float("-inf")
    for began, ended in sorted(spans):
        length += max(ended - max(began, at), 0.0)
        at = max(at, ended)
    return length
