"""One request's state: worker requests that fail, and the attempts that follow."""

from diptych.cluster.routing.actions import Abort, AwaitLostWorkers, Submit
from diptych.workers.common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    OutOfBlocks,
    PromptReturned,
    RequestAborted,
    Unavailable,
    WorkerDraining,
)
from diptych.workers.common.request import FinishReason

from ...support.state_harness import KV_GONE, LOST, UNREACHABLE, StateHarness, split


def test_prefill_lost_before_its_token() -> None:
    harness = split()
    harness.token(2, 1)  # it overtook; it will come again
    harness.failed(1, LOST)
    assert harness.told == [("forget", 1), ("abort", 2), ("choose", "")]
    assert harness.state.failures.workers == {"P"}
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
    assert harness.state.failures.workers == {"P", "D"}
    assert harness.state.failures.num_attempts == 1
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
        assert harness.state.failures.num_attempts == 0


def test_a_prompt_that_comes_back_costs_no_attempt() -> None:
    harness = split()
    harness.failed(1, PromptReturned("no prompts any more"))
    assert harness.told[-1] == ("choose", "")
    assert harness.state.failures.num_attempts == 0


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
    assert harness.state.failures.num_attempts == 0


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
        harness.failed(number, OutOfBlocks("full"))
    assert harness.told == [("forget", 2)]
    assert isinstance(harness.state.error, Unavailable)
    assert "2 attempts" in harness.state.error.message
    assert "OutOfBlocks: full" in harness.state.error.message


def test_after_the_last_attempt_lost_workers_may_answer_again() -> None:
    harness = StateHarness(max_attempts=2)
    for number, worker in enumerate(("W", "X"), 1):
        harness.begin(None, worker)
        harness.failed(number, LOST)
    assert harness.told == [("forget", 2), ("await lost workers", "")]
    [_, awaiting] = harness.log
    assert isinstance(awaiting, AwaitLostWorkers)
    assert "2 attempts; the last error was WorkerLost: lost" in awaiting.error.message
    failures = harness.state.failures
    assert failures.is_exhausted and harness.state.error is None
    failures.answers_again("Y")
    assert failures.is_exhausted
    failures.answers_again("W")
    assert (failures.num_attempts, failures.workers) == (1, {"X"})


def test_a_connection_that_breaks_costs_an_attempt_where_the_request_is_no_further_than_before() -> None:
    """The request itself may be what breaks it."""
    harness = StateHarness(max_attempts=4, max_tokens=9)
    failures = harness.state.failures
    costs = list[int]()
    for number, num_tokens in enumerate((0, 0, 1, 1, 2), 1):
        harness.begin(None, "W")
        for position in range(len(harness.state.token_ids), num_tokens):
            harness.token(number, position)
        harness.failed(number, LOST)
        failures.answers_again("W")
        costs.append(failures.num_attempts)
    assert costs == [0, 1, 1, 2, 2]


def test_what_else_fails_costs_its_attempt_though_the_worker_is_lost_later() -> None:
    harness = StateHarness(max_attempts=3)
    harness.begin(None, "W")
    harness.failed(1, OutOfBlocks("full"))
    harness.state.failures.answers_again("W")
    assert (harness.state.failures.num_attempts, harness.state.failures.workers) == (1, {"W"})


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
    assert harness.state.failures.may_hand_off
    harness.begin("P", "D2")
    harness.failed(4, KV_GONE, handoff=True)
    harness.token(3, 1)
    assert not harness.state.failures.may_hand_off


def test_layouts_that_differ_are_not_tried_again() -> None:
    harness = split()
    error = LayoutMismatch("block_size: 16 here, 32 there")
    assert not error.retryable
    harness.failed(2, error, handoff=True)
    harness.token(1, 0)
    assert harness.told[-1] == ("choose", "")
    assert not harness.state.failures.may_hand_off


def test_the_deadline_and_the_client_abort_all_worker_requests_once() -> None:
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


def test_a_sink_that_cannot_reach_its_source_is_replaced_at_the_same_offer() -> None:
    harness = split()
    harness.token(1, 0)
    harness.failed(2, UNREACHABLE, handoff=True)
    assert harness.told == [("forget", 2), ("choose sink", "P")]
    assert harness.state.failures.pairs == {("P", "D")}
    harness.sink("D2")
    harness.failed(3, UNREACHABLE, handoff=True)
    assert harness.told == [("forget", 3), ("abort", 1), ("choose", "")]
    assert harness.state.failures.pairs == {("P", "D"), ("P", "D2")}
    assert harness.state.failures.num_attempts == 1
