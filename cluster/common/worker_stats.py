"""Statistics that workers report, read and checked: KV transfers, by source; drafts: tokens that were proposed as the
next ones of a sequence, and verified."""

from dataclasses import dataclass
from typing import NamedTuple

from ...proto import worker_pb2
from ...workers.common.errors import InternalError
from ...workers.common.timings import check_duration, check_name

MAX_SOURCES = 4096  # sources of one worker
MAX_METHODS = 16  # of speculation on one worker
MAX_YIELDS = 64  # numbers of tokens that a verification may yield


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
