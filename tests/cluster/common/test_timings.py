"""Phases of requests; each row adds up to the time that the router measured."""

import re

import pytest

from diptych.cluster.common.timings import RequestTimes, RequestTimings, fit, server_timing
from diptych.cluster.common.worker_stats import Drafts
from diptych.workers.common.timings import HandoffTimings, SequenceTimings

FIRST = SequenceTimings(queue_s=0.25, compute_s=2)
HANDOFF = HandoffTimings(
    announce_to_pull_s=0.125, pull_s=1.5, last_segment_s=0.25, release_s=0.125, num_bytes=640, transport="nixl"
)
SECOND = SequenceTimings(queue_s=0.0625, compute_s=0.5, handoff=HANDOFF)


def first_at_103(word: SequenceTimings | None = FIRST) -> RequestTimes:
    """Received at 100, submitted at 100.5."""
    times = RequestTimes(started_at=100)
    times.submitted_at = 100.5
    times.accept([word])
    assert times.delivered(1, 103)
    return times


def until_first(t: RequestTimings) -> tuple[float, ...]:
    return t.queue_s, t.prefill_s, t.deliver_first_s


def until_second(t: RequestTimings) -> tuple[float, ...]:
    return t.last_segment_s, t.commit_s, t.first_decode_s, t.deliver_second_s


def second_at(times: RequestTimes, now: float, word: SequenceTimings | None = SECOND) -> RequestTimings:
    times.accept([times.worker_timings[0], word])
    assert times.delivered(1, now)
    timings = times.timings(now, num_attempts=2, num_migrations=1, drafts=Drafts(7, 3))
    assert timings is not None
    assert sum(until_first(timings)) == times.delivered_at[0] - times.started_at
    assert sum(until_second(timings)) == times.delivered_at[1] - times.delivered_at[0]
    return timings


def test_nothing_is_told_before_the_first_token() -> None:
    times = RequestTimes(100)
    times.submitted_at = 101
    times.accept([])
    assert times.timings(102) is None


def test_a_hand_off() -> None:
    timings = second_at(first_at_103(), 104)
    assert timings == RequestTimings(
        queue_s=0.75,
        prefill_s=2,
        deliver_first_s=0.25,
        last_segment_s=0.25,
        commit_s=0.1875,
        first_decode_s=0.5,
        deliver_second_s=0.0625,
        announce_to_pull_s=0.125,
        pull_s=1.5,
        total_s=4,
        handoff_bytes=640,
        transport="nixl",
        num_attempts=2,
        num_migrations=1,
        num_drafted=7,
        num_accepted=3,
    )


def test_what_the_sink_did_while_the_first_token_travelled_is_nobodys_wait() -> None:
    assert until_second(second_at(first_at_103(), 103.75)) == (0.0625, 0.1875, 0.5, 0)
    assert until_second(second_at(first_at_103(), 103.625)) == (0, 0.125, 0.5, 0)
    assert until_second(second_at(first_at_103(), 103.25)) == (0, 0, 0.25, 0)


def test_both_tokens_at_once_leave_no_time_between_them() -> None:
    times = RequestTimes(100)
    times.submitted_at = 101
    times.accept([FIRST, SECOND])
    assert times.delivered(2, 104)
    timings = times.timings(104)
    assert timings is not None
    assert until_first(timings) == (1.25, 2, 0.75) and until_second(timings) == (0, 0, 0, 0)


def test_without_a_hand_off_the_step_is_all_there_is() -> None:
    timings = second_at(first_at_103(), 103.5, word=None)
    assert until_second(timings) == (0, 0, 0.5, 0)
    assert (timings.transport, timings.handoff_bytes) == ("", 0)


def test_one_token_alone() -> None:
    timings = first_at_103().timings(103)
    assert timings == RequestTimings(0.75, 2, 0.25, total_s=3)


def test_a_worker_that_tells_nothing_had_it_all_the_time() -> None:
    timings = first_at_103(word=None).timings(103)
    assert timings is not None and until_first(timings) == (0.5, 2.5, 0)


def test_a_worker_that_tells_too_much_is_cut() -> None:
    timings = first_at_103(SequenceTimings(queue_s=1, compute_s=2)).timings(103)
    assert timings is not None and until_first(timings) == (1, 2, 0)


def test_what_was_lost_before_the_first_token_is_queue() -> None:
    times = RequestTimes(100)
    times.submitted_at = 100.5
    times.submitted_at = 107  # an attempt failed
    times.accept([FIRST])
    times.delivered(1, 109.5)
    timings = times.timings(109.5)
    assert timings is not None and until_first(timings) == (7.25, 2, 0.25)


@pytest.mark.parametrize("word", [SequenceTimings(0.25, 1), SequenceTimings(0.125, 1, HANDOFF)])
def test_what_was_lost_before_the_second_token_is_commit(word: SequenceTimings) -> None:
    times = first_at_103()
    times.submitted_at = 106
    timings = second_at(times, 107.625, word)
    last_segment_s = 0.25 if word.handoff else 0
    assert until_second(timings) == (last_segment_s, 3.25, 1, 0.375 - last_segment_s)


def test_a_new_leg_after_a_token_was_accepted_is_not_that_tokens() -> None:
    times = RequestTimes(100)
    times.submitted_at = 100.5
    times.accept([FIRST])
    times.submitted_at = 102.75
    times.delivered(1, 103)
    timings = times.timings(103)
    assert timings is not None and until_first(timings) == (0.75, 2, 0.25)


def test_later_tokens_change_nothing_but_the_total() -> None:
    times = first_at_103()
    second = second_at(times, 104)
    assert not times.delivered(5, 110)
    last = times.timings(110)
    assert last is not None and last.total_s == 10
    assert until_second(last) == until_second(second)


def test_fit() -> None:
    assert fit(10, 1, 2) == (1, 2, 7)
    assert fit(2, 1, 2) == (0, 2, 0)
    assert fit(1, 1, 2, 0.5) == (0, 0.5, 0.5, 0)
    assert fit(0, 1) == (0, 0)


def test_all_of_it_travels_in_each_form() -> None:
    timings = second_at(first_at_103(), 104)
    json = timings.to_json(3)
    message = timings.to_proto(3)
    assert {field.name: value for field, value in message.ListFields()} == json
    assert len(message.DESCRIPTOR.fields) == len(json)
    header = server_timing(timings)
    entry = r'[a-z_]+;dur=\d+\.\d{3};desc="[^"\\]+"'
    assert re.fullmatch(rf"{entry}(, {entry})*", header)
    assert header.startswith('queue;dur=750.000;desc="waiting for a step", prefill;dur=2000.000;')
    assert re.findall(r"total;dur=([\d.]+)", header) == ["4000.000"]
