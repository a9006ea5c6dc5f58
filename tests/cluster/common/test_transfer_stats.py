"""The transfer statistics of a load report, checked."""

import pytest

from diptych.cluster.common import transfer_stats
from diptych.cluster.common.transfer_stats import TransferStats, read_transfer_stats
from diptych.proto.worker_pb2 import LoadReport, PeerLink
from diptych.workers.common.errors import InternalError

GOOD = PeerLink(incarnation="a", transport="grpc", num_bytes=8, read_s=0.5, num_reads=2, num_failed=1)


def test_links_are_read() -> None:
    other = PeerLink(incarnation="b", num_failed=3)
    assert read_transfer_stats(LoadReport(links=[GOOD, other])) == (
        TransferStats("a", "grpc", 8, 0.5, 2, 1),
        TransferStats("b", "", 0, 0.0, 0, 3),
    )


@pytest.mark.parametrize(
    "bad",
    [
        PeerLink(incarnation="a"),  # twice
        PeerLink(incarnation="b" * 65),
        PeerLink(incarnation="b", transport="gr\npc"),
        PeerLink(incarnation="b", read_s=-1),
        PeerLink(incarnation="b", read_s=float("inf")),
    ],
)
def test_links_that_cannot_be_are_refused(bad: PeerLink) -> None:
    with pytest.raises(InternalError):
        read_transfer_stats(LoadReport(links=[GOOD, bad]))


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_stats, "MAX_SOURCES", 1)
    with pytest.raises(InternalError, match="2 links"):
        read_transfer_stats(LoadReport(links=[GOOD, PeerLink(incarnation="b")]))
