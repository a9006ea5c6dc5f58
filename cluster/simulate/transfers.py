"""Time of KV on the network between simulated workers. Pure.

Each worker has a link of its own, which sends and receives one transfer at a time, each direction by itself. A step's
KV is sent in groups of layers while the step still runs, as a source announces it (handoff.layer_groups).
"""

from collections.abc import Callable
from dataclasses import dataclass

from ...proto import worker_pb2
from ...workers.core.sequence import Sequence

AUTO_GROUPS = 4  # of layers, where a worker chooses them by cost
MAX_REPORTED = 32  # sources of which a sink's reports tell, the last used ones: a worker tells of all


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
        self._read: dict[str, dict[str, float]] = {}  # bytes, by sink and source; the last used source at the end

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
        sources = self._read.setdefault(sink, {})
        sources[source] = sources.pop(source, 0.0) + num_bytes
        if len(sources) > MAX_REPORTED:
            del sources[next(iter(sources))]
        return there

    def stats(self, sink: str) -> list[worker_pb2.PeerLink]:
        """Statistics of what the sink has read, for its load report."""
        return [
            worker_pb2.PeerLink(incarnation=source, num_bytes=int(num), read_s=num / self.setup.bytes_s)
            for source, num in self._read.get(sink, {}).items()
        ]

    def read(self, source: str, sink: str, num_bytes: float, now: float) -> float:
        """Time at which bytes are there that a source holds already."""
        return self.send(source, sink, num_bytes, (now, now), now)

    def forget(self, worker: str) -> None:
        self._sending_until.pop(worker, None)
        self._receiving_until.pop(worker, None)
        self._read.pop(worker, None)
        for sources in self._read.values():
            sources.pop(worker, None)


@dataclass(slots=True, eq=False)
class Import:
    """KV on its way to a worker. `granted` is called once there are blocks, with the number of tokens already here."""

    sequence: Sequence
    num_tokens: int  # that come
    is_prefix: bool
    granted: Callable[[int], object]
    num_held: int = 0  # tokens found in the prefix cache
