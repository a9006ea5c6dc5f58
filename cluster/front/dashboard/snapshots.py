"""State of a router as JSON, for its dashboard: computed when somebody asks, once for all who ask at a time.

A snapshot costs the event loop a few microseconds a request, in slices between which it serves. The next one waits so
long that all of them take SHARE of the time at most, and PACE_S at least.
"""

import asyncio
import gzip
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from .... import __version__
from ....workers.common.errors import Unavailable
from ....workers.core.runner import ModelInfo
from ...common.demand import ControlReport
from ...common.prediction import Level
from ...routing.fleet import FleetWorker
from ...routing.metrics import RequestTotals
from ...routing.request_driver import RequestDriver
from ...routing.router import RouterObserver
from .activity import Activity
from .fleet import Json, links_json, lost_json, worker_json
from .requests import COLUMNS, PHASES, RequestRows, WorkerNumbers

PACE_S = 0.5
SHARE = 0.02  # of the event loop's time
MAX_LIVE = 1000  # requests of a snapshot, the oldest ones
SLICE = 50  # requests, after which others run
MIN_GZIP_BYTES = 1024

_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class DashboardSource(Protocol):
    """Router, as its dashboard reads it."""

    observer: RouterObserver | None
    control: ControlReport
    control_at: float

    def workers(self) -> list[FleetWorker]: ...
    def requests(self) -> list[RequestDriver]: ...
    def model(self) -> ModelInfo: ...
    @property
    def totals(self) -> RequestTotals: ...
    @property
    def num_moves(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """Names of a router, of which several may share a port."""

    id: str
    host: str
    pid: int
    num_routers: int = 1

    @classmethod
    def here(cls, num_routers: int = 1) -> "RouterIdentity":
        return cls(secrets.token_hex(4), socket.gethostname(), os.getpid(), num_routers)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """JSON of a router's state. `tag` is of all but its clock, `now`."""

    tag: str
    body: bytes
    zipped: bytes


class Snapshots:
    """Maker of the snapshots of one router. Made on its running event loop, which it observes from then on."""

    def __init__(self, source: DashboardSource, level: Level, identity: RouterIdentity) -> None:
        loop = asyncio.get_running_loop()
        self._source, self._level, self._identity = source, level, identity
        self._activity = Activity(loop.time, lambda: (view.info for view in source.workers()))
        source.observer = self._activity
        self._rows = RequestRows()
        self._making: asyncio.Task[Snapshot] | None = None
        self._next_at = float("-inf")
        self._busy_s = 0.0  # that the snapshot in the making has taken

    async def newest(self) -> Snapshot:
        """Snapshot that is PACE_S old at most, or as much older as the pace asks for."""
        now = asyncio.get_running_loop().time()
        self._activity.watch(now)
        if self._making is None or (self._making.done() and now >= self._next_at):
            self._making = asyncio.create_task(self._make())
        return await asyncio.shield(self._making)

    async def _make(self) -> Snapshot:
        loop, began = asyncio.get_running_loop(), time.thread_time()
        numbers, now = WorkerNumbers(), loop.time()
        state, live = self._state(now), self._source.requests()
        self._busy_s = time.thread_time() - began
        running = ((driver, None, None) for driver in islice(live, MAX_LIVE))
        rows = await self._parts(running, numbers)
        ended = await self._parts(((e.driver, e.outcome, e.at) for e in self._activity.ended()), numbers)
        began = time.thread_time()
        state |= {"num_live": len(live), "columns": COLUMNS, "phases": PHASES, "names": numbers.incarnations}
        lists = f'"live":[{",".join(rows)}],"ended":[{",".join(ended)}]'
        text = f"{_dumps(state)[:-1]},{lists}"
        tag = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        body = f'{text},"now":{now:.4f}}}'.encode()
        self._busy_s += time.thread_time() - began
        self._next_at = loop.time() + max(PACE_S, self._busy_s / SHARE)
        is_large = len(body) >= MIN_GZIP_BYTES
        zipped = await asyncio.to_thread(gzip.compress, body, 1) if is_large else gzip.compress(body, 1)
        return Snapshot(tag, body, zipped)

    async def _parts(
        self, requests: Iterable[tuple[RequestDriver, str | None, float | None]], numbers: WorkerNumbers
    ) -> list[str]:
        """JSON of the rows of requests, with their outcomes and ends, in parts. The event loop runs between them."""
        rest, parts = iter(requests), list[str]()
        while True:
            began = time.thread_time()
            if not (rows := [self._rows.row(each[0], numbers, *each[1:]) for each in islice(rest, SLICE)]):
                return parts
            parts.append(_dumps(rows)[1:-1])
            self._busy_s += time.thread_time() - began
            await asyncio.sleep(0)

    def _state(self, now: float) -> Json:
        """All but the requests."""
        source, activity, views = self._source, self._activity, self._source.workers()
        control, identity, totals = source.control, self._identity, source.totals
        known = {view.incarnation for view in views}
        lost = [lost_json(each) for each in activity.lost(now) if each.info.incarnation not in known]
        report_at = now - (time.monotonic() - source.control_at) if control.pools else 0.0
        return {
            "router": {
                "id": identity.id,
                "host": identity.host,
                "pid": identity.pid,
                "num_routers": identity.num_routers,
                "version": __version__,
                "model": self._model(),
            },
            "level": {"ttft_s": self._level.ttft_s, "tpot_s": self._level.tpot_s},
            "workers": [worker_json(view) for view in views] + lost,
            "links": links_json(views),
            "events": [
                {"at": round(e.at, 1), "kind": e.kind, "subject": e.subject, "detail": e.detail, "num": e.num}
                for e in activity.events()
            ],
            "totals": {name: getattr(totals, name) for name in totals.__slots__} | {"moves": dict(source.num_moves)},
            "pools": [{name: getattr(pool, name) for name in pool.__slots__} for pool in control.pools],
            "decisions": [
                {name: getattr(each, name) for name in each.__slots__ if name != "age_s"}
                | {"at": round(report_at - each.age_s, 1)}
                for each in control.decisions
            ],
            "control": {s.name: dict(s.values) for s in control.series if s.is_counter},
        }

    def _model(self) -> str:
        views = self._source.workers()
        if not views:
            return ""
        try:
            return self._source.model().name
        except Unavailable:
            return ""
