"""Statistics that workers report are checked."""

import pytest

from diptych.cluster.common import worker_stats
from diptych.cluster.common.worker_stats import (
    MAX_METHODS,
    MAX_YIELDS,
    NO_DRAFTS,
    Drafts,
    TransferStats,
    check_drafts,
    read_transfer_stats,
)
from diptych.proto.worker_pb2 import DraftCounts, LoadReport, PeerLink, Verified
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
    monkeypatch.setattr(worker_stats, "MAX_SOURCES", 1)
    with pytest.raises(InternalError, match="2 links"):
        read_transfer_stats(LoadReport(links=[GOOD, PeerLink(incarnation="b")]))


def test_drafts_add_up() -> None:
    total = NO_DRAFTS.plus(Drafts(4, 1)).plus(Drafts.from_proto(Verified(num_drafted=3, num_accepted=3)))
    assert (total, total.num_rejected) == (Drafts(7, 4), 3)


def test_more_accepted_than_drafted_is_refused() -> None:
    with pytest.raises(InternalError, match="accepted 2 of 1"):
        Drafts.from_proto(Verified(num_drafted=1, num_accepted=2))


@pytest.mark.parametrize(
    ("drafts", "num_yields"),
    [
        ([DraftCounts(method="ngram", num_drafted=1, num_accepted=2)], 0),
        ([DraftCounts(method="ngram"), DraftCounts(method="ngram")], 0),
        ([DraftCounts()], 0),
        ([DraftCounts(method="a b\n")], 0),
        ([DraftCounts(method="x" * 65)], 0),
        ([DraftCounts(method=f"m{i}") for i in range(MAX_METHODS + 1)], 0),
        ([], MAX_YIELDS + 1),
    ],
)
def test_a_report_that_no_worker_makes_is_refused(drafts: list[DraftCounts], num_yields: int) -> None:
    with pytest.raises(InternalError):
        check_drafts(LoadReport(drafts=drafts, draft_yields=[1] * num_yields))


def test_usual_reports_pass() -> None:
    check_drafts(LoadReport())
    methods = [DraftCounts(method=f"m{i}", num_drafted=2, num_accepted=2) for i in range(MAX_METHODS)]
    check_drafts(LoadReport(drafts=methods, draft_yields=[1] * MAX_YIELDS))
