"""Time of KV on the network between simulated workers. Pure.

Each worker has a link of its own, which sends and receives one transfer at a time, each direction by itself. A step's
KV is sent in groups of layers while the step still runs, as a source announces it (handoff.layer_groups).
"""

from dataclasses import dataclass

AUTO_GROUPS = 4  # of layers, where a worker chooses them by cost


@dataclass(frozen=True, slots=True)
class LinkSetup:
    bytes_s: float
    latency_s: float  # of a hand-off, beside its bytes
    layer_groups: int = AUTO_GROUPS


class Links:
    def __init__(self, setup: LinkSetup) -> None:
        self.setup = setup
        self.num_bytes = 0.0
        self._sending_until: dict[str, float] = {}
        self._receiving_until: dict[str, float] = {}

    def send(self, source: str, sink: str, num_bytes: float, made: tuple[float, float], now: float) -> float:
        """Time at which bytes are there that a step makes: `made` is its begin and end, one group of layers after the
        other, each in the same time."""
        setup, groups = self.setup, self.setup.layer_groups
        began, ended = made
        all_s = num_bytes / setup.bytes_s
        first = began + (ended - began) / groups
        # What is sent while the step runs is sent before now; with the last group the rest is.
        free = max(self._sending_until.get(source, 0.0), self._receiving_until.get(sink, 0.0))
        there = max(free + all_s, first + all_s, ended + all_s / groups, now)
        self._sending_until[source] = self._receiving_until[sink] = there
        self.num_bytes += num_bytes
        return there

    def read(self, source: str, sink: str, num_bytes: float, now: float) -> float:
        """Time at which bytes are there that a source holds already."""
        return self.send(source, sink, num_bytes, (now, now), now)

    def forget(self, worker: str) -> None:
        self._sending_until.pop(worker, None)
        self._receiving_until.pop(worker, None)
