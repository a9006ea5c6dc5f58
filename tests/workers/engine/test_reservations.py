"""Reservations that wait for a prompt which another brings."""

from collections.abc import Callable

import pytest

from diptych.workers.common.errors import DiptychError, RequestAborted
from diptych.workers.common.timings import PullTimes
from diptych.workers.core.sequence import Sequence
from diptych.workers.engine.engine import Engine
from diptych.workers.handoff.types import Reservation

from ...support.engines import assert_clean, make, make_seal
from ...support.sequences import make_request

PROMPT = [1] * 17  # four full blocks, and a token
KEYS = [f"0/{number}" for number in range(4)]
Answers = dict[str, Reservation | DiptychError]


@pytest.fixture
def sink() -> Engine:
    engine = make()
    for key in KEYS:
        engine.submit(key, make_request(PROMPT, 5), [], importing=True)
    return engine


def reserve_all(sink: Engine) -> Answers:
    """Reserve for all of KEYS: the first brings what the others wait for."""
    answers: Answers = {}
    for key in KEYS:
        sink.incoming.reserve(key, len(PROMPT), lambda answer, key=key: answers.setdefault(key, answer))
    assert list(answers) == KEYS[:1]
    return answers


def looked_up(sink: Engine, work: Callable[[], object]) -> int:
    """Number of sequences whose blocks are looked up meanwhile."""
    match, seen = sink.cache.match, list[Sequence]()

    def counted(sequence: Sequence) -> list[int]:
        seen.append(sequence)
        return match(sequence)

    sink.cache.match = counted
    work()
    sink.cache.match = match
    return len(seen)


def test_those_that_wait_for_a_prompt_are_not_looked_at_until_it_is_here(sink: Engine) -> None:
    answers = reserve_all(sink)
    assert looked_up(sink, sink.step) == 0, "thousands may wait, in every step"
    sink.submit("0/9", make_request([2] * 5, 5), [], importing=True)
    assert looked_up(sink, lambda: sink.incoming.reserve("0/9", 5, lambda _: None)) == 1, "nor for others"
    sink.commit(KEYS[0], make_seal(len(PROMPT), [1]), PullTimes())
    sink.step()
    assert list(answers) == KEYS
    held = [answer.num_held_tokens for answer in answers.values() if isinstance(answer, Reservation)]
    assert held == [0, 16, 16, 16]


def test_where_a_prompt_does_not_come_the_oldest_brings_it(sink: Engine) -> None:
    answers = reserve_all(sink)
    sink.fail_import(KEYS[0], quarantine=False)
    sink.step()
    assert list(answers) == KEYS[:2]
    sink.abort(KEYS[2])
    assert isinstance(answers[KEYS[2]], RequestAborted)
    sink.fail_import(KEYS[3], quarantine=False)
    for key in KEYS[1:3]:
        sink.fail_import(key, quarantine=False)
    sink.step()
    assert KEYS[3] not in answers
    assert_clean(sink)


def test_the_later_of_two_reservations_for_a_sequence_counts(sink: Engine) -> None:
    answers, later = reserve_all(sink), list[Reservation | DiptychError]()
    sink.incoming.reserve(KEYS[1], len(PROMPT), later.append)
    sink.fail_import(KEYS[0], quarantine=False)
    sink.step()
    assert KEYS[1] not in answers and isinstance(answers[KEYS[2]], Reservation) and not later
    sink.fail_import(KEYS[2], quarantine=False)
    sink.step()
    assert isinstance(answers[KEYS[3]], Reservation) and not later
    sink.fail_import(KEYS[3], quarantine=False)
    sink.step()
    assert isinstance(later[0], Reservation)
