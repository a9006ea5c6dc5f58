"""One request's state machine: every order of events that we could name. Those that we could not: see
test_record_in_any_order.py."""

import itertools
from collections.abc import Iterator

import pytest

from diptych.cluster.routing.actions import (
    Abort,
    Action,
    ChooseRoute,
    ChooseSink,
    FirstToken,
    OfferPrefix,
    OfferSequence,
    Part,
    PrefixPull,
    Submit,
    WorkerToken,
)
from diptych.cluster.routing.generation import TokenLogprob
from diptych.cluster.routing.policy import PrefixSource, Route
from diptych.cluster.routing.request_state import RequestState
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


class StateHarness:
    """A state with handles 1, 2, ..; `log` holds the actions of the last event."""

    def __init__(self, max_tokens: int = 4, max_attempts: int = 3, logprobs: int | None = None) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs)
        self.state = RequestState(Request("request", (1, 2, 3), sampling, timeout_s=60.0), max_attempts)
        self.handles: Iterator[int] = itertools.count(1)
        self.log: list[Action] = []

    def begin(self, prefill: str | None, decode: str) -> None:
        self.log = list(self.state.begin(Route(prefill, decode), "secret", self.handles))

    def token(self, handle: int, position: int, finish: FinishReason | None = None) -> None:
        self.log = list(self.state.token(handle, WorkerToken(position, 100 + position, finish)))

    def failed(self, handle: int, error: DiptychError, handoff: bool = False) -> None:
        self.log = list(self.state.failed(handle, error, handoff=handoff))

    def migrate(self, worker: str) -> None:
        handle = next(self.handles)
        self.handles = itertools.chain([handle], self.handles)
        self.log = list(self.state.migrate(worker, f"move-{handle}", self.handles))

    def handed_off(self, handle: int, num_output_tokens: int, handoff_id: str = "") -> None:
        """By default for the newest offer."""
        offered = [offer for worker_request in self.state.worker_requests() for offer in worker_request.offers]
        newest = handoff_id or (offered[-1] if offered else "never")
        self.log = list(self.state.handed_off(handle, num_output_tokens, newest))

    def sink(self, worker: str | None) -> None:
        self.log = list(self.state.begin_sink(worker, self.handles))

    @property
    def told(self) -> list[tuple[str, int | str]]:
        """The last event's actions in short."""
        short: list[tuple[str, int | str]] = []
        for action in self.log:
            match action:
                case ChooseRoute():
                    short.append(("choose", ""))
                case ChooseSink():
                    short.append(("choose sink", action.source))
                case FirstToken():
                    short.append(("first", action.worker_request.handle))
                case OfferSequence():
                    short.append(("offer", action.worker_request.handle))
                case OfferPrefix():
                    short.append(("offer prefix", action.worker))
                case _:
                    short.append((type(action).__name__.lower(), action.worker_request.handle))
        return short

    def taken(self) -> list[int]:
        delta = self.state.take()
        return list(delta.token_ids) if delta else []


def split() -> StateHarness:
    harness = StateHarness()
    harness.begin("P", "D")
    return harness


def test_one_worker_alone() -> None:
    harness = StateHarness(max_tokens=2)
    harness.begin(None, "W")
    (submit,) = harness.log
    assert isinstance(submit, Submit)
    assert (submit.worker_request.worker, submit.worker_request.part, submit.handoff_id, submit.source) == (
        "W",
        Part.ALONE,
        None,
        None,
    )
    harness.token(1, 0)
    assert harness.told == [("first", 1)]
    assert harness.taken() == [100]
    harness.token(1, 1, FinishReason.LENGTH)
    assert harness.told == [("forget", 1)]
    delta = harness.state.take()
    assert delta is not None
    assert (delta.token_ids, delta.finish_reason) == ((101,), FinishReason.LENGTH)
    assert harness.state.take() is None


def test_two_workers_share_a_hand_off_and_the_tokens_merge() -> None:
    harness = split()
    source, sink = harness.log
    assert isinstance(source, Submit)
    assert isinstance(sink, Submit)
    assert (source.worker_request.part, source.handoff_id, source.source) == (Part.PREFILL, "secret", None)
    assert (sink.worker_request.part, sink.handoff_id, sink.source) == (Part.DECODE, "secret", "P")
    harness.token(1, 0)
    assert harness.told == [("first", 1)]
    for position in (1, 2):
        harness.token(2, position)
        assert harness.told == ([("first", 2), ("forget", 1)] if position == 1 else [])
    harness.token(2, 3, FinishReason.LENGTH)
    assert harness.told == [("forget", 2)]


def test_decode_tokens_that_overtake_the_first_wait_for_it() -> None:
    harness = split()
    for position in (1, 2):
        harness.token(2, position)
    harness.token(2, 3, FinishReason.LENGTH)
    assert harness.taken() == []
    harness.token(1, 0)
    assert harness.taken() == [100, 101, 102, 103]
    assert harness.state.finish is FinishReason.LENGTH


def test_a_request_that_ends_with_its_first_token_stops_the_sink() -> None:
    harness = split()
    harness.token(1, 0, FinishReason.STOP)
    assert ("abort", 2) in harness.told
    assert ("forget", 1) in harness.told
    assert harness.state.finish is FinishReason.STOP


def test_a_sink_told_of_the_end_before_we_are() -> None:
    """The source finishes with its first token: the sink hears of it first, and fails."""
    harness = split()
    harness.failed(2, RequestAborted("the sequence finished with its first token"), handoff=True)
    assert harness.told == [("forget", 2)]
    harness.token(1, 0, FinishReason.STOP)
    assert harness.told == [("first", 1), ("forget", 1)]
    assert harness.state.finish is FinishReason.STOP


def test_duplicates_and_late_tokens_are_dropped() -> None:
    harness = split()
    harness.token(1, 0)
    harness.token(1, 0)
    harness.token(2, 0)
    harness.token(2, 1)
    harness.token(2, 1)
    harness.token(77, 2)
    assert harness.taken() == [100, 101]
    assert harness.state.error is None


@pytest.mark.parametrize(
    ("handle", "position", "before"), [(2, 2, [(1, 0)]), (2, 2, []), (1, 1, []), (2, 4, [(1, 0), (2, 1)])]
)
def test_a_gap_is_an_error_and_never_a_wrong_answer(handle: int, position: int, before: list[tuple[int, int]]) -> None:
    harness = split()
    for given in before:
        harness.token(*given)
    harness.token(handle, position)
    assert isinstance(harness.state.error, InternalError)
    assert ("abort", 2) in harness.told
    assert (("abort", 1) in harness.told) == (len(before) < 2)


def test_more_tokens_than_asked_for_are_an_error() -> None:
    harness = StateHarness(max_tokens=1)
    harness.begin(None, "W")
    harness.token(1, 0)
    assert isinstance(harness.state.error, InternalError)
    assert ("abort", 1) in harness.told


def test_prefill_lost_before_its_token() -> None:
    harness = split()
    harness.token(2, 1)  # it overtook; it will come again
    harness.failed(1, LOST)
    assert harness.told == [("forget", 1), ("abort", 2), ("choose", "")]
    assert harness.state.excluded == {"P"}
    harness.begin("P2", "D")
    assert isinstance(harness.log[0], Submit)
    assert harness.log[0].output_token_ids == ()
    harness.token(3, 0)
    harness.token(4, 1)
    assert harness.taken() == [100, 101]


def test_prefill_lost_after_its_token_is_the_decode_workers_affair() -> None:
    harness = split()
    harness.token(1, 0)
    harness.failed(1, LOST)
    assert harness.told == [("forget", 1)]
    harness.token(2, 1)
    assert harness.taken() == [100, 101]


def test_hand_off_failed_after_the_first_token_resumes_after_it() -> None:
    harness = split()
    harness.token(1, 0)
    harness.failed(2, KV_GONE, handoff=True)
    assert harness.told == [("forget", 2), ("abort", 1), ("choose", "")]
    harness.begin(None, "P")
    assert isinstance(harness.log[0], Submit)
    assert harness.log[0].output_token_ids == (100,)
    harness.token(3, 1)
    assert harness.taken() == [100, 101]


def test_hand_off_failed_before_the_first_token_waits_for_it() -> None:
    harness = split()
    harness.failed(2, KV_GONE, handoff=True)
    assert harness.told == [("forget", 2)]
    harness.token(1, 0)
    assert harness.told == [("first", 1), ("abort", 1), ("choose", "")]
    assert harness.taken() == [100]


def test_hand_off_failed_and_then_prefill_too() -> None:
    harness = split()
    harness.failed(2, KV_GONE, handoff=True)
    harness.failed(1, LOST)
    assert harness.told == [("forget", 1), ("choose", "")]
    assert harness.state.excluded == {"P", "D"}
    assert harness.state.num_failures == 1
    harness.begin("P2", "D2")
    harness.token(3, 0)
    assert harness.told == [("first", 3)]  # what failed before is forgotten


def test_a_sink_lost_before_it_pulled_is_replaced_at_the_same_offer() -> None:
    for first_is_here in (False, True):
        harness = split()
        if first_is_here:
            harness.token(1, 0)
        harness.failed(2, LOST)
        assert harness.told == [("forget", 2), ("choose sink", "P")]
        harness.sink("D2")
        (submit,) = harness.log
        assert isinstance(submit, Submit)
        assert (submit.worker_request.worker, submit.handoff_id, submit.source) == ("D2", "secret", "P")
        assert submit.output_token_ids == ()  # as they were when the offer was made
        if not first_is_here:
            harness.token(1, 0)
        harness.token(3, 1)
        assert harness.taken() == [100, 101]
        assert harness.state.num_failures == 0


def test_only_one_more_sink_is_sent_to_an_offer() -> None:
    harness = split()
    harness.token(1, 0)
    harness.failed(2, OutOfBlocks("full"))
    harness.sink("D2")
    harness.failed(3, LOST)
    assert harness.told == [("forget", 3), ("abort", 1), ("choose", "")]


def test_sinks_that_drain_may_be_replaced_as_often_as_there_are_others() -> None:
    harness = split()
    for handle in (2, 3, 4):
        harness.failed(handle, WorkerDraining("draining"))
        assert harness.told[-1] == ("choose sink", "P")
        harness.sink(f"D{handle}")
    assert harness.state.num_failures == 0


def test_no_other_sink() -> None:
    harness = split()
    harness.failed(2, LOST)
    harness.sink(None)
    assert harness.told == []  # the first token is on its way
    harness.token(1, 0)
    assert harness.told == [("first", 1), ("abort", 1), ("choose", "")]
    harness = split()
    harness.token(1, 0)
    harness.failed(2, LOST)
    harness.sink(None)
    assert harness.told == [("abort", 1), ("choose", "")]


def test_decode_lost_in_the_middle() -> None:
    harness = split()
    harness.token(1, 0)
    harness.token(2, 1)
    harness.failed(2, LOST)
    assert harness.told == [("forget", 2), ("choose", "")]
    harness.begin("P", "D2")
    assert [s.output_token_ids for s in harness.log if isinstance(s, Submit)] == [(100, 101)] * 2
    harness.token(3, 2)
    harness.token(4, 3, FinishReason.LENGTH)
    assert harness.taken() == [100, 101, 102, 103]
    assert harness.state.num_attempts == 2


def test_decode_lost_after_it_overtook_loses_nothing() -> None:
    harness = split()
    harness.token(2, 1)
    harness.failed(2, LOST)
    assert harness.told == [("forget", 2)]
    harness.token(1, 0)
    assert harness.told == [("first", 1), ("forget", 1), ("choose", "")]
    assert harness.taken() == [100, 101]


def test_decode_that_finished_and_broke_while_the_first_token_was_due() -> None:
    harness = split()
    for position in (1, 2):
        harness.token(2, position)
    harness.token(2, 3, FinishReason.LENGTH)
    harness.failed(2, LOST)
    harness.token(1, 0)
    assert harness.taken() == [100, 101, 102, 103]
    assert harness.state.finish is FinishReason.LENGTH
    assert harness.told == [("first", 1), ("forget", 1)]


def test_what_no_worker_can_mend_ends_the_request() -> None:
    harness = split()
    harness.failed(1, InvalidRequest("bad"))
    assert harness.told == [("forget", 1), ("abort", 2)]
    assert isinstance(harness.state.error, InvalidRequest)


def test_attempts_are_bounded_and_the_last_error_is_told() -> None:
    harness = StateHarness(max_attempts=2)
    for number in (1, 2):
        harness.begin(None, "W")
        harness.failed(number, LOST)
    assert harness.told == [("forget", 2)]
    assert isinstance(harness.state.error, Unavailable)
    assert "2 attempts" in harness.state.error.message
    assert "WorkerLost: lost" in harness.state.error.message


def test_draining_is_no_failure() -> None:
    harness = StateHarness(max_attempts=2)
    for number in range(1, 9):
        harness.begin(None, f"W{number}")
        harness.failed(number, WorkerDraining("draining"))
        assert harness.told[-1] == ("choose", "")


def test_the_last_attempt_does_without_a_hand_off_that_failed() -> None:
    harness = split()
    harness.token(1, 0)
    harness.failed(2, KV_GONE, handoff=True)
    assert harness.state.may_hand_off
    harness.begin("P", "D2")
    harness.failed(4, KV_GONE, handoff=True)
    harness.token(3, 1)
    assert not harness.state.may_hand_off


def test_layouts_that_differ_are_not_tried_again() -> None:
    harness = split()
    error = LayoutMismatch("block_size: 16 here, 32 there")
    assert not error.retryable
    harness.failed(2, error, handoff=True)
    harness.token(1, 0)
    assert harness.told[-1] == ("choose", "")
    assert not harness.state.may_hand_off


def test_the_deadline_and_the_client_abort_all_legs_once() -> None:
    for error in (DeadlineExceeded("late"), RequestAborted("gone")):
        harness = split()
        harness.token(1, 0)
        assert [type(a) for a in harness.state.fail(error)] == [Abort, Abort]
        assert harness.state.fail(RequestAborted("again")) == ()
        assert harness.state.error is error
        harness.token(2, 1)
        harness.failed(2, LOST)
        assert harness.told == []
        assert harness.taken() == [100]


def test_logprobs_and_cached_tokens_come_with_their_tokens() -> None:
    harness = StateHarness(logprobs=0)
    harness.begin("P", "D")
    values = [TokenLogprob(100 + i, -0.5 * i) for i in range(3)]
    harness.state.token(2, WorkerToken(1, 101, None, values[1], 3))
    harness.state.token(1, WorkerToken(0, 100, None, values[0], 2))
    first = harness.state.take()
    assert first is not None
    assert (first.logprobs, first.num_cached_tokens) == (tuple(values[:2]), 2)
    harness.state.token(2, WorkerToken(2, 102, None, values[2]))
    second = harness.state.take()
    assert second is not None
    assert (second.logprobs, second.num_cached_tokens) == ((values[2],), 0)
    harness.token(2, 3)
    assert isinstance(harness.state.error, InternalError)


# -- hand-offs that fail on the way --------------------------------------------------------------------------------


def test_a_sink_that_cannot_reach_its_source_is_replaced_at_the_same_offer() -> None:
    harness = split()
    harness.token(1, 0)
    harness.failed(2, UNREACHABLE, handoff=True)
    assert harness.told == [("forget", 2), ("choose sink", "P")]
    assert harness.state.failed_pairs == {("P", "D")}
    harness.sink("D2")
    harness.failed(3, UNREACHABLE, handoff=True)
    assert harness.told == [("forget", 3), ("abort", 1), ("choose", "")]
    assert harness.state.failed_pairs == {("P", "D"), ("P", "D2")}
    assert harness.state.num_failures == 1


def test_a_prefix_is_offered_before_it_is_asked_for() -> None:
    for prefill, decode in (("P", "D"), (None, "W")):
        harness = StateHarness()
        route = Route(prefill, decode, PrefixSource("H", 2))
        offer, submit, *_ = harness.state.begin(route, "secret", harness.handles, prefix_id="prefix")
        assert offer == OfferPrefix("H", "prefix", 2)
        assert isinstance(submit, Submit)
        assert (submit.worker_request.worker, submit.prefix) == (prefill or decode, PrefixPull("H", "prefix"))


# -- migration -----------------------------------------------------------------------------------------------------


def migrating() -> StateHarness:
    """A alone made two tokens of six, and is to hand off to B."""
    harness = StateHarness(max_tokens=6)
    harness.begin(None, "A")
    assert harness.state.movable() is None
    harness.token(1, 0)
    harness.token(1, 1)
    harness.migrate("B")
    return harness


def test_a_running_leg_migrates_and_no_token_is_lost() -> None:
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
    assert (harness.state.num_migrations, harness.state.num_attempts, harness.state.num_failures) == (2, 1, 0)


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
    assert harness.state.failed_pairs == {("A", "B")}
    assert harness.state.excluded == set()
    for position in (2, 3, 4):
        harness.token(1, position)
    harness.token(1, 5, FinishReason.STOP)
    assert harness.taken() == [100 + i for i in range(6)]
    assert harness.told == [("forget", 1)]
    assert (harness.state.num_failures, harness.state.num_migrations) == (0, 0)


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
    """It did not know yet that the first sink had failed, nor of the second offer."""
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
        assert harness.state.excluded == {"A"}


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


def test_a_leg_moves_only_while_it_runs_alone() -> None:
    harness = split()
    harness.token(1, 0)
    assert harness.state.movable() is None
    harness.token(2, 1)
    worker_request = harness.state.movable()
    assert worker_request is not None
    assert worker_request.handle == 2
    harness.state.fail(RequestAborted("gone"))
    assert harness.state.movable() is None
