"""What a worker pulled from whom, as its load reports tell. Checked here, for metrics and `diptych status`."""

from dataclasses import dataclass

from ...proto import worker_pb2
from ...workers.common.errors import InternalError
from ...workers.common.timings import check_duration, check_name

MAX_LINKS = 4096  # of one worker


@dataclass(frozen=True, slots=True)
class Link:
    """Counters since the sink's start. `read_s`: in which at least one read was under way."""

    source: str  # incarnation
    transport: str  # the last used; empty before the first read
    num_bytes: int
    read_s: float
    num_reads: int
    num_failed: int  # pulls


def read_links(load: worker_pb2.LoadReport) -> tuple[Link, ...]:
    """Raises InternalError for names and times that cannot be, and for a source that stands there twice."""
    if len(load.links) > MAX_LINKS or len({link.incarnation for link in load.links}) < len(load.links):
        raise InternalError(f"a load report has {len(load.links)} links: at most {MAX_LINKS}, one a source")
    return tuple(
        Link(
            check_name(link.incarnation),
            check_name(link.transport),
            link.num_bytes,
            check_duration(link.read_s),
            link.num_reads,
            link.num_failed,
        )
        for link in load.links
    )
