"""Bugs to plant where prompts that several have in common are computed once: see mutations.py."""

from diptych.workers.core.waiting_queue import WaitingQueue

from .mutations import Replacement


def a_beginning_that_does_not_come_is_waited_for() -> list[Replacement]:
    real = WaitingQueue.park
    return [(WaitingQueue, "park", lambda self, name, until=0.0: real(self, name))]


SHARING = (a_beginning_that_does_not_come_is_waited_for,)
