"""Drain of a worker, from the order to the last word.

    begin    every router is told; what it sent before it knew is still taken, and finished
    seen     a router submits nothing any more, and says later that it waits for nothing
    settle   the worker has nothing left: it takes nothing new, not even from a router that has just dialled

Knows of the engine only what its state says.
"""

from ...proto import worker_pb2
from .router_links import RouterLink, RouterLinks


class DrainState:
    def __init__(self, links: RouterLinks) -> None:
        self._links = links
        self.has_begun = False
        self.is_over = False  # whoever asked has been told that the worker may be ended

    @property
    def num_unfinished_links(self) -> int:
        """Number of streams whose other end has not said that it is done; 0 before the drain."""
        return sum(self.has_begun and not link.is_done for link in self._links)

    def begin(self, link: RouterLink) -> None:
        """`link`: whose other end asked for it."""
        link.knows_draining = self.has_begun = True
        link.is_done = not link.keys

    def seen(self, link: RouterLink, *, is_done: bool) -> None:
        link.knows_draining = self.has_begun
        link.is_done = self.has_begun and is_done

    def refuses(self, link: RouterLink) -> bool:
        """Return whether the worker takes nothing new over that stream."""
        return self.is_over or link.knows_draining

    def settle(self, state: worker_pb2.WorkerState, num_unfinished_links: int) -> None:
        """Complete the state with what is known here, and take nothing new once it says that nothing is left.

        `num_unfinished_links`: as counted before the engine's books, for they have what a stream sent before it was
        done. What came since then came over a stream that is not done.
        """
        state.num_unfinished_links = max(num_unfinished_links, self.num_unfinished_links)
        load = state.load
        num_left = load.num_running + load.num_waiting + load.num_leased_blocks + load.num_quarantined_blocks
        num_left += state.num_open_handoffs + state.num_unfinished_links
        self.is_over = state.drained = self.is_over or (self.has_begun and num_left == 0)
