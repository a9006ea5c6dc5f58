"""Tokens of answers that a worker keeps for routers that go on with them."""

from diptych.workers.common.request import FinishReason, RecordKey
from diptych.workers.engine.events import StepTokens, TokenNote
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
