"""The source's state machine, step by step."""

import pytest

from diptych.workers.common.errors import HandoffError, RequestAborted
from diptych.workers.handoff.source_machine import SourceHandoff
from diptych.workers.handoff.types import (
    Aborted,
    Answer,
    CaughtUp,
    EndLease,
    EndStream,
    Refuse,
    Seal,
    SourceState,
    Tell,
)
from diptych.workers.kv.segment import Segment

from ...support.handoff_machines import FIRST, LAST, NUM_LAYERS, SEAL, source


def sealed_source() -> SourceHandoff:
    machine = source()
    assert machine.announce(FIRST, 1.0) == machine.announce(LAST, 1.0) == machine.seal(11, [7], 1.0) == []
    return machine


def test_a_sink_gets_segments_announced_before_and_after_it_subscribed() -> None:
    machine = source()
    assert machine.announce(FIRST, 1.0) == []
    assert machine.subscribe("a", 2.0) == [Tell("a", FIRST)]
    assert machine.announce(LAST, 3.0) == [Tell("a", LAST)]
    assert machine.seal(11, [7], 4.0) == [Tell("a", SEAL)]
    assert machine.release("a", 5.0) == [EndStream("a"), EndLease(), Answer(True)]
    assert machine.state is SourceState.RELEASED


def test_a_seal_says_which_tokens_have_a_drafts_kv_and_which_are_inexact() -> None:
    machine = sealed_source()
    other = source()
    other.announce(FIRST, 1.0)
    other.announce(LAST, 1.0)
    other.seal(11, [7], 1.0, 8, 3)
    assert machine.subscribe("a", 2.0) == [Tell("a", FIRST), Tell("a", LAST), Tell("a", Seal(2, 11, (7,), 0, 0))]
    assert other.subscribe("a", 2.0) == [Tell("a", FIRST), Tell("a", LAST), Tell("a", Seal(2, 11, (7,), 8, 3))]


def test_only_its_own_sink_may_repeat_a_release() -> None:
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


def test_renewals_extend_the_lease_and_an_expired_lease_stays_expired() -> None:
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


def test_a_release_after_the_lease_expired_is_refused() -> None:
    machine = sealed_source()
    machine.subscribe("a", 2.0)
    assert machine.release("a", 12.0)[-2:] == [EndLease(), Answer(False)]


def test_an_offer_without_a_sink_expires() -> None:
    machine = source()
    assert machine.tick(9.9) == []
    assert machine.tick(10.0) == [EndLease()]
    assert isinstance(machine.subscribe("a", 11.0)[0], Refuse)


def test_another_sink_may_subscribe_only_after_the_first_has_left() -> None:
    machine = sealed_source()
    machine.subscribe("a", 2.0)
    [refusal] = machine.subscribe("b", 3.0)
    assert isinstance(refusal, Refuse) and isinstance(refusal.error, HandoffError)
    assert machine.leave("b", 3.0) == []
    assert machine.leave("a", 5.0) == [EndStream("a")]
    assert machine.wake_at == 15.0, "another sink has one lease's time to subscribe"
    assert machine.renew("a", 6.0) == machine.release("a", 6.0) == [Answer(False)]
    assert machine.subscribe("b", 6.0) == [Tell("b", FIRST), Tell("b", LAST), Tell("b", SEAL)]
    assert machine.leave("a", 6.0) == [], "the first sink's stream ends only now"
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


def test_an_abort_informs_the_sink_and_is_idempotent() -> None:
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
    assert not may(0, (5,), (1,), 0, 2, now=11.0), "the lease has expired, although no tick came yet"
    assert not may(0, (5,), (2,), 0, 2), "another generation"
    assert not may(0, (6,), (2,), 0, 2), "another position"
    assert not may(0, (5,), (1,), 0, 3) and not may(0, (5,), (1,), 2, 1), "a layer not announced"
    assert not may(2, (9,), (4,), 0, 2), "a block not announced"
    for malformed in [(0, (), (), 0, 1), (0, (5,), (), 0, 1), (0, (5,), (1,), 0, 0), (0, (5,), (1,), 1, 1 << 31)]:
        assert not may(*malformed)
    machine.abort(RequestAborted("gone"), 3.0)
    assert not may(0, (5,), (1,), 0, 2, now=3.0)


def test_announcing_a_block_twice_or_outside_the_handoff_is_an_error() -> None:
    machine = source()
    machine.announce(FIRST, 1.0)
    for segment in [FIRST, Segment(2, (9, 10), (1, 1), 0, NUM_LAYERS), Segment(2, (9,), (1,), 0, NUM_LAYERS + 1)]:
        with pytest.raises(AssertionError):
            machine.announce(segment, 1.0)
