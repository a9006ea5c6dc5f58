"""One request's state machine: every order of events that we could name. Those that we could not: see
test_record_in_any_order.py."""

import itertools
from collections.abc import Iterator

import pytest

from diptych.cluster.routing.generation import TokenLogprob
from diptych.cluster.routing.legs import (
    Abort,
    Action,
    Choose,
    ChooseSink,
    LegToken,
    Offer,
    OfferPrefix,
    Part,
    PrefixPull,
    Submit,
)
from diptych.cluster.routing.policy import PrefixSource, Route
from diptych.cluster.routing.request_record import RequestRecord
from diptych.workers.common.errors import (
    DeadlineExceeded,
    DiptychError,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    LeaseLost,
    OutOfBlocks,
    RequestAborted,
    SequenceEnded,
    TransportError,
    Unavailable,
    WorkerDraining,
    WorkerLost,
)
from diptych.workers.common.request import FinishReason, Request, SamplingParams

LOST = WorkerLost("lost")
KV_GONE = LeaseLost("the lease lapsed")
UNREACHABLE = TransportError("the pull failed")


class Driver:
    """A record with handles 1, 2, ..; `log` holds the actions of the last event."""

    def __init__(self, max_tokens: int = 4, max_attempts: int = 3, logprobs: int | None = None) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
        self.record = RequestRecord(Request("request", (1, 2, 3), sampling, timeout_s=60.0), max_attempts)
        self.handles: Iterator[int] = itertools.count(1)
        self.log: list[Action] = []

    def begin(self, prefill: str | None, decode: str) -> None:
        self.log = list(self.record.begin(Route(prefill, decode), "secret", self.handles))

    def token(self, handle: int, position: int, finish: FinishReason | None = None) -> None:
        self.log = list(self.record.token(handle, LegToken(position, 100 + position, finish)))

    def failed(self, handle: int, error: DiptychError, handoff: bool = False) -> None:
        self.log = list(self.record.failed(handle, error, handoff=handoff))

    def migrate(self, worker: str) -> None:
        handle = next(self.handles)
        self.handles = itertools.chain([handle], self.handles)
        self.log = list(self.record.migrate(worker, f"move-{handle}", self.handles))

    def handed_off(self, handle: int, num_output_tokens: int, handoff_id: str = "") -> None:
        """By default for the newest offer."""
        offered = [offer for leg in self.record.legs() for offer in leg.offers]
        newest = handoff_id or (offered[-1] if offered else "never")
        self.log = list(self.record.handed_off(handle, num_output_tokens, newest))

    def sink(self, worker: str | None) -> None:
        self.log = list(self.record.begin_sink(worker, self.handles))

    @property
    def told(self) -> list[tuple[str, int | str]]:
        """The last event's actions in short."""
        short: list[tuple[str, int | str]] = []
        for action in self.log:
            match action:
                case Choose():
                    short.append(("choose", ""))
                case ChooseSink():
                    short.append(("choose sink", action.source))
                case OfferPrefix():
                    short.append(("offer prefix", action.worker))
                case _:
                    short.append((type(action).__name__.lower(), action.leg.handle))
        return short

    def taken(self) -> list[int]:
        delta = self.record.take()
        return list(delta.token_ids) if delta else []


def split() -> Driver:
    driver = Driver()
    driver.begin("P", "D")
    return driver


def test_one_worker_alone() -> None:
    driver = Driver(max_tokens=2)
    driver.begin(None, "W")
    (submit,) = driver.log
    assert isinstance(submit, Submit)
    assert (submit.leg.worker, submit.leg.part, submit.handoff_id, submit.source) == ("W", Part.ALONE, None, None)
    driver.token(1, 0)
    assert driver.told == [("spoke", 1)]
    assert driver.taken() == [100]
    driver.token(1, 1, FinishReason.LENGTH)
    assert driver.told == [("forget", 1)]
    delta = driver.record.take()
    assert delta is not None
    assert (delta.token_ids, delta.finish_reason) == ((101,), FinishReason.LENGTH)
    assert driver.record.take() is None


def test_two_workers_share_a_hand_off_and_the_tokens_merge() -> None:
    driver = split()
    source, sink = driver.log
    assert isinstance(source, Submit)
    assert isinstance(sink, Submit)
    assert (source.leg.part, source.handoff_id, source.source) == (Part.PREFILL, "secret", None)
    assert (sink.leg.part, sink.handoff_id, sink.source) == (Part.DECODE, "secret", "P")
    driver.token(1, 0)
    assert driver.told == [("spoke", 1)]
    for position in (1, 2):
        driver.token(2, position)
        assert driver.told == ([("spoke", 2), ("forget", 1)] if position == 1 else [])
    driver.token(2, 3, FinishReason.LENGTH)
    assert driver.told == [("forget", 2)]


def test_decode_tokens_that_overtake_the_first_wait_for_it() -> None:
    driver = split()
    for position in (1, 2):
        driver.token(2, position)
    driver.token(2, 3, FinishReason.LENGTH)
    assert driver.taken() == []
    driver.token(1, 0)
    assert driver.taken() == [100, 101, 102, 103]
    assert driver.record.finish is FinishReason.LENGTH


def test_a_request_that_ends_with_its_first_token_stops_the_sink() -> None:
    driver = split()
    driver.token(1, 0, FinishReason.STOP)
    assert ("abort", 2) in driver.told
    assert ("forget", 1) in driver.told
    assert driver.record.finish is FinishReason.STOP


def test_a_sink_told_of_the_end_before_we_are() -> None:
    """The source finishes with its first token: the sink hears of it first, and fails."""
    driver = split()
    driver.failed(2, RequestAborted("the sequence finished with its first token"), handoff=True)
    assert driver.told == [("forget", 2)]
    driver.token(1, 0, FinishReason.STOP)
    assert driver.told == [("spoke", 1), ("forget", 1)]
    assert driver.record.finish is FinishReason.STOP


def test_duplicates_and_late_tokens_are_dropped() -> None:
    driver = split()
    driver.token(1, 0)
    driver.token(1, 0)
    driver.token(2, 0)
    driver.token(2, 1)
    driver.token(2, 1)
    driver.token(77, 2)
    assert driver.taken() == [100, 101]
    assert driver.record.error is None


@pytest.mark.parametrize(
    ("handle", "position", "before"), [(2, 2, [(1, 0)]), (2, 2, []), (1, 1, []), (2, 4, [(1, 0), (2, 1)])]
)
def test_a_gap_is_an_error_and_never_a_wrong_answer(handle: int, position: int, before: list[tuple[int, int]]) -> None:
    driver = split()
    for given in before:
        driver.token(*given)
    driver.token(handle, position)
    assert isinstance(driver.record.error, InternalError)
    assert ("abort", 2) in driver.told
    assert (("abort", 1) in driver.told) == (len(before) < 2)


def test_more_tokens_than_asked_for_are_an_error() -> None:
    driver = Driver(max_tokens=1)
    driver.begin(None, "W")
    driver.token(1, 0)
    assert isinstance(driver.record.error, InternalError)
    assert ("abort", 1) in driver.told


def test_prefill_lost_before_its_token() -> None:
    driver = split()
    driver.token(2, 1)  # it overtook; it will come again
    driver.failed(1, LOST)
    assert driver.told == [("forget", 1), ("abort", 2), ("choose", "")]
    assert driver.record.excluded == {"P"}
    driver.begin("P2", "D")
    assert isinstance(driver.log[0], Submit)
    assert driver.log[0].output_token_ids == ()
    driver.token(3, 0)
    driver.token(4, 1)
    assert driver.taken() == [100, 101]


def test_prefill_lost_after_its_token_is_the_decode_workers_affair() -> None:
    driver = split()
    driver.token(1, 0)
    driver.failed(1, LOST)
    assert driver.told == [("forget", 1)]
    driver.token(2, 1)
    assert driver.taken() == [100, 101]


def test_hand_off_failed_after_the_first_token_resumes_after_it() -> None:
    driver = split()
    driver.token(1, 0)
    driver.failed(2, KV_GONE, handoff=True)
    assert driver.told == [("forget", 2), ("abort", 1), ("choose", "")]
    driver.begin(None, "P")
    assert isinstance(driver.log[0], Submit)
    assert driver.log[0].output_token_ids == (100,)
    driver.token(3, 1)
    assert driver.taken() == [100, 101]


def test_hand_off_failed_before_the_first_token_waits_for_it() -> None:
    driver = split()
    driver.failed(2, KV_GONE, handoff=True)
    assert driver.told == [("forget", 2)]
    driver.token(1, 0)
    assert driver.told == [("spoke", 1), ("abort", 1), ("choose", "")]
    assert driver.taken() == [100]


def test_hand_off_failed_and_then_prefill_too() -> None:
    driver = split()
    driver.failed(2, KV_GONE, handoff=True)
    driver.failed(1, LOST)
    assert driver.told == [("forget", 1), ("choose", "")]
    assert driver.record.excluded == {"P", "D"}
    assert driver.record.num_failures == 1
    driver.begin("P2", "D2")
    driver.token(3, 0)
    assert driver.told == [("spoke", 3)]  # what failed before is forgotten


def test_a_sink_lost_before_it_pulled_is_replaced_at_the_same_offer() -> None:
    for first_is_here in (False, True):
        driver = split()
        if first_is_here:
            driver.token(1, 0)
        driver.failed(2, LOST)
        assert driver.told == [("forget", 2), ("choose sink", "P")]
        driver.sink("D2")
        (submit,) = driver.log
        assert isinstance(submit, Submit)
        assert (submit.leg.worker, submit.handoff_id, submit.source) == ("D2", "secret", "P")
        assert submit.output_token_ids == ()  # as they were when the offer was made
        if not first_is_here:
            driver.token(1, 0)
        driver.token(3, 1)
        assert driver.taken() == [100, 101]
        assert driver.record.num_failures == 0


def test_only_one_more_sink_is_sent_to_an_offer() -> None:
    driver = split()
    driver.token(1, 0)
    driver.failed(2, OutOfBlocks("full"))
    driver.sink("D2")
    driver.failed(3, LOST)
    assert driver.told == [("forget", 3), ("abort", 1), ("choose", "")]


def test_sinks_that_drain_may_be_replaced_as_often_as_there_are_others() -> None:
    driver = split()
    for handle in (2, 3, 4):
        driver.failed(handle, WorkerDraining("draining"))
        assert driver.told[-1] == ("choose sink", "P")
        driver.sink(f"D{handle}")
    assert driver.record.num_failures == 0


def test_no_other_sink() -> None:
    driver = split()
    driver.failed(2, LOST)
    driver.sink(None)
    assert driver.told == []  # the first token is on its way
    driver.token(1, 0)
    assert driver.told == [("spoke", 1), ("abort", 1), ("choose", "")]
    driver = split()
    driver.token(1, 0)
    driver.failed(2, LOST)
    driver.sink(None)
    assert driver.told == [("abort", 1), ("choose", "")]


def test_decode_lost_in_the_middle() -> None:
    driver = split()
    driver.token(1, 0)
    driver.token(2, 1)
    driver.failed(2, LOST)
    assert driver.told == [("forget", 2), ("choose", "")]
    driver.begin("P", "D2")
    assert [s.output_token_ids for s in driver.log if isinstance(s, Submit)] == [(100, 101)] * 2
    driver.token(3, 2)
    driver.token(4, 3, FinishReason.LENGTH)
    assert driver.taken() == [100, 101, 102, 103]
    assert driver.record.num_attempts == 2


def test_decode_lost_after_it_overtook_loses_nothing() -> None:
    driver = split()
    driver.token(2, 1)
    driver.failed(2, LOST)
    assert driver.told == [("forget", 2)]
    driver.token(1, 0)
    assert driver.told == [("spoke", 1), ("forget", 1), ("choose", "")]
    assert driver.taken() == [100, 101]


def test_decode_that_finished_and_broke_while_the_first_token_was_due() -> None:
    driver = split()
    for position in (1, 2):
        driver.token(2, position)
    driver.token(2, 3, FinishReason.LENGTH)
    driver.failed(2, LOST)
    driver.token(1, 0)
    assert driver.taken() == [100, 101, 102, 103]
    assert driver.record.finish is FinishReason.LENGTH
    assert driver.told == [("spoke", 1), ("forget", 1)]


def test_what_no_worker_can_mend_ends_the_request() -> None:
    driver = split()
    driver.failed(1, InvalidRequest("bad"))
    assert driver.told == [("forget", 1), ("abort", 2)]
    assert isinstance(driver.record.error, InvalidRequest)


def test_attempts_are_bounded_and_the_last_error_is_told() -> None:
    driver = Driver(max_attempts=2)
    for number in (1, 2):
        driver.begin(None, "W")
        driver.failed(number, LOST)
    assert driver.told == [("forget", 2)]
    assert isinstance(driver.record.error, Unavailable)
    assert "2 attempts" in driver.record.error.message
    assert "WorkerLost: lost" in driver.record.error.message


def test_draining_is_no_failure() -> None:
    driver = Driver(max_attempts=2)
    for number in range(1, 9):
        driver.begin(None, f"W{number}")
        driver.failed(number, WorkerDraining("draining"))
        assert driver.told[-1] == ("choose", "")


def test_the_last_attempt_does_without_a_hand_off_that_failed() -> None:
    driver = split()
    driver.token(1, 0)
    driver.failed(2, KV_GONE, handoff=True)
    assert driver.record.may_hand_off
    driver.begin("P", "D2")
    driver.failed(4, KV_GONE, handoff=True)
    driver.token(3, 1)
    assert not driver.record.may_hand_off


def test_layouts_that_differ_are_not_tried_again() -> None:
    driver = split()
    error = LayoutMismatch("block_size: 16 here, 32 there")
    assert not error.retryable
    driver.failed(2, error, handoff=True)
    driver.token(1, 0)
    assert driver.told[-1] == ("choose", "")
    assert not driver.record.may_hand_off


def test_the_deadline_and_the_client_abort_all_legs_once() -> None:
    for error in (DeadlineExceeded("late"), RequestAborted("gone")):
        driver = split()
        driver.token(1, 0)
        assert [type(a) for a in driver.record.fail(error)] == [Abort, Abort]
        assert driver.record.fail(RequestAborted("again")) == ()
        assert driver.record.error is error
        driver.token(2, 1)
        driver.failed(2, LOST)
        assert driver.told == []
        assert driver.taken() == [100]


def test_logprobs_and_cached_tokens_come_with_their_tokens() -> None:
    driver = Driver(logprobs=0)
    driver.begin("P", "D")
    values = [TokenLogprob(100 + i, -0.5 * i) for i in range(3)]
    driver.record.token(2, LegToken(1, 101, None, values[1], 3))
    driver.record.token(1, LegToken(0, 100, None, values[0], 2))
    first = driver.record.take()
    assert first is not None
    assert (first.logprobs, first.num_cached_tokens) == (tuple(values[:2]), 2)
    driver.record.token(2, LegToken(2, 102, None, values[2]))
    second = driver.record.take()
    assert second is not None
    assert (second.logprobs, second.num_cached_tokens) == ((values[2],), 0)
    driver.token(2, 3)
    assert isinstance(driver.record.error, InternalError)


# -- hand-offs that fail on the way --------------------------------------------------------------------------------


def test_a_sink_that_cannot_reach_its_source_is_replaced_at_the_same_offer() -> None:
    driver = split()
    driver.token(1, 0)
    driver.failed(2, UNREACHABLE, handoff=True)
    assert driver.told == [("forget", 2), ("choose sink", "P")]
    assert driver.record.failed_pairs == {("P", "D")}
    driver.sink("D2")
    driver.failed(3, UNREACHABLE, handoff=True)
    assert driver.told == [("forget", 3), ("abort", 1), ("choose", "")]
    assert driver.record.failed_pairs == {("P", "D"), ("P", "D2")}
    assert driver.record.num_failures == 1


def test_a_prefix_is_offered_before_it_is_asked_for() -> None:
    for prefill, decode in (("P", "D"), (None, "W")):
        driver = Driver()
        route = Route(prefill, decode, PrefixSource("H", 2))
        offer, submit, *_ = driver.record.begin(route, "secret", driver.handles, prefix_id="prefix")
        assert offer == OfferPrefix("H", "prefix", 2)
        assert isinstance(submit, Submit)
        assert (submit.leg.worker, submit.prefix) == (prefill or decode, PrefixPull("H", "prefix"))


# -- migration -----------------------------------------------------------------------------------------------------


def migrating() -> Driver:
    """A alone made two tokens of six, and is to hand off to B."""
    driver = Driver(max_tokens=6)
    driver.begin(None, "A")
    assert driver.record.movable() is None
    driver.token(1, 0)
    driver.token(1, 1)
    driver.migrate("B")
    return driver


def test_a_running_leg_migrates_and_no_token_is_lost() -> None:
    driver = migrating()
    offer, submit = driver.log
    assert isinstance(offer, Offer)
    assert (offer.leg.handle, offer.handoff_id) == (1, "move-2")
    assert isinstance(submit, Submit)
    assert (submit.leg.part, submit.handoff_id, submit.source) == (Part.DECODE, "move-2", "A")
    assert submit.output_token_ids == (100, 101)
    assert driver.record.movable() is None
    driver.token(1, 2)
    driver.handed_off(1, 3)
    assert driver.told == []
    driver.token(2, 3)
    assert driver.told == [("spoke", 2), ("forget", 1)]
    moved = driver.record.movable()
    assert moved is not None
    assert moved.worker == "B"
    driver.migrate("A")
    driver.handed_off(2, 4)
    driver.token(3, 4)
    driver.token(3, 5, FinishReason.LENGTH)
    assert driver.told == [("forget", 3)]
    assert driver.taken() == [100 + i for i in range(6)]
    assert (driver.record.num_migrations, driver.record.num_attempts, driver.record.num_failures) == (2, 1, 0)


def test_the_new_workers_tokens_wait_for_the_last_of_the_old_one() -> None:
    driver = migrating()
    for position in (3, 4, 4):
        driver.token(2, position)
    driver.token(2, 5, FinishReason.LENGTH)
    assert driver.taken() == [100, 101]
    driver.token(1, 2)
    assert driver.taken() == [102, 103, 104, 105]
    assert driver.told == [("forget", 1), ("forget", 2)]


def test_the_new_workers_first_token_says_that_the_old_one_has_handed_off() -> None:
    driver = migrating()
    driver.token(2, 2)
    assert driver.told == [("spoke", 2), ("forget", 1)]
    driver.handed_off(1, 2)
    driver.failed(1, LOST)
    assert driver.told == []
    assert driver.taken() == [100, 101, 102]


@pytest.mark.parametrize("error", [LOST, KV_GONE, OutOfBlocks("full"), InternalError("a bug there")])
def test_the_new_worker_fails_and_the_old_one_runs_on(error: DiptychError) -> None:
    driver = migrating()
    driver.failed(2, error, handoff=error is KV_GONE)
    assert driver.told == [("forget", 2)]
    assert driver.record.failed_pairs == {("A", "B")}
    assert driver.record.excluded == set()
    for position in (2, 3, 4):
        driver.token(1, position)
    driver.token(1, 5, FinishReason.STOP)
    assert driver.taken() == [100 + i for i in range(6)]
    assert driver.told == [("forget", 1)]
    assert (driver.record.num_failures, driver.record.num_migrations) == (0, 0)


def test_migrations_that_fail_are_bounded() -> None:
    driver = migrating()
    for handle in (2, 3, 4):
        assert driver.record.movable() is None
        driver.failed(handle, LOST)
        if handle < 4:
            driver.migrate(f"B{handle}")
    assert driver.record.movable() is None
    driver.token(1, 2)
    assert driver.taken() == [100, 101, 102]


@pytest.mark.parametrize("error", [WorkerDraining("draining"), SequenceEnded("it finished where it ran")])
def test_a_worker_that_drains_or_a_sequence_that_ends_is_no_failed_migration(error: DiptychError) -> None:
    driver = migrating()
    for handle in range(2, 9):
        driver.failed(handle, error, handoff=isinstance(error, SequenceEnded))
        driver.migrate(f"B{handle}")
    assert driver.record.num_failed_migrations == 0


def test_the_new_worker_fails_after_the_old_one_handed_off() -> None:
    for error, is_handoff in ((LOST, False), (UNREACHABLE, True)):
        driver = migrating()
        driver.handed_off(1, 2)
        driver.failed(2, error, handoff=is_handoff)
        assert driver.told == [("forget", 2), ("choose sink", "A")]
        driver.sink("C")
        (submit,) = driver.log
        assert isinstance(submit, Submit)
        assert (submit.leg.worker, submit.handoff_id, submit.output_token_ids) == ("C", "move-2", (100, 101))
        driver.token(3, 2)
        assert driver.told == [("spoke", 3), ("forget", 1)]
        assert driver.taken() == [100, 101, 102]


def test_the_old_one_hands_off_to_a_worker_that_has_failed() -> None:
    driver = migrating()
    driver.failed(2, LOST)
    driver.token(1, 2)
    driver.handed_off(1, 3)
    assert driver.told == [("choose sink", "A")]
    driver.sink(None)
    assert driver.told == [("abort", 1), ("choose", "")]
    driver = migrating()
    driver.failed(2, KV_GONE, handoff=True)
    driver.handed_off(1, 2)
    assert driver.told == [("abort", 1), ("choose", "")]


def test_the_old_worker_was_sealed_for_an_earlier_offer() -> None:
    """It did not know yet that the first sink had failed, nor of the second offer."""
    driver = migrating()
    driver.failed(2, UNREACHABLE, handoff=True)
    driver.migrate("C")
    assert driver.told[0][0] == "offer"
    driver.token(1, 2)
    driver.handed_off(1, 3, "move-2")
    assert driver.told == [("abort", 3), ("choose sink", "A")]
    driver.sink("D")
    (submit,) = driver.log
    assert isinstance(submit, Submit)
    assert (submit.leg.worker, submit.handoff_id) == ("D", "move-2"), "the lease that stands"
    driver.failed(3, KV_GONE, handoff=True)
    driver.token(submit.leg.handle, 3)
    assert driver.taken() == [100, 101, 102, 103]
    assert driver.record.error is None


def test_the_earlier_offer_stands_when_the_newer_one_has_failed_too() -> None:
    driver = migrating()
    driver.failed(2, UNREACHABLE, handoff=True)
    driver.migrate("C")
    driver.failed(3, LOST)
    driver.handed_off(1, 2, "move-2")
    assert driver.told == [("choose sink", "A")]


def test_the_new_worker_fails_with_tokens_that_wait() -> None:
    driver = migrating()
    driver.token(2, 3)
    driver.failed(2, LOST)
    assert driver.told == [("forget", 2)]
    driver.token(1, 2)
    assert driver.told == [("forget", 1), ("choose", "")]
    assert driver.taken() == [100, 101, 102, 103]
    driver.begin("P", "D")
    assert isinstance(driver.log[0], Submit)
    assert driver.log[0].output_token_ids == (100, 101, 102, 103)


def test_the_old_worker_is_lost_before_it_handed_off() -> None:
    for early in (False, True):
        driver = migrating()
        if early:
            driver.token(2, 3)
        driver.failed(1, LOST)
        assert driver.told == [("forget", 1), ("abort", 2), ("choose", "")]
        assert driver.taken() == [100, 101]
        assert driver.record.excluded == {"A"}


def test_the_old_worker_is_lost_after_it_handed_off() -> None:
    driver = migrating()
    driver.handed_off(1, 2)
    driver.failed(1, LOST)
    assert driver.told == [("forget", 1)]
    driver.token(2, 2)
    assert driver.taken() == [100, 101, 102]
    driver = migrating()
    driver.handed_off(1, 2)
    driver.failed(1, LOST)
    driver.failed(2, UNREACHABLE, handoff=True)
    assert driver.told == [("forget", 2), ("choose", "")]


def test_the_old_worker_finishes_the_request_first() -> None:
    driver = migrating()
    driver.token(1, 2, FinishReason.STOP)
    assert sorted(driver.told) == [("abort", 2), ("forget", 1)]
    assert driver.taken() == [100, 101, 102]


def test_nonsense_about_a_migration_is_an_error() -> None:
    driver = migrating()
    driver.handed_off(1, 3)
    assert isinstance(driver.record.error, InternalError)
    driver = migrating()
    driver.token(2, 3)
    driver.handed_off(1, 2)
    assert isinstance(driver.record.error, InternalError)
    driver = migrating()
    driver.handed_off(1, 2)
    driver.token(1, 2)
    assert isinstance(driver.record.error, InternalError)
    assert {("abort", 1), ("abort", 2)} == set(driver.told)
    driver = migrating()
    driver.handed_off(1, 2, "a hand-off that nobody offered")
    assert isinstance(driver.record.error, InternalError)
    driver = Driver()
    driver.begin(None, "A")
    driver.handed_off(1, 0)
    assert isinstance(driver.record.error, InternalError)


def test_a_leg_moves_only_while_it_runs_alone() -> None:
    driver = split()
    driver.token(1, 0)
    assert driver.record.movable() is None
    driver.token(2, 1)
    leg = driver.record.movable()
    assert leg is not None
    assert leg.handle == 2
    driver.record.fail(RequestAborted("gone"))
    assert driver.record.movable() is None
