"""Memory of a router for its dashboard: last events of workers, workers that were lost, requests that ended.

Events of workers are rare, and kept always. Requests that end are kept while somebody looks, for WATCH_S after each
look: at other times one that ends costs a comparison.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...routing.fleet import WorkerInfo
from ...routing.request_driver import RequestDriver

WATCH_S = 10.0
LOST_S = 120.0  # for so long a worker without a successor is shown
MAX_EVENTS = 100
MAX_LOST = 32
MAX_ENDED = 100  # requests


@dataclass(slots=True, eq=False)
class WorkerEvent:
    """Event of a worker. `num`: of so many alike, the last of which was `at` (s)."""

    at: float
    kind: str  # up, down, draining, gone or moved
    subject: str
    detail: str = ""
    num: int = 1


@dataclass(frozen=True, slots=True)
class LostWorker:
    """Worker that ended without a drain."""

    info: WorkerInfo
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class EndedRequest:
    driver: RequestDriver
    outcome: str
    at: float


class Activity:
    """RouterObserver of one router. `clock`: the event loop's; `infos` returns the workers that it knows."""

    def __init__(self, clock: Callable[[], float], infos: Callable[[], Iterable[WorkerInfo]]) -> None:
        self._clock, self._infos = clock, infos
        self._events: deque[WorkerEvent] = deque(maxlen=MAX_EVENTS)
        self._down: dict[str, LostWorker] = {}  # by incarnation: without a link, but still listed
        self._draining: set[str] = set()
        self._lost: list[LostWorker] = []
        self._ended: deque[EndedRequest] = deque(maxlen=MAX_ENDED)
        self._watched_until = float("-inf")

    def watch(self, now: float) -> None:
        """Keep the requests that end from now on."""
        if now > self._watched_until:
            self._ended.clear()  # of an earlier look
        self._watched_until = now + WATCH_S

    def events(self) -> list[WorkerEvent]:
        """Last events, newest first."""
        return list(reversed(self._events))

    def ended(self) -> list[EndedRequest]:
        """Last requests that ended while somebody looked, newest first."""
        return list(reversed(self._ended))

    def lost(self, now: float) -> list[LostWorker]:
        """Workers that were lost, and that none of their pool has replaced since."""
        self._lost = [worker for worker in self._lost if now - worker.at < LOST_S]
        return list(self._lost)

    def on_up(self, info: WorkerInfo) -> None:
        is_back = self._down.pop(info.incarnation, None) is not None
        if not is_back and (lost := next((w for w in self._lost if w.info.pool == info.pool), None)) is not None:
            self._lost.remove(lost)
        self._add("up", _name(info), "its link is back" if is_back else "")

    def on_down(self, info: WorkerInfo, reason: str) -> None:
        if info.incarnation not in self._down:  # else another try to reach it has failed
            self._down[info.incarnation] = LostWorker(info, reason, self._clock())
            self._add("down", _name(info), reason)

    def on_draining(self, info: WorkerInfo) -> None:
        self._draining.add(info.incarnation)
        self._add("draining", _name(info))

    def on_gone(self, info: WorkerInfo) -> None:
        down = self._down.pop(info.incarnation, None)
        if info.incarnation in self._draining:
            self._draining.remove(info.incarnation)
        else:
            self._lost.append(down or LostWorker(info, "the supervisor has ended it", self._clock()))
            del self._lost[:-MAX_LOST]
        self._add("gone", _name(info))

    def on_move(self, cause: str, source: str, target: str) -> None:
        names = {info.incarnation: _name(info) for info in self._infos()}
        self._add("moved", names.get(source, source), f"to {names.get(target, target)}: {cause}")

    def on_ended(self, driver: RequestDriver, outcome: str, now: float) -> None:
        if now < self._watched_until:
            self._ended.append(EndedRequest(driver, outcome, now))

    def _add(self, kind: str, subject: str, detail: str = "") -> None:
        last, now = self._events[-1] if self._events else None, self._clock()
        if last is not None and (last.kind, last.subject, last.detail) == (kind, subject, detail):
            last.at, last.num = now, last.num + 1
        else:
            self._events.append(WorkerEvent(now, kind, subject, detail))


def _name(info: WorkerInfo) -> str:
    return info.name or info.incarnation
