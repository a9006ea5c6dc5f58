"""Statistics of KV transfers: what a worker pulled from each source. Read from load reports and checked."""

from dataclasses import dataclass

from ...proto import worker_pb2
from ...workers.common.errors import InternalError
from ...workers.common.timings import check_duration, check_name

MAX_SOURCES = 4096  # sources of one worker


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
