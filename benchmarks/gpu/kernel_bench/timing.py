"""Times calls on a GPU: many captured in one graph, over inputs that together are larger than the L2."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

REPEATS = 20  # replays that are timed
REPLAY_S = 2e-3  # how long a replay should be at least: then its own launch does not show
MOST_LAUNCHES = 200  # in a graph
COLD_BYTES = 256 << 20  # several times any L2


class Clock(Protocol):
    def seconds(self, call: Call) -> float:
        """Seconds of the device, from the first of its work to the last, after the L2 was flushed."""
        ...

    def capture(self, calls: Sequence[Call]) -> Call:
        """Return a call that replays the device's work of all calls, one after another."""
        ...


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the replays, and their quartiles."""

    median: float
    low: float
    high: float


def time_calls(calls: Sequence[Call], clock: Clock) -> Timing:
    """calls: the same work on inputs of their own, to go round; enough of them to be larger than the L2 together."""
    for call in calls:  # compiled, and what libraries allocate once is
        clock.seconds(call)
    roughly = sum(clock.seconds(call) for call in calls)
    rounds = max(1, min(math.ceil(REPLAY_S / roughly), MOST_LAUNCHES // len(calls)))
    replay = clock.capture([*calls] * rounds)
    clock.seconds(replay)  # uploads the graph
    each = [clock.seconds(replay) / (rounds * len(calls)) for _ in range(REPEATS)]
    low, median, high = statistics.quantiles(each, n=4, method="inclusive")
    return Timing(median, low, high)


def num_sets(num_bytes: float, most: int = 64) -> int:
    """Sets of inputs of so many bytes that are together larger than the L2."""
    return max(1, min(most, math.ceil(COLD_BYTES / num_bytes)))


class CudaClock:
    def __init__(self) -> None:
        self._flushed = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")

    def seconds(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self._flushed.zero_()  # longer than the launch that follows it takes: that one then waits in the queue
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def capture(self, calls: Sequence[Call]) -> Call:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries keep workspaces by stream: these are made before the capture
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        return graph.replay
