"""Phases of a request in the order of its life, without a gap between them. Pure.

receipt ─queue─prefill─deliver_first─last_segment─commit─first_decode─deliver_second─decode─> last token

Their names and meaning: cluster/common/timings.py. A phase that took no time is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..common.timings import RequestEvent, RequestJournal, RequestTimings

SUBMITTED = "submitted"
_COMPUTE_FIRST = frozenset({"alone", "prefill"})  # parts that make the first token
_COMPUTE_NEXT = frozenset({"alone", "decode"})


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """Phase of a request. Times in seconds, on the clock of its router. `worker`: name of who spent it; empty: the
    router."""

    name: str
    start: float
    end: float
    worker: str = ""


def phases_of(journal: RequestJournal) -> list[RequestPhase]:
    """Phases of a request that has ended; of one without a token, the time that it waited."""
    times, timings = journal.times, journal.timings
    assert times is not None and journal.ended_at is not None
    start = times.started_at
    if timings is None:
        return [RequestPhase("queue", start, journal.ended_at)]
    phases: list[RequestPhase] = []
    at, end = start, start + timings.total_s
    for name, duration_s, worker in _durations(timings, _workers(journal)):
        if duration_s > 0:
            phases.append(RequestPhase(name, at, min(at + duration_s, end), worker))
            at = phases[-1].end
    if at < end:
        phases.append(RequestPhase("decode", at, end, _workers(journal)[2]))
    return phases


def _durations(timings: RequestTimings, workers: tuple[str, str, str]) -> Iterator[tuple[str, float, str]]:
    first, second, _ = workers
    yield "queue", timings.queue_s, first
    yield "prefill", timings.prefill_s, first
    yield "deliver_first", timings.deliver_first_s, ""
    yield "last_segment", timings.last_segment_s, second
    yield "commit", timings.commit_s, second
    yield "first_decode", timings.first_decode_s, second
    yield "deliver_second", timings.deliver_second_s, ""


def _workers(journal: RequestJournal) -> tuple[str, str, str]:
    """Names of the workers that made the first token, the second one, and the last."""
    times = journal.times
    assert times is not None
    delivered = times.delivered_at
    first = _last(journal.events, _COMPUTE_FIRST, delivered[0] if delivered else None)
    second = _last(journal.events, _COMPUTE_NEXT, delivered[1] if len(delivered) > 1 else None)
    return first, second, _last(journal.events, _COMPUTE_NEXT, None)


def _last(events: list[RequestEvent], parts: frozenset[str], until: float | None) -> str:
    """Worker of the last part of these kinds that was submitted until then."""
    found = [e.worker for e in events if e.what == SUBMITTED and e.detail in parts and (until is None or e.at <= until)]
    return found[-1] if found else ""
