"""Moves running requests between workers, as migration.py decides, for one router. Looks at the fleet after
a change; a look is cheap while no worker drains or runs short of blocks."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from ...workers.common.role import Role
from .fleet import Fleet, FleetWorker
from .migration import MovableRequest, Move, drain_move, is_short_of_blocks, relief
from .policy import RoutingConfig
from .request_driver import RequestDriver


class MigrationController:
    """Controller of one router's migrations. `drivers`: the router's requests, kept current. `on_move` is called with
    the cause, the source and the target of each move before it begins. Runs on an event loop."""

    def __init__(
        self,
        config: RoutingConfig,
        fleet: Fleet,
        drivers: Collection[RequestDriver],
        on_move: Callable[[str, str, str], None],
    ) -> None:
        self._on_move = on_move
        self._config = config
        self._fleet = fleet
        self._drivers = drivers
        self._is_due = False
        self.num_moves: Counter[str] = Counter()  # begun, by cause: drain, budget or memory
        self._took_decodes: set[str] = set()  # workers whose last report was not of the prefill role
        # Workers that gave up decodes, and when (loop s); while requests from before are there.
        self._prefill_since: dict[str, float] = {}

    def look_soon(self) -> None:
        """Call `_look` after the current event."""
        if self._config.migrate and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def on_load(self, worker: str) -> None:
        """Handle a load report: where its worker is short of blocks, a request may leave it."""
        view = self._fleet.view(worker)
        view.reported_at = asyncio.get_running_loop().time()
        self._note_budget(view)
        if view.is_draining or worker in self._prefill_since:
            self.look_soon()
        elif self._config.migrate and is_short_of_blocks(view) and not self._num_moving()[worker]:
            now = asyncio.get_running_loop().time()
            self._apply(relief(self._fleet.views(), view, self._movable(), now), "memory")

    def on_end(self, worker: str) -> None:
        """Handle the end of a worker request: where its worker drains, the next request may move."""
        if self._fleet.is_draining(worker) or worker in self._prefill_since:
            self.look_soon()

    def forget(self, worker: str) -> None:
        """Handle the end of a worker."""
        self._took_decodes.discard(worker)
        self._prefill_since.pop(worker, None)

    def _note_budget(self, view: FleetWorker) -> None:
        """Note whether the worker has given up decodes since its last report: what decodes there then may move."""
        worker = view.incarnation
        if view.role is not Role.PREFILL:
            self._took_decodes.add(worker)
            self._prefill_since.pop(worker, None)
        elif worker in self._took_decodes:
            self._took_decodes.remove(worker)
            self._prefill_since[worker] = asyncio.get_running_loop().time()
        elif worker in self._prefill_since and not self._has_requests_before(worker, self._prefill_since[worker]):
            del self._prefill_since[worker]

    def _has_requests_before(self, worker: str, time_s: float) -> bool:
        return any(
            driver.times.started_at <= time_s and any(r.worker == worker for r in driver.state.worker_requests())
            for driver in self._drivers
        )

    def _look(self) -> None:
        self._is_due = False
        since = self._prefill_since
        leaving = (v for v in self._fleet.views() if v.is_draining or v.incarnation in since)
        if not any(v.is_up and v.num_in_flight for v in leaving):
            return
        for _ in range(len(self._drivers)):
            now = asyncio.get_running_loop().time()
            num_moving, limit = self._num_moving(), self._config.max_migrations
            if not self._apply(drain_move(self._fleet.views(), self._movable(), num_moving, limit, now, since)):
                return

    def _apply(self, move: Move | None, cause: str = "") -> bool:
        """Carry out a move. `cause`: empty where its worker drains, or has given up decodes."""
        if move is None:
            return False
        driver = next(d for d in self._drivers if (r := d.state.movable()) is not None and r.handle == move.handle)
        source = driver.state.output.notes.worker
        cause = cause or ("drain" if self._fleet.is_draining(source) else "budget")
        self.num_moves[cause] += 1
        self._on_move(cause, source, move.target)
        driver.migrate(move.target)
        return True

    def _num_moving(self) -> Counter[str]:
        """Number of requests that are moving, by the worker that they leave."""
        return Counter(r.worker for driver in self._drivers if (r := driver.state.moving()) is not None)

    def _movable(self) -> list[MovableRequest]:
        return [request for driver in self._drivers if (request := driver.movable()) is not None]
