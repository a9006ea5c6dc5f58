"""Clocks of sequences, pulls and peers, with instants that a person adds up."""

from collections.abc import Callable

import pytest

from diptych.proto import worker_pb2
from diptych.workers.common.errors import InternalError
from diptych.workers.common.timings import HandoffTimings, PullClock, SequenceClock, SequenceTimings, TransferCounters


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


def test_a_sequence_waits_and_then_is_computed() -> None:
    clock = SequenceClock(ready_at=10.0)
    clock.start(10.5)
    clock.start(11.0)  # its next chunk
    assert clock.timings(12.5) == SequenceTimings(queue_s=0.5, compute_s=2.0)


def test_a_pull_whose_reads_overlap() -> None:
    now = Clock()
    traffic = TransferCounters()
    pull = PullClock(traffic, now)
    pull.announced()
    now.pass_s(1)
    pull.announced()
    with pull.reading("nixl", 100):
        now.pass_s(2)
        with pull.reading("nixl", 50):
            now.pass_s(4)
    now.pass_s(8)
    pull.sealed()
    now.pass_s(0.5)
    with pull.reading("nixl", 7):
        now.pass_s(0.25)
    times = pull.times("nixl")
    now.pass_s(0.125)
    assert times.committed(now()) == HandoffTimings(
        announce_to_pull_s=1, pull_s=6.25, last_segment_s=0.75, release_s=0.125, num_bytes=157, transport="nixl"
    )
    link = traffic.to_proto("source")
    assert link == worker_pb2.PeerLink(incarnation="source", transport="nixl", num_bytes=157, read_s=6.25, num_reads=3)


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_pull_that_had_nothing_to_read_waited_for_the_release_alone(is_announced: bool) -> None:
    now = Clock()
    pull = PullClock(TransferCounters(), now)
    if is_announced:
        pull.announced()
    now.pass_s(3)
    pull.sealed()
    times = pull.times("none")
    assert times.committed(now() + 2) == HandoffTimings(0, 0, 0, release_s=2, num_bytes=0, transport="none")


def test_reads_at_once_count_as_their_mean() -> None:
    now = Clock()
    pull = PullClock(TransferCounters(), now)
    with pull.reading("grpc", 70):
        now.pass_s(3)
    now.pass_s(9)
    with pull.reading("grpc", 100):
        now.pass_s(2)
        with pull.reading("grpc", 50):
            now.pass_s(4)
    assert list(pull.reads) == [(70, 3), (75, 3)]


def test_a_read_that_fails_took_its_time_and_brought_nothing() -> None:
    now = Clock()
    traffic = TransferCounters()
    pull = PullClock(traffic, now)
    with pytest.raises(ZeroDivisionError), pull.reading("grpc", 100):
        now.pass_s(2)
        raise ZeroDivisionError
    assert (traffic.num_bytes, traffic.num_reads, traffic.reading.total_s) == (0, 0, 2)
    assert not pull.reads


def test_pulls_from_one_peer_at_a_time_share_its_time() -> None:
    now = Clock()
    traffic = TransferCounters()
    with PullClock(traffic, now).reading("grpc", 1):
        now.pass_s(1)
        with PullClock(traffic, now).reading("grpc", 1):
            now.pass_s(1)
    assert (traffic.reading.total_s, traffic.num_reads) == (2, 2)


@pytest.mark.parametrize("handoff", [None, HandoffTimings(0.1, 0.2, 0.3, 0.4, 5, "grpc")])
def test_the_wire_brings_what_was_sent(handoff: HandoffTimings | None) -> None:
    timings = SequenceTimings(0.5, 1.5, handoff)
    message = timings.to_proto(entry=3)
    assert message.entry == 3
    assert SequenceTimings.from_proto(message) == timings


def _set(name: str, value: object) -> Callable[[worker_pb2.SequenceTimings], None]:
    def change(message: worker_pb2.SequenceTimings) -> None:
        holder = message if name in ("queue_s", "compute_s") else message.handoff
        setattr(holder, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("queue_s", -1.0),
        _set("compute_s", float("nan")),
        _set("announce_to_pull_s", float("inf")),
        _set("pull_s", -0.1),
        _set("last_segment_s", float("-inf")),
        _set("release_s", float("nan")),
        _set("transport", "x" * 65),
        _set("transport", "a\nb"),
    ],
)
def test_the_wire_brings_no_nonsense(change: Callable[[worker_pb2.SequenceTimings], None]) -> None:
    message = SequenceTimings(0.5, 1.5, HandoffTimings(0.1, 0.2, 0.3, 0.4, 5, "grpc")).to_proto(0)
    change(message)
    with pytest.raises(InternalError, match="a worker"):
        SequenceTimings.from_proto(message)
