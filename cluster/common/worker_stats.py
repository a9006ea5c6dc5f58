"""Statistics that workers report, read and checked: KV transfers, by source; drafts: tokens that were proposed as the
next ones of a sequence, and verified. And recent speeds, from counters that began with the worker."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...proto import worker_pb2
from ...workers.common.errors import InternalError
from ...workers.common.timings import check_duration, check_name

MAX_SOURCES = 4096  # sources of one worker
MAX_METHODS = 16  # of speculation on one worker
MAX_YIELDS = 64  # numbers of tokens that a verification may yield
MEMORY_S = 10.0  # what was measured that long ago counts 1/e
MIN_BYTES = 1 << 20  # that must have been read lately, for the speed of a link to be known
MIN_TOKENS = 256  # that must have been computed, for the speed of that
FORGET_S = 60.0  # a speed that was not measured for so long is 1/e of itself, the rest the usual one


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counters of one source, since the sink's start."""

    source: str  # incarnation
    transport: str  # the last used; empty before the first read
    num_bytes: int
    read_s: float  # time in which at least one read was running
    num_reads: int
    num_failed: int  # pulls


def read_transfer_stats(load: worker_pb2.LoadReport) -> tuple[TransferStats, ...]:
    """Read the statistics of all sources. Raises InternalError for invalid names or times, or a source named twice."""
    if not load.links:
        return ()
    if len(load.links) > MAX_SOURCES or len({link.incarnation for link in load.links}) < len(load.links):
        raise InternalError(f"a load report has {len(load.links)} links: at most {MAX_SOURCES}, one a source")
    return tuple(
        TransferStats(
            check_name(link.incarnation),
            check_name(link.transport),
            link.num_bytes,
            check_duration(link.read_s),
            link.num_reads,
            link.num_failed,
        )
        for link in load.links
    )


class RecentSpeed:
    """Speed at which something is done, by what was counted lately. Pure: times come in.

    Where nothing is counted any more it becomes, as a geometric mean, more and more the usual speed: what was slow once
    would otherwise never be used, and so never measured again.
    """

    def __init__(self, least: float = MIN_TOKENS) -> None:
        """least: what must have been counted lately, for the speed to be known."""
        self._least = least
        self._counters = (0, 0.0)
        self._amount, self._seconds, self._added_at = 0.0, 0.0, 0.0
        self._speed, self._known_at = 0.0, 0.0  # 0: not known yet

    def count(self, amount: int, seconds: float, now: float) -> tuple[int, float]:
        """Take counters, of what was done and in which time; returns by how much they have grown. Smaller ones than
        before have begun anew."""
        before = self._counters
        if (amount, seconds) == before:
            return 0, 0.0
        if amount < before[0] or seconds < before[1]:
            before = 0, 0.0
        self._counters = amount, seconds
        grown = amount - before[0], seconds - before[1]
        self.add(*grown, now)
        return grown

    def add(self, amount: int, seconds: float, now: float) -> None:
        fade = math.exp(min(self._added_at - now, 0.0) / MEMORY_S)
        self._amount, self._seconds = self._amount * fade + amount, self._seconds * fade + seconds
        self._added_at = now
        if self._amount >= self._least and self._seconds > 0:
            self._speed, self._known_at = self._amount / self._seconds, now

    def known(self) -> float | None:
        """The speed as it was last measured, per second; None: it never was."""
        return self._speed or None

    def at(self, now: float, usual: float) -> float:
        """The speed per second, where the usual one is above 0."""
        if not self._speed:
            return usual
        weight = math.exp(min(self._known_at - now, 0.0) / FORGET_S)
        return self._speed if weight == 1.0 else usual * (self._speed / usual) ** weight


class LinkSpeeds:
    """Speeds at which one worker reads KV, by source."""

    def __init__(self) -> None:
        self._all = RecentSpeed(MIN_BYTES)
        self._by_source: dict[str, RecentSpeed] = {}

    def take(self, links: Iterable[worker_pb2.PeerLink], now: float, usual: float) -> tuple[dict[str, float], float]:
        """Take the counters of all links. Returns their speeds (bytes per second), by source, and that of all sources,
        for links which are not measured."""
        before = self._by_source
        found: dict[str, RecentSpeed] = {}
        for link in links:
            speed = found[link.incarnation] = before.get(link.incarnation) or RecentSpeed(MIN_BYTES)
            num_bytes, seconds = speed.count(link.num_bytes, link.read_s, now)
            if num_bytes or seconds:
                self._all.add(num_bytes, seconds, now)
        self._by_source = found or before  # where a worker's link was broken, its first report has none
        of_all = self._all.at(now, usual)
        return {source: speed.at(now, of_all) for source, speed in found.items()}, of_all


class Drafts(NamedTuple):
    """Numbers of tokens. `num_accepted`: of `num_drafted`."""

    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_rejected(self) -> int:
        return self.num_drafted - self.num_accepted

    def plus(self, other: "Drafts") -> "Drafts":
        return Drafts(self.num_drafted + other.num_drafted, self.num_accepted + other.num_accepted)

    @classmethod
    def from_proto(cls, message: worker_pb2.Verified | worker_pb2.DraftCounts) -> "Drafts":
        """Read and check. Raises InternalError where more were accepted than drafted."""
        if message.num_accepted > message.num_drafted:
            raise InternalError(f"a worker accepted {message.num_accepted} of {message.num_drafted} drafted tokens")
        return cls(message.num_drafted, message.num_accepted)


NO_DRAFTS = Drafts()


def check_drafts(load: worker_pb2.LoadReport) -> None:
    """Raise InternalError for impossible counts, or names that are no names."""
    if not (load.drafts or load.draft_yields):
        return
    names = {check_name(counts.method) for counts in load.drafts}
    if len(names) < len(load.drafts) or len(names) > MAX_METHODS or "" in names:
        raise InternalError(f"a load report has drafts of {len(load.drafts)} methods: at most {MAX_METHODS}, each once")
    if len(load.draft_yields) > MAX_YIELDS:
        raise InternalError(f"a load report has {len(load.draft_yields)} yields of drafts: at most {MAX_YIELDS}")
    for counts in load.drafts:
        Drafts.from_proto(counts)
