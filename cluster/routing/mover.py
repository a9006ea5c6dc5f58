"""Carries out what migration.py decides, for one router: looks at the fleet when something changed, moves one leg after
the other. A look is cheap while no worker drains or runs short."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from .fleet import Fleet
from .migration import MovableLeg, Move, drain_move, is_short_of_blocks, relief
from .policy import RoutingConfig
from .request_run import RequestRun


class Mover:
    """`runs` gives the router's requests at the time of asking. Used on a running event loop."""

    def __init__(self, config: RoutingConfig, fleet: Fleet, runs: Callable[[], Collection[RequestRun]]) -> None:
        self._config = config
        self._fleet = fleet
        self._runs = runs
        self._is_due = False

    def look_soon(self) -> None:
        """`look`, after the event at hand."""
        if self._config.migrate and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def on_load(self, worker: str) -> None:
        """A worker reported."""
        view = self._fleet.view(worker)
        if view.is_draining:
            self.look_soon()
        elif self._config.migrate and is_short_of_blocks(view) and not self._num_moving()[worker]:
            now = asyncio.get_running_loop().time()
            self._apply(relief(self._fleet.views(), view, self._legs(), now))

    def on_end(self, worker: str) -> None:
        """A leg there ended: where a worker drains, the next may go."""
        if self._fleet.is_draining(worker):
            self.look_soon()

    def _look(self) -> None:
        self._is_due = False
        if not any(v.is_draining and v.is_up and v.num_in_flight for v in self._fleet.views()):
            return
        for _ in range(len(self._runs())):
            now = asyncio.get_running_loop().time()
            num_moving, limit = self._num_moving(), self._config.max_migrations
            if not self._apply(drain_move(self._fleet.views(), self._legs(), num_moving, limit, now)):
                return

    def _apply(self, move: Move | None) -> bool:
        if move is None:
            return False
        run = next(r for r in self._runs() if (leg := r.record.movable()) is not None and leg.handle == move.handle)
        run.migrate(move.target)
        return True

    def _num_moving(self) -> Counter[str]:
        """Legs on their way, by the worker that they leave."""
        return Counter(leg.worker for run in self._runs() if (leg := run.record.moving()) is not None)

    def _legs(self) -> list[MovableLeg]:
        legs: list[MovableLeg] = []
        for run in self._runs():
            record, leg = run.record, run.record.movable()
            if leg is not None:
                failed = {sink for source, sink in record.failed_pairs if source == leg.worker}
                legs.append(
                    MovableLeg(
                        leg.handle,
                        leg.worker,
                        record.num_tokens,
                        record.num_remaining,
                        run.times.started_at,
                        frozenset(failed | record.excluded),
                        run.moved_at,
                        run.moved_from,
                    )
                )
        return legs
