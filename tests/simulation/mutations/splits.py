"""Bugs to plant where a route moves inside the prompt: see mutations.py."""

from typing import Any

from diptych.cluster.routing.actions import Abort, Part
from diptych.cluster.routing.request_driver import RequestDriver
from diptych.workers.core.sequence import ScheduledSequence, UnsampledChunk
from diptych.workers.engine.engine import Engine

from .mutations import Replacement


def the_source_of_a_beginning_samples_a_token() -> list[Replacement]:
    real_note = Engine._note

    def note(self: Engine, token: Any) -> None:
        if not token.sequence.request.is_prefix:
            real_note(self, token)

    return [(UnsampledChunk, "samples", ScheduledSequence.samples), (Engine, "_note", note)]


def the_source_of_a_beginning_is_not_stopped() -> list[Replacement]:
    real = RequestDriver._do

    def do(self: RequestDriver, actions: Any) -> None:
        real(self, [a for a in actions if not (isinstance(a, Abort) and a.worker_request.part is Part.PREFIX)])

    return [(RequestDriver, "_do", do)]


SPLITS = (
    the_source_of_a_beginning_samples_a_token,
    the_source_of_a_beginning_is_not_stopped,
)
