"""Bugs to plant in what several routers share, and in how they learn of a drain: see mutations.py."""

from diptych.cluster.routing.fleet import FleetWorker
from diptych.proto import worker_pb2
from diptych.workers.server.drain import DrainState
from diptych.workers.server.router_links import RouterLink, RouterLinks

from .mutations import Replacement


def the_end_of_one_stream_ends_what_came_over_the_others() -> list[Replacement]:
    real = RouterLinks.close

    def close(self: RouterLinks, link: RouterLink) -> None:
        real(self, link)
        for other in self:
            link.keys |= other.keys

    return [(RouterLinks, "close", close)]


def a_worker_that_drains_is_chosen() -> list[Replacement]:
    return [(FleetWorker, "is_available", property(lambda self: self.is_up and self.is_listed))]


def one_router_that_knows_of_a_drain_counts_for_all() -> list[Replacement]:
    real = DrainState.begin

    def begin(self: DrainState, link: RouterLink) -> None:
        real(self, link)
        for other in self._links:
            other.knows_draining = True

    return [(DrainState, "begin", begin)]


def only_the_first_router_is_told_of_a_drain() -> list[Replacement]:
    def broadcast(self: RouterLinks, message: worker_pb2.WorkerMessage) -> None:
        for number, link in enumerate(self):
            if number == 0 or not message.load.draining:
                link.send(message)

    return [(RouterLinks, "broadcast", broadcast)]


ROUTERS = (
    the_end_of_one_stream_ends_what_came_over_the_others,
    a_worker_that_drains_is_chosen,
    one_router_that_knows_of_a_drain_counts_for_all,
    only_the_first_router_is_told_of_a_drain,
)
