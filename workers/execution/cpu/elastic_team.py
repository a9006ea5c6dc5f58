"""A team of compute threads that grows by cores which other workers do not use, and returns them between layers."""

import logging
import time
from collections.abc import Iterator, Sequence

from ....kernels.cpu.library import Library, Team
from ...common.cores import usable_cores
from .core_sharing import CoreSharing, cores_to_borrow

PIECE_S = 0.003  # of a step, after which the cores are looked at: so long an owner waits for its core

log = logging.getLogger("diptych.worker")


class ElasticTeam:
    """Cores of a team, step by step. `begin`, then `pieces` of the step's layers; `rest` when there is nothing to
    compute."""

    def __init__(self, team: Team, sharing: CoreSharing) -> None:
        self.team, self._sharing = team, sharing
        self._cores: tuple[int, ...] = ()
        self.has_borrowed = False  # in the last step

    def pieces(self, ends: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Ranges of layers, [first, last), each to be computed before the next is asked for. One ends at each of
        `ends`, the last of which is the number of layers."""
        self.has_borrowed = False
        self._use(self._sharing.begin())
        first, num = 0, 1
        for end in ends:
            while first < end:
                last = min(first + num, end)
                began = time.perf_counter()
                yield first, last
                layer_s = (time.perf_counter() - began) / (last - first)
                num = max(int(PIECE_S / layer_s), 1)
                first = last
                self._use(self._sharing.adjust())

    def rest(self) -> None:
        """Lend the worker's own cores until the next step. Idempotent."""
        self._sharing.rest()

    def close(self) -> None:
        self._sharing.close()

    def _use(self, cores: tuple[int, ...]) -> None:
        self.has_borrowed |= self._sharing.has_borrowed
        if cores != self._cores:
            self._cores = cores
            self.team.resize(cores)


def share_cores(library: Library, cores: Sequence[int]) -> "ElasticTeam | None":
    """Make a team for a worker that has `cores` for itself; None where there are no others to borrow, or the system has
    no means to share."""
    try:
        others = cores_to_borrow(cores, usable_cores())
        sharing = CoreSharing(cores, others) if others else None
    except OSError as e:
        log.info("this worker shares no cores: %s", e)
        return None
    if sharing is None:
        return None
    return ElasticTeam(Team(library, sharing.max_cores, cores, num_active=len(cores)), sharing)
