"""Tokens of answers that a worker keeps for routers that go on with them."""

import pytest

from diptych.workers.common.request import MAX_RECALLED, FinishReason, RecordKey
from diptych.workers.engine.events import StepTokens, TokenNote
from diptych.workers.server import answer_records
from diptych.workers.server.answer_records import AnswerRecords, RecordLimits

CALL = b"c" * 16


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(number: int, call: bytes = CALL) -> RecordKey:
    return RecordKey(b"%016d" % number, call)


def step(records: AnswerRecords, *tokens: tuple[str, int, int], finish: FinishReason | None = None) -> None:
    """Take a step of (sequence, position, token)."""
    notes = {len(tokens) - 1: TokenNote(finish)} if finish else {}
    records.note(StepTokens([key for key, _, _ in tokens], [t for _, _, t in tokens], [p for _, p, _ in tokens], notes))


def parts(records: AnswerRecords, number: int) -> list[tuple[int, list[int]]]:
    return [(part.first, list(part.token_ids)) for part in records.recall(key(number).name).parts]


def test_tokens_of_a_sequence_are_kept_until_it_ends_and_afterwards() -> None:
    records = AnswerRecords()
    records.begin("1/1", key(1), [])
    records.begin("1/2", key(2), [7, 8])
    step(records, ("1/1", 0, 5), ("1/2", 2, 9), ("1/9", 0, 1))
    step(records, ("1/1", 1, 6), ("1/1", 2, 7), finish=FinishReason.STOP)
    records.end("1/2")
    step(records, ("1/2", 3, 10))
    assert parts(records, 1) == [(0, [5, 6, 7])] and records.recall(key(1).name).is_finished
    assert parts(records, 2) == [(0, [7, 8, 9])] and not records.recall(key(2).name).is_finished
    assert records.recall(key(1).name).call == CALL
    assert not records.live and records.num_tokens == 6
    assert records.recall(key(3).name).call == b""


def test_a_part_that_another_worker_made_is_a_gap() -> None:
    records = AnswerRecords()
    records.begin("1/1", key(1), [3])
    step(records, ("1/1", 2, 5))
    step(records, ("1/1", 3, 6))
    assert parts(records, 1) == [(0, [3]), (2, [5, 6])]


def test_another_link_adds_what_is_new() -> None:
    records = AnswerRecords()
    records.begin("1/1", key(1), [])
    step(records, ("1/1", 0, 5), ("1/1", 1, 6))
    records.begin("2/1", key(1), [5])
    step(records, ("2/1", 1, 6), ("2/1", 2, 7))
    step(records, ("1/1", 2, 7), ("1/1", 3, 8))
    assert parts(records, 1) == [(0, [5, 6, 7, 8])] and records.num_tokens == 4


def test_of_two_runs_that_differ_the_newest_is_recorded() -> None:
    records = AnswerRecords()
    records.begin("1/1", key(1), [])
    for position, token_id in enumerate((1, 2, 3)):
        step(records, ("1/1", position, token_id))
    records.begin("2/1", key(1), [])
    step(records, ("2/1", 0, 1), ("1/1", 3, 9), finish=FinishReason.STOP)
    assert records.recall(key(1).name).is_finished
    step(records, ("2/1", 1, 5))  # after a near-tie
    assert parts(records, 1) == [(0, [1, 5])] and records.num_tokens == 2
    assert not records.recall(key(1).name).is_finished
    step(records, ("2/1", 2, 6))
    records.begin("3/1", key(1), [1, 5, 7])
    step(records, ("2/1", 3, 8), ("3/1", 3, 4))
    assert parts(records, 1) == [(0, [1, 5, 7, 4])] and set(records.live) == {"3/1"} and records.num_tokens == 4


def test_an_older_run_that_differs_adds_nothing_more() -> None:
    records = AnswerRecords()
    records.begin("1/1", key(1), [])
    records.begin("2/1", key(1), [1, 5])
    step(records, ("1/1", 0, 1))
    step(records, ("1/1", 1, 2))
    step(records, ("1/1", 2, 3), ("2/1", 2, 6))
    assert parts(records, 1) == [(0, [1, 5, 6])] and set(records.live) == {"2/1"}


def test_what_a_sequence_begins_with_fills_gaps() -> None:
    records = AnswerRecords()
    records.begin("1/1", key(1), [3])
    step(records, ("1/1", 2, 5))
    records.begin("2/1", key(1), [3, 4, 5, 6])
    assert parts(records, 1) == [(0, [3, 4, 5, 6])] and records.num_tokens == 4


def test_many_are_recalled_at_once_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    records = AnswerRecords()
    for number in range(4):
        records.begin(f"1/{number}", key(number), [number + 1] * 3)
    names = [key(number).name for number in (2, 9, 0)]
    found = records.recall_all(names).answers
    assert [[list(part.token_ids) for part in each.parts] for each in found] == [[[3, 3, 3]], [], [[1, 1, 1]]]
    assert [each.call for each in found] == [CALL, b"", CALL]
    assert len(records.recall_all([b"n"] * (MAX_RECALLED + 1)).answers) == MAX_RECALLED
    monkeypatch.setattr(answer_records, "MAX_RECALLED_TOKENS", 5)
    found = records.recall_all(names).answers
    assert [len(each.parts) for each in found] == [1, 0, 0] and found[2].call == CALL


def test_another_call_under_the_same_name_is_not_recorded() -> None:
    records = AnswerRecords()
    records.begin("1/1", key(1), [1, 2])
    records.begin("2/1", key(1, b"d" * 16), [3, 4, 5])
    assert "2/1" not in records.live
    assert parts(records, 1) == [(0, [1, 2])]


def test_records_are_bounded_in_number_tokens_and_time() -> None:
    clock = Clock()
    records = AnswerRecords(RecordLimits(max_answers=3, max_tokens=10, lifetime_s=60.0), clock)
    for number in range(5):
        records.begin(f"1/{number}", key(number), [1, 2])
    assert len(records) == 3 and records.num_tokens == 6 and set(records.live) == {"1/2", "1/3", "1/4"}
    for position in range(2, 9):
        step(records, ("1/4", position, 1))
    assert len(records) == 1 and parts(records, 4) == [(0, [1, 2] + [1] * 7)]
    clock.now += 59
    step(records, ("1/4", 9, 1))
    clock.now += 59
    assert parts(records, 4), "a token makes it last longer"
    clock.now += 60
    assert not parts(records, 4) and not records.live and records.num_tokens == 0 and len(records) == 0
