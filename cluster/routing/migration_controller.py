"""Moves running requests between workers, as migration.py decides, for one router. Looks at the fleet after
a change; a look is cheap while no worker drains or runs short of blocks."""

import asyncio
from collections import Counter
from collections.abc import Collection

from .fleet import Fleet
from .migration import MovableRequest, Move, drain_move, is_short_of_blocks, relief
from .policy import RoutingConfig
from .request_driver import RequestDriver


class MigrationController:
    """Controller of one router's migrations. `drivers`: the router's requests, kept current. Runs on an event loop."""

    def __init__(self, config: RoutingConfig, fleet: Fleet, drivers: Collection[RequestDriver]) -> None:
        self._config = config
        self._fleet = fleet
        self._drivers = drivers
        self._is_due = False

    def look_soon(self) -> None:
        """Call `_look` after the current event."""
        if self._config.migrate and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def on_load(self, worker: str) -> None:
        """Handle a load report: where its worker is short of blocks, a request may leave it."""
        view = self._fleet.view(worker)
        if view.is_draining:
            self.look_soon()
        elif self._config.migrate and is_short_of_blocks(view) and not self._num_moving()[worker]:
            now = asyncio.get_running_loop().time()
            self._apply(relief(self._fleet.views(), view, self._movable(), now))

    def on_end(self, worker: str) -> None:
        """Handle the end of a worker request: where its worker drains, the next request may move."""
        if self._fleet.is_draining(worker):
            self.look_soon()

    def _look(self) -> None:
        self._is_due = False
        if not any(v.is_draining and v.is_up and v.num_in_flight for v in self._fleet.views()):
            return
        for _ in range(len(self._drivers)):
            now = asyncio.get_running_loop().time()
            num_moving, limit = self._num_moving(), self._config.max_migrations
            if not self._apply(drain_move(self._fleet.views(), self._movable(), num_moving, limit, now)):
                return

    def _apply(self, move: Move | None) -> bool:
        if move is None:
            return False
        driver = next(d for d in self._drivers if (r := d.state.movable()) is not None and r.handle == move.handle)
        driver.migrate(move.target)
        return True

    def _num_moving(self) -> Counter[str]:
        """Number of requests that are moving, by the worker that they leave."""
        return Counter(r.worker for driver in self._drivers if (r := driver.state.moving()) is not None)

    def _movable(self) -> list[MovableRequest]:
        return [request for driver in self._drivers if (request := driver.movable()) is not None]
