"""The two machines of a hand-off, step by step."""

import pytest

from diptych.workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    HandoffError,
    LeaseLost,
    RequestAborted,
    WorkerLost,
)
from diptych.workers.handoff.sink_machine import SinkHandoff
from diptych.workers.handoff.source_machine import SourceHandoff
from diptych.workers.handoff.types import (
    Abandon,
    Aborted,
    Answer,
    Begin,
    CaughtUp,
    Commit,
    EndLease,
    EndStream,
    Fail,
    Offer,
    Refuse,
    Release,
    Renew,
    Reserve,
    Seal,
    Settle,
    SinkAction,
    SinkState,
    SourceState,
    Tell,
)
from diptych.workers.kv.segment import Read, Segment

NUM_LAYERS = 3
FIRST = Segment(0, (5, 6), (1, 1), 0, NUM_LAYERS)
LAST = Segment(2, (9,), (4,), 0, NUM_LAYERS)
SEAL = Seal(2, 11, (7,))
TABLE = (30, 31, 32)
BEGIN = Begin(SEAL)


def source() -> SourceHandoff:
    """Of 3 blocks, leased for 10 s at time 0."""
    return SourceHandoff(num_blocks=3, num_layers=NUM_LAYERS, lease_s=10.0, now=0.0)


def sealed_source() -> SourceHandoff:
    machine = source()
    assert machine.announce(FIRST, 1.0) == machine.announce(LAST, 1.0) == machine.seal(11, [7], 1.0) == []
    return machine


def sink() -> SinkHandoff:
    return SinkHandoff(num_layers=NUM_LAYERS, deadline=100.0, open_by=8.0)


def opened_sink() -> SinkHandoff:
    machine = sink()
    assert machine.opened(Offer(11, 3, 4, 12.0), now=0.0) == []
    return machine


def pulled_sink() -> SinkHandoff:
    """Everything read at time 1; the release was just sent."""
    machine = opened_sink()
    assert machine.announced(FIRST, 1.0) == [Reserve(11)]
    machine.reserved((0, 1, 2), 0, 1.0)
    machine.announced(LAST, 1.0)
    machine.sealed(SEAL, 1.0)
    assert machine.read_done(0, 1.0) == []
    assert machine.read_done(1, 1.0) == [BEGIN, Release()]
    return machine


def the_error(actions: list[SinkAction]) -> DiptychError:
    assert isinstance(actions[0], Fail)
    return actions[0].error


# The source


def test_a_sink_hears_what_was_announced_before_and_after_it_came() -> None:
    machine = source()
    assert machine.announce(FIRST, 1.0) == []
    assert machine.subscribe("a", 2.0) == [Tell("a", FIRST)]
    assert machine.announce(LAST, 3.0) == [Tell("a", LAST)]
    assert machine.seal(11, [7], 4.0) == [Tell("a", SEAL)]
    assert machine.release("a", 5.0) == [EndStream("a"), EndLease(), Answer(True)]
    assert machine.state is SourceState.RELEASED


def test_a_release_may_be_asked_again_by_its_sink_alone() -> None:
    machine = sealed_source()
    machine.subscribe("a", 2.0)
    machine.release("a", 3.0)
    assert machine.release("a", 300.0) == [Answer(True)]
    assert machine.release("b", 300.0) == [Answer(False)]


def test_a_release_before_the_seal_is_refused_and_changes_nothing() -> None:
    machine = source()
    machine.subscribe("a", 1.0)
    assert machine.release("a", 2.0) == [Answer(False)]
    assert machine.state is SourceState.OPEN


def test_renewals_move_the_deadline_and_a_lapse_is_final() -> None:
    machine = sealed_source()
    machine.subscribe("a", 2.0)
    assert machine.wake_at == 12.0
    assert machine.renew("a", 11.0) == [Answer(True)]
    assert machine.wake_at == 21.0
    lapse = Tell("a", Aborted("LeaseLost", "the lease of 10 s was not renewed in time"))
    assert machine.renew("a", 21.0) == [lapse, EndStream("a"), EndLease(), Answer(False)]
    assert machine.state is SourceState.EXPIRED
    assert machine.release("a", 21.0) == [Answer(False)]
    assert machine.tick(99.0) == machine.abort(RequestAborted("x"), 99.0) == machine.announce(LAST, 99.0) == []


def test_the_lapse_counts_even_if_the_release_is_the_first_to_come_after_it() -> None:
    machine = sealed_source()
    machine.subscribe("a", 2.0)
    assert machine.release("a", 12.0)[-2:] == [EndLease(), Answer(False)]


def test_an_offer_that_no_sink_takes_expires() -> None:
    machine = source()
    assert machine.tick(9.9) == []
    assert machine.tick(10.0) == [EndLease()]
    assert isinstance(machine.subscribe("a", 11.0)[0], Refuse)


def test_one_sink_at_a_time_and_another_once_it_left() -> None:
    machine = sealed_source()
    machine.subscribe("a", 2.0)
    [refusal] = machine.subscribe("b", 3.0)
    assert isinstance(refusal, Refuse) and isinstance(refusal.error, HandoffError)
    assert machine.leave("b", 3.0) == []
    assert machine.leave("a", 5.0) == [EndStream("a")]
    assert machine.wake_at == 15.0, "a lease's time for another to come"
    assert machine.renew("a", 6.0) == machine.release("a", 6.0) == [Answer(False)]
    assert machine.subscribe("b", 6.0) == [Tell("b", FIRST), Tell("b", LAST), Tell("b", SEAL)]
    assert machine.leave("a", 6.0) == [], "the first one's stream ends only now"
    assert machine.release("b", 7.0)[-1] == Answer(True)


def test_a_running_sequences_handoff_ends_with_its_sink_until_it_is_sealed() -> None:
    def live() -> SourceHandoff:
        machine = SourceHandoff(num_blocks=3, num_layers=NUM_LAYERS, lease_s=10.0, now=0.0, is_live=True)
        machine.announce(FIRST, 1.0)
        machine.subscribe("a", 1.0)
        return machine

    machine = live()
    assert machine.renew("a", 2.0, 0) == [Answer(True)]
    assert machine.renew("a", 2.0, 1) == [CaughtUp(), Answer(True)]
    assert machine.leave("a", 2.0) == [EndStream("a"), EndLease()]
    assert machine.state is SourceState.ABORTED
    assert machine.leave("a", 2.0) == []
    machine = live()
    machine.announce(LAST, 2.0)
    machine.seal(11, [7], 2.0)
    assert machine.leave("a", 2.0) == [EndStream("a")]
    assert machine.state is SourceState.SEALED


def test_a_prefixs_handoff_ends_with_its_sink() -> None:
    machine = SourceHandoff(num_blocks=3, num_layers=NUM_LAYERS, lease_s=10.0, now=0.0, prefix=True)
    machine.announce(FIRST, 0.0)
    machine.announce(LAST, 0.0)
    machine.seal(11, [], 0.0)
    machine.subscribe("a", 1.0)
    assert machine.leave("b", 2.0) == []
    assert machine.leave("a", 2.0) == [EndStream("a"), EndLease()]
    assert machine.state is SourceState.ABORTED
    assert machine.release("a", 2.0) == [Answer(False)]


def test_an_abort_tells_the_sink_and_is_idempotent() -> None:
    machine = source()
    machine.subscribe("a", 1.0)
    assert machine.abort(RequestAborted("gone"), 2.0) == [
        Tell("a", Aborted("RequestAborted", "gone")),
        EndStream("a"),
        EndLease(),
    ]
    assert machine.abort(RequestAborted("gone"), 2.0) == []
    assert machine.seal(11, [7], 3.0) == []


def test_reads_are_granted_for_announced_blocks_of_this_generation_to_its_sink_only() -> None:
    machine = source()
    machine.announce(Segment(0, (5, 6), (1, 2), 0, 2), 1.0)
    machine.subscribe("a", 1.0)

    def may(*segment: object, by: str = "a", now: float = 2.0) -> bool:
        return machine.may_read(by, Segment(*segment), now)  # type: ignore[arg-type]

    assert may(0, (5, 6), (1, 2), 0, 2) and may(1, (6,), (2,), 1, 1)
    assert not may(0, (5,), (1,), 0, 2, by="b")
    assert not may(0, (5,), (1,), 0, 2, now=11.0), "the lease lapsed, though no tick came yet"
    assert not may(0, (5,), (2,), 0, 2), "another generation"
    assert not may(0, (6,), (2,), 0, 2), "another position"
    assert not may(0, (5,), (1,), 0, 3) and not may(0, (5,), (1,), 2, 1), "a layer not announced"
    assert not may(2, (9,), (4,), 0, 2), "a block not announced"
    for malformed in [(0, (), (), 0, 1), (0, (5,), (), 0, 1), (0, (5,), (1,), 0, 0), (0, (5,), (1,), 1, 1 << 31)]:
        assert not may(*malformed)
    machine.abort(RequestAborted("gone"), 3.0)
    assert not may(0, (5,), (1,), 0, 2, now=3.0)


def test_the_engine_may_not_announce_twice_nor_outside() -> None:
    machine = source()
    machine.announce(FIRST, 1.0)
    for segment in [FIRST, Segment(2, (9, 10), (1, 1), 0, NUM_LAYERS), Segment(2, (9,), (1,), 0, NUM_LAYERS + 1)]:
        with pytest.raises(AssertionError):
            machine.announce(segment, 1.0)


# The sink


def test_a_pull_from_its_opening_to_its_commit() -> None:
    machine = opened_sink()
    assert machine.state is SinkState.WAITING
    assert machine.announced(FIRST, 1.0) == [Reserve(11)]
    assert machine.state is SinkState.PULLING
    assert machine.announced(LAST, 2.0) == []
    assert machine.reserved(TABLE, 0, 3.0) == [Read(0, FIRST, TABLE, 0), Read(1, LAST, TABLE, 0)]
    assert machine.read_done(1, 3.5) == machine.sealed(SEAL, 4.0) == []
    assert machine.read_done(0, 4.5) == [BEGIN, Release()]
    assert machine.state is SinkState.PULLED
    assert machine.released(True, 5.0) == [Commit(SEAL)]
    assert machine.state is SinkState.COMMITTED and machine.wake_at is None


def test_blocks_that_the_prefix_cache_holds_are_not_read() -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    assert machine.reserved(TABLE, 4, 1.0) == [Read(0, Segment(1, (6,), (1,), 0, NUM_LAYERS), TABLE, 4)]
    assert machine.announced(LAST, 1.0) == [Read(1, LAST, TABLE, 4)]
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.announced(LAST, 1.0)
    machine.sealed(SEAL, 1.0)
    assert machine.reserved(TABLE, 12, 1.0) == [BEGIN, Release()], "nothing to read"


def test_layers_may_come_apart() -> None:
    machine = opened_sink()
    for number, layers in enumerate([(2, 1), (0, 2)]):
        machine.announced(Segment(0, (5, 6, 9), (1, 1, 4), *layers), 1.0)
        assert machine.state is SinkState.PULLING, number
    machine.reserved((0, 1, 2), 0, 1.0)
    machine.sealed(SEAL, 1.0)
    assert machine.read_done(0, 1.0) == []
    assert machine.read_done(1, 1.0) == [BEGIN, Release()]


def test_the_lease_is_renewed_in_time_and_silence_noticed() -> None:
    machine = opened_sink()  # a lease of 12 s
    assert machine.wake_at == 4.0
    assert machine.tick(3.9) == []
    assert machine.tick(4.0) == [Renew(0)]
    assert machine.wake_at == 6.0 and machine.tick(6.0) == [Renew(0)], "asked again"
    assert machine.renewed(True, 7.0) == []
    assert machine.wake_at == 11.0
    machine.tick(11.0)
    machine.tick(13.0)
    error = the_error(machine.tick(15.0))
    assert isinstance(error, WorkerLost) and "silent" in error.message


def test_a_release_is_asked_again_until_silence_is_certain() -> None:
    machine = pulled_sink()
    assert machine.tick(3.0) == [Release()]
    assert machine.renewed(False, 4.0) == [], "a renewal that the release overtook"
    assert isinstance(the_error(machine.tick(9.0)), WorkerLost)


def test_a_prefix_does_not_begin_before_its_release_is_answered() -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.announced(LAST, 1.0)
    machine.sealed(Seal(2, 11, ()), 1.0)
    assert machine.reserved(TABLE, 12, 1.0) == [Release()]
    assert machine.released(True, 2.0) == [Commit(Seal(2, 11, ()))]


def test_what_has_begun_fails_like_anything_else() -> None:
    error = HandoffError("x")
    ends = [
        pulled_sink().released(False, 2.0),
        pulled_sink().failed(error, 2.0),
        pulled_sink().tick(9.0),
        pulled_sink().tick(100.0),
    ]
    assert [type(end) for actions in ends for end in actions] == [Fail, Abandon] * 4
    assert not any(fail.quarantine for fail, _ in ends if isinstance(fail, Fail)), "every read is done"


def test_a_lost_lease_is_never_committed() -> None:
    assert isinstance(the_error(pulled_sink().released(False, 2.0)), LeaseLost)
    machine = opened_sink()
    assert isinstance(the_error(machine.renewed(False, 2.0)), LeaseLost)
    assert machine.released(True, 2.0) == []


def test_every_state_has_its_deadline() -> None:
    assert isinstance(the_error(sink().tick(8.0)), WorkerLost), "never answered"
    for machine in (opened_sink(), pulled_sink()):
        assert machine.wake_at is not None and machine.wake_at < 100.0
        assert isinstance(the_error(machine.tick(100.0)), DeadlineExceeded)


def test_the_source_hanging_up_is_the_end_unless_the_release_is_under_way() -> None:
    assert the_error(opened_sink().stream_ended(1.0))
    machine = pulled_sink()
    assert machine.stream_ended(1.0) == []
    assert machine.released(True, 1.0) == [Commit(SEAL)]


def test_failure_frees_or_quarantines() -> None:
    error = HandoffError("x")
    assert sink().failed(error, 1.0) == [Fail(error, quarantine=False)], "nobody to tell yet"
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    assert machine.failed(error, 1.0) == [Fail(error, quarantine=False), Abandon()]
    assert machine.reserved((0, 1, 2), 0, 1.0) == machine.failed(error, 1.0) == [], "once"
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.reserved((0, 1, 2), 0, 1.0)
    assert machine.failed(error, 1.0) == [Fail(error, quarantine=True), Abandon()], "a read is under way"
    assert machine.read_done(0, 2.0) == []
    assert machine.settled() == [Settle()]


@pytest.mark.parametrize("may_still_land", [False, True])
def test_a_failed_read_quarantines_only_if_it_may_still_land(may_still_land: bool) -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.reserved((0, 1, 2), 0, 1.0)
    error = HandoffError("x")
    actions = machine.read_failed(0, error, 2.0, may_still_land=may_still_land)
    assert actions == [Fail(error, quarantine=may_still_land), Abandon()]


@pytest.mark.parametrize(
    "opening",
    [
        Offer(0, 0, 4, 12.0),
        Offer(11, 2, 4, 12.0),
        Offer(11, 4, 4, 12.0),
        Offer(11, 3, 0, 12.0),
        Offer(11, 3, 4, 0.0),
        Offer(11, 3, 4, float("nan")),
        Offer(11, 3, 4, float("inf")),
    ],
)
def test_a_malformed_opening_is_refused(opening: Offer) -> None:
    assert "broke the protocol" in the_error(sink().opened(opening, now=0.0)).message


@pytest.mark.parametrize(
    "segment",
    [
        Segment(0, (), (), 0, 3),
        Segment(0, (5,), (), 0, 3),
        Segment(2, (5, 6), (1, 1), 0, 3),
        Segment(1 << 31, (5,), (1,), 0, 3),
        Segment(0, (5,), (1,), 0, 0),
        Segment(0, (5,), (1,), 1, 3),
        Segment(0, (5,), (1,), 0, 1 << 31),
        FIRST,
    ],
)
def test_a_malformed_segment_is_refused(segment: Segment) -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    assert "broke the protocol" in the_error(machine.announced(segment, 1.0)).message


@pytest.mark.parametrize("seal", [Seal(3, 11, (7,)), Seal(2, 0, (7,)), Seal(2, 13, (7,))])
def test_a_malformed_seal_is_refused(seal: Seal) -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.announced(LAST, 1.0)
    assert "broke the protocol" in the_error(machine.sealed(seal, 1.0)).message


def test_a_seal_before_every_layer_of_every_block_is_refused() -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.announced(Segment(2, (9,), (4,), 0, 2), 1.0)
    assert "before every block" in the_error(machine.sealed(SEAL, 1.0)).message
