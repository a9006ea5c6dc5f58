"""The sink's state machine, step by step."""

from dataclasses import replace

import pytest

from diptych.workers.common.errors import DeadlineExceeded, DiptychError, HandoffError, LeaseLost, WorkerLost
from diptych.workers.handoff.sink_machine import SinkHandoff
from diptych.workers.handoff.types import (
    Abandon,
    Begin,
    Commit,
    Fail,
    Offer,
    Release,
    Renew,
    Reserve,
    Seal,
    Settle,
    SinkAction,
    SinkState,
)
from diptych.workers.kv.segment import Read, Segment

from ...support.handoff_machines import FIRST, LAST, NUM_LAYERS, SEAL, sink

TABLE = (30, 31, 32)
BEGIN = Begin(SEAL)


def opened_sink() -> SinkHandoff:
    machine = sink()
    assert machine.opened(Offer(11, 3, 4, 12.0, NUM_LAYERS, NUM_LAYERS), now=0.0) == []
    return machine


def pulled_sink() -> SinkHandoff:
    """Sink machine that has read everything at time 1 and has just sent its release."""
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


def test_layers_of_a_block_may_arrive_in_several_segments() -> None:
    machine = opened_sink()
    for number, layers in enumerate([(2, 1), (0, 2)]):
        machine.announced(Segment(0, (5, 6, 9), (1, 1, 4), *layers), 1.0)
        assert machine.state is SinkState.PULLING, number
    machine.reserved((0, 1, 2), 0, 1.0)
    machine.sealed(SEAL, 1.0)
    assert machine.read_done(0, 1.0) == []
    assert machine.read_done(1, 1.0) == [BEGIN, Release()]


def drafted_sink(*, wants_draft: bool) -> SinkHandoff:
    """Sink machine of a source with a draft, of one layer after two others."""
    machine = sink()
    assert machine.opened(Offer(11, 3, 4, 12.0, 3, 2, wants_draft, is_live=True), now=0.0) == []
    return machine


TARGET = Segment(0, (5, 6, 9), (1, 1, 4), 0, 2)
DRAFT = Segment(0, (5, 6), (1, 1), 2, 1)


def test_layers_of_a_draft_that_is_not_wanted_are_not_read_and_count_as_read() -> None:
    machine = drafted_sink(wants_draft=False)
    assert machine.announced(DRAFT, 1.0) == [Reserve(11)]
    assert machine.reserved(TABLE, 0, 1.0) == [Renew(1)], "the source is told that they are read"
    assert machine.announced(TARGET, 1.0) == [Read(1, TARGET, TABLE, 0)]
    assert machine.read_done(1, 1.0) == [Renew(2)]
    none = Seal(3, 11, (7,))
    assert machine.announced(Segment(2, (9,), (4,), 2, 1), 1.0) == [Renew(3)]
    assert machine.sealed(Seal(3, 11, (7,), 9), 2.0) == [Begin(none), Release()]
    assert machine.released(True, 3.0) == [Commit(none)]


def test_layers_of_a_draft_that_is_wanted_are_read_as_far_as_they_count() -> None:
    machine = drafted_sink(wants_draft=True)
    machine.announced(TARGET, 1.0)
    machine.reserved(TABLE, 0, 1.0)
    assert machine.announced(DRAFT, 1.0) == [Read(1, DRAFT, TABLE, 0)]
    machine.read_done(0, 1.0)
    seal = Seal(2, 11, (7,), 8)
    assert machine.sealed(seal, 2.0) == [], "the draft's layers are not read yet"
    assert machine.read_done(1, 2.0) == [Begin(seal), Release()]
    machine = drafted_sink(wants_draft=True)
    machine.announced(TARGET, 1.0)
    machine.announced(DRAFT, 1.0)
    assert "before every block" in the_error(machine.sealed(Seal(2, 11, (7,), 9), 2.0)).message
    machine = drafted_sink(wants_draft=True)
    machine.announced(TARGET, 1.0)
    assert machine.sealed(Seal(1, 11, (7,), 0), 2.0) == []
    machine = drafted_sink(wants_draft=False)
    machine.announced(replace(TARGET, num_layers=1), 1.0)
    machine.announced(DRAFT, 1.0)
    assert "before every block" in the_error(machine.sealed(Seal(2, 11, (7,), 0), 2.0)).message


@pytest.mark.parametrize("wants_draft", [False, True])
def test_a_segment_of_the_targets_and_the_drafts_layers_is_refused(wants_draft: bool) -> None:
    for first, num in ((0, 3), (1, 2)):
        error = the_error(drafted_sink(wants_draft=wants_draft).announced(Segment(0, (5,), (1,), first, num), 1.0))
        assert "broke the protocol: a segment of layers on both sides of layer 2" in error.message


@pytest.mark.parametrize("wants_draft", [False, True])
@pytest.mark.parametrize("num_draft", [12, 1 << 31, -1])
def test_more_tokens_of_the_draft_than_of_the_target_are_refused(wants_draft: bool, num_draft: int) -> None:
    machine = drafted_sink(wants_draft=wants_draft)
    machine.announced(TARGET, 1.0)
    machine.announced(replace(DRAFT, block_ids=(5, 6, 9), generations=(1, 1, 4)), 1.0)
    error = the_error(machine.sealed(Seal(2, 11, (7,), num_draft), 2.0))
    assert isinstance(error, HandoffError)
    assert f"{num_draft} tokens sealed with a draft's KV, of 11 with KV" in error.message


def test_the_lease_is_renewed_in_time_and_a_silent_source_counts_as_lost() -> None:
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


def test_a_release_is_repeated_until_the_source_counts_as_lost() -> None:
    machine = pulled_sink()
    assert machine.tick(3.0) == [Release()]
    assert machine.renewed(False, 4.0) == [], "the answer to a renewal that was sent before the release"
    assert isinstance(the_error(machine.tick(9.0)), WorkerLost)


def test_a_prefix_does_not_begin_before_its_release_is_answered() -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.announced(LAST, 1.0)
    machine.sealed(Seal(2, 11, ()), 1.0)
    assert machine.reserved(TABLE, 12, 1.0) == [Release()]
    assert machine.released(True, 2.0) == [Commit(Seal(2, 11, ()))]


def test_a_sequence_that_computes_provisionally_can_still_fail() -> None:
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


def test_the_end_of_the_sources_stream_fails_the_pull_unless_a_release_is_pending() -> None:
    assert the_error(opened_sink().stream_ended(1.0))
    machine = pulled_sink()
    assert machine.stream_ended(1.0) == []
    assert machine.released(True, 1.0) == [Commit(SEAL)]


def test_failure_frees_or_quarantines() -> None:
    error = HandoffError("x")
    assert sink().failed(error, 1.0) == [Fail(error, quarantine=False)], "there is no source to inform yet"
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
        Offer(0, 0, 4, 12.0, NUM_LAYERS, NUM_LAYERS),
        Offer(11, 2, 4, 12.0, NUM_LAYERS, NUM_LAYERS),
        Offer(11, 4, 4, 12.0, NUM_LAYERS, NUM_LAYERS),
        Offer(11, 3, 0, 12.0, NUM_LAYERS, NUM_LAYERS),
        Offer(11, 3, 4, 0.0, NUM_LAYERS, NUM_LAYERS),
        Offer(11, 3, 4, float("nan"), NUM_LAYERS, NUM_LAYERS),
        Offer(11, 3, 4, float("inf"), NUM_LAYERS, NUM_LAYERS),
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


@pytest.mark.parametrize("seal", [Seal(3, 11, (7,)), Seal(2, 0, (7,)), Seal(2, 13, (7,)), Seal(2, 11, (7,), 0, 12)])
def test_a_malformed_seal_is_refused(seal: Seal) -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.announced(LAST, 1.0)
    assert "broke the protocol" in the_error(machine.sealed(seal, 1.0)).message


def test_a_source_of_full_blocks_alone_may_seal_none() -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.announced(LAST, 1.0)
    assert machine.sealed(Seal(2, 0, (7,), multiple=4), 1.0) == []


def test_a_source_of_full_blocks_alone_may_announce_none() -> None:
    """Of a sequence that is shorter than a block: its blocks are reserved, and nothing is read."""
    machine, seal = opened_sink(), Seal(0, 0, (7,), multiple=4)
    assert machine.sealed(seal, 1.0) == [Reserve(11)] and machine.state is SinkState.PULLING
    assert machine.reserved(TABLE, 0, 1.5) == [Begin(seal), Release()]
    assert machine.released(held=True, now=2.0) == [Commit(seal)]


@pytest.mark.parametrize(("multiple", "num_used"), [(4, 2), (8, 2), (12, 0), (5, 3)])
def test_a_sink_of_full_blocks_alone_reads_what_these_need(multiple: int, num_used: int) -> None:
    """Of 11 tokens in blocks of 4 at the source: 10 of them, in two blocks of 5 of ours, are in three of its."""
    machine = sink()
    machine.opened(Offer(11, 3, 4, 12.0, NUM_LAYERS, NUM_LAYERS, used_multiple=multiple), now=0.0)
    assert machine.announced(FIRST, 1.0) == [Reserve(11)]
    reads = machine.reserved(TABLE, 0, 1.0) + machine.announced(LAST, 1.0)
    due = [Read(0, FIRST, TABLE, 0), Read(1, LAST, TABLE, 0)]
    assert reads == due[: -(-num_used // 2)]
    ended = machine.sealed(SEAL, 2.0)
    for read in reads:
        assert isinstance(read, Read) and not ended
        ended = machine.read_done(read.number, 3.0)
    assert ended == [BEGIN, Release()] and machine.released(held=True, now=4.0) == [Commit(SEAL)]


def test_a_segment_is_read_as_far_as_it_is_of_use() -> None:
    machine, segment = sink(), Segment(0, (5, 6, 9), (1, 1, 4), 0, NUM_LAYERS, bytes(range(48)))
    machine.opened(Offer(11, 3, 4, 12.0, NUM_LAYERS, NUM_LAYERS, used_multiple=8), now=0.0)
    machine.announced(segment, 1.0)
    used = Segment(1, (6,), (1,), 0, NUM_LAYERS, bytes(range(16, 32)))
    assert machine.reserved(TABLE, 4, 1.0) == [Read(0, used, TABLE, 4)]


def test_a_seal_before_every_layer_of_every_block_is_refused() -> None:
    machine = opened_sink()
    machine.announced(FIRST, 1.0)
    machine.announced(Segment(2, (9,), (4,), 0, 2), 1.0)
    assert "before every block" in the_error(machine.sealed(SEAL, 1.0)).message
