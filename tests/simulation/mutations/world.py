"""Bugs to plant against bits that flip and clients that do not read: see mutations.py."""

from diptych.cluster.routing.request_driver import RequestDriver
from diptych.workers.handoff import segment_receiver

from .mutations import Replacement


def checksums_are_not_compared() -> list[Replacement]:
    return [(segment_receiver, "_compare", lambda segment, found: None)]


def a_client_that_does_not_read_keeps_its_request() -> list[Replacement]:
    real = RequestDriver._expire

    def expire(self: RequestDriver) -> None:
        if self._waiter is not None and not self._waiter.done():
            real(self)

    return [(RequestDriver, "_expire", expire)]


WORLD = (checksums_are_not_compared, a_client_that_does_not_read_keeps_its_request)
