"""Device that notes when each piece of work begins and ends on its lane.

    lane      [ work ][ work ]        [ work ]
    other          [ work ]
    idle                      ^^^^^^^^

A begin is noted by the device when the lane comes to it: at once where it waits for us, and where the work before it
ends if that is still under way. So the device is idle, for want of us, when no lane is between a begin and its end.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from diptych.workers.device.device import Device, Event, Lane, Work

Span = tuple[float, float]  # seconds, of one clock


class Clock(Protocol):
    def stamp(self) -> Any:
        """Record the moment in which the lane that this is run on comes to it."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one stamp to another; the lane has come to both."""
        ...


class CudaClock:
    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3


class HostClock:
    """Clock for devices whose lanes run on the host."""

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


@dataclass
class _Notes:
    clock: Clock
    is_on: bool = False
    stamps: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])


@dataclass
class TimedLane:
    lane: Lane
    notes: _Notes

    def run(self, work: Work) -> None:
        self.lane.run(lambda: self._noted(work)) if self.notes.is_on else self.lane.run(work)

    def after(self, event: Event) -> None:
        self.lane.after(event)

    def record(self) -> Event:
        return self.lane.record()

    def _noted(self, work: Work) -> None:
        start = self.notes.clock.stamp()
        work()
        self.notes.stamps.append((start, self.notes.clock.stamp()))


class TimedDevice:
    """A Device by another. Notes are taken while `take` runs something. capture_s: seconds that captures have taken."""

    def __init__(self, device: Device, clock: Clock) -> None:
        self._device, self._notes = device, _Notes(clock)
        self._clock_lane = device.lane("clock")
        self.capture_s = 0.0

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    def lane(self, name: str, *, high_priority: bool = False) -> TimedLane:
        return TimedLane(self._device.lane(name, high_priority=high_priority), self._notes)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._device.pinned(shape, dtype)

    def capture(self, lane: Lane, work: Work) -> Callable[[], None]:
        assert isinstance(lane, TimedLane)
        began = time.perf_counter()
        try:
            return self._device.capture(lane.lane, work)
        finally:
            self.capture_s += time.perf_counter() - began

    def synchronize(self) -> None:
        self._device.synchronize()

    def take(self, run: Callable[[], object]) -> list[Span]:
        """Return the spans in which the device worked for `run`, all lanes together, by begin; the first span begins at
        0."""
        notes, first = self._notes, list[Any]()
        self._clock_lane.run(lambda: first.append(notes.clock.stamp()))
        self.synchronize()
        notes.stamps, notes.is_on = [], True
        try:
            run()
        finally:
            notes.is_on = False
        self.synchronize()
        seconds = notes.clock.seconds
        spans = sorted((seconds(first[0], start), seconds(first[0], end)) for start, end in notes.stamps)
        return [(start - spans[0][0], end - spans[0][0]) for start, end in spans]


def idle_s(spans: Sequence[Span]) -> float:
    """Seconds between the first begin and the last end in which there is no span. spans: ascending by their begins."""
    idle, end = 0.0, spans[0][1] if spans else 0.0
    for start, stop in spans:
        idle += max(start - end, 0.0)
        end = max(end, stop)
    return idle
