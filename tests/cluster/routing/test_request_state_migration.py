"""One request's state: a running worker request moves to another worker."""

import pytest

from diptych.cluster.routing.actions import (
    OfferSequence,
    Part,
    Submit,
)
from diptych.workers.common.errors import (
    DiptychError,
    InternalError,
    OutOfBlocks,
    RequestAborted,
    SequenceEnded,
    WorkerDraining,
)
from diptych.workers.common.request import FinishReason

from ...support.state_harness import KV_GONE, LOST, UNREACHABLE, StateHarness, split


def migrating() -> StateHarness:
    """A state in which A alone has generated two of six tokens and will hand off to B."""
    harness = StateHarness(max_tokens=6)
    harness.begin(None, "A")
    assert harness.state.movable() is None
    harness.token(1, 0)
    harness.token(1, 1)
    harness.migrate("B")
    return harness


def test_a_running_request_migrates_and_no_token_is_lost() -> None:
    harness = migrating()
    offer, submit = harness.log
    assert isinstance(offer, OfferSequence)
    assert (offer.worker_request.handle, offer.handoff_id) == (1, "move-2")
    assert isinstance(submit, Submit)
    assert (submit.worker_request.part, submit.handoff_id, submit.source) == (Part.DECODE, "move-2", "A")
    assert submit.output_token_ids == (100, 101)
    assert harness.state.movable() is None
    harness.token(1, 2)
    harness.handed_off(1, 3)
    assert harness.told == []
    harness.token(2, 3)
    assert harness.told == [("first", 2), ("forget", 1)]
    moved = harness.state.movable()
    assert moved is not None
    assert moved.worker == "B"
    harness.migrate("A")
    harness.handed_off(2, 4)
    harness.token(3, 4)
    harness.token(3, 5, FinishReason.LENGTH)
    assert harness.told == [("forget", 3)]
    assert harness.taken() == [100 + i for i in range(6)]
    assert (harness.state.num_migrations, harness.state.num_attempts, harness.state.failures.num_attempts) == (2, 1, 0)


def test_the_new_workers_tokens_wait_for_the_last_of_the_old_one() -> None:
    harness = migrating()
    for position in (3, 4, 4):
        harness.token(2, position)
    harness.token(2, 5, FinishReason.LENGTH)
    assert harness.taken() == [100, 101]
    harness.token(1, 2)
    assert harness.taken() == [102, 103, 104, 105]
    assert harness.told == [("forget", 1), ("forget", 2)]


def test_the_new_workers_first_token_says_that_the_old_one_has_handed_off() -> None:
    harness = migrating()
    harness.token(2, 2)
    assert harness.told == [("first", 2), ("forget", 1)]
    harness.handed_off(1, 2)
    harness.failed(1, LOST)
    assert harness.told == []
    assert harness.taken() == [100, 101, 102]


@pytest.mark.parametrize("error", [LOST, KV_GONE, OutOfBlocks("full"), InternalError("a bug there")])
def test_the_new_worker_fails_and_the_old_one_runs_on(error: DiptychError) -> None:
    harness = migrating()
    harness.failed(2, error, handoff=error is KV_GONE)
    assert harness.told == [("forget", 2)]
    assert harness.state.failures.pairs == {("A", "B")}
    assert harness.state.failures.workers == set()
    for position in (2, 3, 4):
        harness.token(1, position)
    harness.token(1, 5, FinishReason.STOP)
    assert harness.taken() == [100 + i for i in range(6)]
    assert harness.told == [("forget", 1)]
    assert (harness.state.failures.num_attempts, harness.state.num_migrations) == (0, 0)


def test_migrations_that_fail_are_bounded() -> None:
    harness = migrating()
    for handle in (2, 3, 4):
        assert harness.state.movable() is None
        harness.failed(handle, LOST)
        if handle < 4:
            harness.migrate(f"B{handle}")
    assert harness.state.movable() is None
    harness.token(1, 2)
    assert harness.taken() == [100, 101, 102]


@pytest.mark.parametrize("error", [WorkerDraining("draining"), SequenceEnded("it finished where it ran")])
def test_a_worker_that_drains_or_a_sequence_that_ends_is_no_failed_migration(error: DiptychError) -> None:
    harness = migrating()
    for handle in range(2, 9):
        harness.failed(handle, error, handoff=isinstance(error, SequenceEnded))
        harness.migrate(f"B{handle}")
    assert harness.state.num_failed_migrations == 0


def test_the_new_worker_fails_after_the_old_one_handed_off() -> None:
    for error, is_handoff in ((LOST, False), (UNREACHABLE, True)):
        harness = migrating()
        harness.handed_off(1, 2)
        harness.failed(2, error, handoff=is_handoff)
        assert harness.told == [("forget", 2), ("choose sink", "A")]
        harness.sink("C")
        (submit,) = harness.log
        assert isinstance(submit, Submit)
        assert (submit.worker_request.worker, submit.handoff_id, submit.output_token_ids) == ("C", "move-2", (100, 101))
        harness.token(3, 2)
        assert harness.told == [("first", 3), ("forget", 1)]
        assert harness.taken() == [100, 101, 102]


def test_the_old_one_hands_off_to_a_worker_that_has_failed() -> None:
    harness = migrating()
    harness.failed(2, LOST)
    harness.token(1, 2)
    harness.handed_off(1, 3)
    assert harness.told == [("choose sink", "A")]
    harness.sink(None)
    assert harness.told == [("abort", 1), ("choose", "")]
    harness = migrating()
    harness.failed(2, KV_GONE, handoff=True)
    harness.handed_off(1, 2)
    assert harness.told == [("abort", 1), ("choose", "")]


def test_the_old_worker_was_sealed_for_an_earlier_offer() -> None:
    """A did not know yet that the first sink had failed, nor of the second offer."""
    harness = migrating()
    harness.failed(2, UNREACHABLE, handoff=True)
    harness.migrate("C")
    assert harness.told[0][0] == "offer"
    harness.token(1, 2)
    harness.handed_off(1, 3, "move-2")
    assert harness.told == [("abort", 3), ("choose sink", "A")]
    harness.sink("D")
    (submit,) = harness.log
    assert isinstance(submit, Submit)
    assert (submit.worker_request.worker, submit.handoff_id) == ("D", "move-2"), "the lease that stands"
    harness.failed(3, KV_GONE, handoff=True)
    harness.token(submit.worker_request.handle, 3)
    assert harness.taken() == [100, 101, 102, 103]
    assert harness.state.error is None


def test_the_earlier_offer_stands_when_the_newer_one_has_failed_too() -> None:
    harness = migrating()
    harness.failed(2, UNREACHABLE, handoff=True)
    harness.migrate("C")
    harness.failed(3, LOST)
    harness.handed_off(1, 2, "move-2")
    assert harness.told == [("choose sink", "A")]


def test_the_new_worker_fails_with_tokens_that_wait() -> None:
    harness = migrating()
    harness.token(2, 3)
    harness.failed(2, LOST)
    assert harness.told == [("forget", 2)]
    harness.token(1, 2)
    assert harness.told == [("forget", 1), ("choose", "")]
    assert harness.taken() == [100, 101, 102, 103]
    harness.begin("P", "D")
    assert isinstance(harness.log[0], Submit)
    assert harness.log[0].output_token_ids == (100, 101, 102, 103)


def test_the_old_worker_is_lost_before_it_handed_off() -> None:
    for early in (False, True):
        harness = migrating()
        if early:
            harness.token(2, 3)
        harness.failed(1, LOST)
        assert harness.told == [("forget", 1), ("abort", 2), ("choose", "")]
        assert harness.taken() == [100, 101]
        assert harness.state.failures.workers == {"A"}


def test_the_old_worker_is_lost_after_it_handed_off() -> None:
    harness = migrating()
    harness.handed_off(1, 2)
    harness.failed(1, LOST)
    assert harness.told == [("forget", 1)]
    harness.token(2, 2)
    assert harness.taken() == [100, 101, 102]
    harness = migrating()
    harness.handed_off(1, 2)
    harness.failed(1, LOST)
    harness.failed(2, UNREACHABLE, handoff=True)
    assert harness.told == [("forget", 2), ("choose", "")]


def test_the_old_worker_finishes_the_request_first() -> None:
    harness = migrating()
    harness.token(1, 2, FinishReason.STOP)
    assert sorted(harness.told) == [("abort", 2), ("forget", 1)]
    assert harness.taken() == [100, 101, 102]


def test_nonsense_about_a_migration_is_an_error() -> None:
    harness = migrating()
    harness.handed_off(1, 3)
    assert isinstance(harness.state.error, InternalError)
    harness = migrating()
    harness.token(2, 3)
    harness.handed_off(1, 2)
    assert isinstance(harness.state.error, InternalError)
    harness = migrating()
    harness.handed_off(1, 2)
    harness.token(1, 2)
    assert isinstance(harness.state.error, InternalError)
    assert {("abort", 1), ("abort", 2)} == set(harness.told)
    harness = migrating()
    harness.handed_off(1, 2, "a hand-off that nobody offered")
    assert isinstance(harness.state.error, InternalError)
    harness = StateHarness()
    harness.begin(None, "A")
    harness.handed_off(1, 0)
    assert isinstance(harness.state.error, InternalError)


def test_a_worker_request_moves_only_while_it_runs_alone() -> None:
    harness = split()
    harness.token(1, 0)
    assert harness.state.movable() is None
    harness.token(2, 1)
    worker_request = harness.state.movable()
    assert worker_request is not None
    assert worker_request.handle == 2
    harness.state.fail(RequestAborted("gone"))
    assert harness.state.movable() is None
