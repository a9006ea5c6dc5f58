"""Messages of step plans: parsed as they were written, and refused where malformed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diptych.workers.common.errors import InternalError
from diptych.workers.execution.gpu.step_plan import (
    HEADER,
    NO_ROWS,
    PASSES_HEADER,
    Ints,
    Numbers,
    PassPlan,
    PlanLimits,
    StepPlan,
    copy_message,
)

LIMITS = PlanLimits(
    max_rows=4,
    table_shape=(8, 16),
    num_blocks=32,
    block_size=4,
    num_layers=3,
    max_context_tokens=64,
    vocab_size=100,
    num_chosen=2,
)


def ints(*of: Any) -> Ints:
    return np.array(of, dtype=np.int32)


def plan(previous_rows: Ints | None = None) -> StepPlan:
    """Two rows in a graph; one row beside a chunk of three tokens."""
    prompts = Numbers(
        token_ids=ints(9, 1, 2, 3),
        previous_rows=previous_rows,
        positions=ints(6, 0, 1, 2),
        slots=ints(14, 40, 41, 42),
        context_lens=ints(7, 3),
        num_new=ints(1, 3),
        table_rows=ints(2, 3),
        sampled=ints(0, 3),
        prompt_rows=ints(1, 2),
        pooled_rows=ints(3),
        sparse=ints(0, 0),
        is_taken=True,
    )
    decodes = ints([5, 0], [-1, 1], [20, 8], [0, 1], [1, 0])
    return StepPlan(ints([16, 17, 33], [4, 5, 31]), decodes, prompts, (1, 3), 4, is_plain=False, bounds=ints(6, 7))


def columns(of: StepPlan) -> list[Any]:
    prompts = of.prompts
    rest = [] if prompts is None else [getattr(prompts, name) for name in Numbers.__dataclass_fields__]
    arrays = [of.tables, of.decodes, of.bounds, of.tails, *rest]
    return [a.tolist() if isinstance(a, np.ndarray) else a for a in arrays] + [of.ends, of.num_sampled, of.is_plain]


@pytest.mark.parametrize("previous_rows", [None, ints(2, -1, -1, -1)])
def test_what_is_told_is_received(previous_rows: Ints | None) -> None:
    sent = plan(previous_rows)
    received = LIMITS.parse(sent.to_message())
    assert isinstance(received, StepPlan) and columns(received) == columns(sent)


def test_a_step_of_decodes_alone() -> None:
    sent = StepPlan(np.empty((2, 0), np.int32), ints([5], [0], [20], [7], [0]), None, (), 1, is_plain=True)
    received = LIMITS.parse(sent.to_message())
    assert isinstance(received, StepPlan) and columns(received) == columns(sent)


TAIL_LIMITS = replace(LIMITS, num_chosen=0, num_tail_blocks=6)


def plan_with_a_tail() -> StepPlan:
    """Slots are of the tail's blocks. The first token of the prompts and the last one fill blocks of four."""
    of = plan()
    assert of.prompts is not None
    changes = {"positions": ints(7, 1, 2, 3), "context_lens": ints(8, 4), "slots": ints(11, 21, 22, 23)}
    prompts = replace(of.prompts, **changes, sparse=NO_ROWS, filled=ints(9, 30))
    decodes = of.decodes.copy()
    decodes[4] = 0
    return replace(of, prompts=prompts, decodes=decodes, tails=ints(5, 0))


def test_a_step_with_a_tail() -> None:
    sent = plan_with_a_tail()
    received = TAIL_LIMITS.parse(sent.to_message())
    assert isinstance(received, StepPlan) and columns(received) == columns(sent)
    assert received.prompts is not None and received.prompts.filled_pairs(4).tolist() == [[2, 9], [5, 30]]


@pytest.mark.parametrize(
    ("first", "end", "filled"),
    [(0, 4, [[2, 9], [5, 30]]), (0, 2, [[2, 9]]), (1, 3, []), (2, 4, [[5, 30]]), (0, 0, [])],
)
def test_some_tokens_fill_their_own_blocks(first: int, end: int, filled: list[list[int]]) -> None:
    prompts = plan_with_a_tail().prompts
    assert prompts is not None and prompts.between(first, end, 4).filled_pairs(4).tolist() == filled


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tails": NO_ROWS}, "it has 0 blocks of the KV tail"),
        ({"tails": ints(5, 6)}, "a block of the KV tail does not exist"),
        ({"slots": ints(11, 21, 22, 24)}, "a slot does not exist"),
        ({"filled": ints(9)}, "it fills 1 blocks, not 2"),
        ({"filled": ints(9, 32)}, "a block that is filled does not exist"),
    ],
)
def test_a_step_whose_tail_cannot_be_is_refused(change: dict[str, Ints], what: str) -> None:
    of = plan_with_a_tail()
    assert of.prompts is not None
    changed = replace(of, **change) if "tails" in change else replace(of, prompts=replace(of.prompts, **change))
    with pytest.raises(InternalError, match=f"a step is malformed: {what}"):
        TAIL_LIMITS.parse(changed.to_message())
    with pytest.raises(InternalError, match="a step is malformed: it has 2 blocks of the KV tail"):
        LIMITS.parse(of.to_message())


def test_blocks_to_be_copied() -> None:
    received = LIMITS.parse(copy_message([(1, 2), (1, 3), (31, 0)]))
    assert not isinstance(received, StepPlan) and received.tolist() == [[1, 1, 31], [2, 3, 0]]
    for message in (copy_message([(1, 32)]), copy_message([(-1, 2)]), copy_message([(1, 2)])[:-1]):
        with pytest.raises(InternalError, match="a step is malformed: a block"):
            LIMITS.parse(message)


def changed(index: int, value: int) -> Callable[[Ints], Ints]:
    def change(message: Ints) -> Ints:
        message[index] = value
        return message

    return change


TABLES, DECODES, ENDS, BOUNDS, PROMPTS = HEADER, HEADER + 6, HEADER + 16, HEADER + 18, HEADER + 20


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda message: message[:5], "no header"),
        (lambda message: message[:-1], "announces another number"),
        (lambda message: np.append(message, 0), "announces another number"),
        (changed(0, 7), "no header"),
        (changed(1, -1), "sizes that cannot be"),
        (changed(1, 1 << 30), "announces another number"),
        (changed(2, 5), "more rows"),
        (changed(3, 5), "more rows"),
        (changed(TABLES, 8 * 16), "a place in the block tables"),
        (changed(TABLES + 3, 32), "a block does not exist"),
        (changed(DECODES, 100), "a token"),
        (changed(DECODES + 2, 4), "a previous row"),
        (changed(DECODES + 4, 0), "a context"),
        (changed(DECODES + 6, 8), "a row of the block tables"),
        (changed(DECODES + 8, 2), "a sequence that is sparse cannot be"),
        (changed(DECODES + 9, 1), "a sequence that is sparse cannot be"),  # its context is short
        (changed(BOUNDS, 32), "a block does not exist"),
        (changed(ENDS, 4), "a layer"),
        (changed(ENDS, 0), "a layer"),
        (changed(3, 3), "3 of its rows are sampled"),
        (changed(4, 2), "of its rows are sampled"),
        (changed(PROMPTS, -1), "a token"),
        (changed(PROMPTS + 4, 64), "a position"),
        (changed(PROMPTS + 8, 128), "a slot"),
        (changed(PROMPTS + 12, 65), "a context"),
        (changed(PROMPTS + 13, 2), "shorter than its new tokens"),
        (changed(PROMPTS + 14, 2), "other tokens than its sequences"),
        (changed(PROMPTS + 16, -1), "a row of the block tables"),
        (changed(PROMPTS + 18, 4), "a sampled row"),
        (changed(PROMPTS + 20, 4), "a prompt row"),
        (changed(PROMPTS + 22, 4), "a pooled row"),
        (changed(PROMPTS + 23, 1), "a sequence that is sparse cannot be"),  # its context is short
        (changed(PROMPTS + 24, 1), "a sequence that is sparse cannot be"),  # it is a chunk
        (changed(14, 1), "sizes that cannot be"),
    ],
)
def test_what_cannot_be_is_refused(change: Callable[[Ints], Ints], what: str) -> None:
    with pytest.raises(InternalError, match=f"a step is malformed: .*{what}"):
        LIMITS.parse(change(plan().to_message()))


def test_rows_of_a_draft_are_in_order() -> None:
    no_tables = np.empty((2, 0), np.int32)
    for contexts, is_right in (((20, 21, 9, 10), True), ((20, 20, 9, 10), False), ((20, 21, 10, 9), False)):
        sent = StepPlan(no_tables, ints([5] * 4, [-1] * 4, contexts, [7, 7, 3, 3], [0] * 4), None, (), 4, is_plain=True)
        if is_right:
            assert isinstance(LIMITS.parse(sent.to_message()), StepPlan)
        else:
            with pytest.raises(InternalError, match="a draft's rows are not in order"):
                LIMITS.parse(sent.to_message())


def test_sequences_with_one_new_token_come_first() -> None:
    message = plan().to_message()
    message[PROMPTS + 14 : PROMPTS + 16] = 3, 1
    with pytest.raises(InternalError, match="must come first"):
        LIMITS.parse(message)


def draft() -> PassPlan:
    """Two sequences, of three passes and two; the first one has two rows in the first pass."""
    rows = ints([5, 6, 4], [-1, -1, -1], [20, 9, 19], [7, 3, 7], [0, 0, 0])
    return PassPlan(ints([16, 17, 33], [4, 5, 31]), rows, ints(3, 2))


def test_passes_of_a_draft() -> None:
    """Each pass has the first rows of the one before."""
    received = LIMITS.parse_passes(draft().to_message(), max_sequences=2, max_passes=3)
    assert received.tables.tolist() == draft().tables.tolist() and received.num_passes == 3
    assert received.columns(0).tolist() == draft().rows.tolist()
    assert received.columns(1).tolist() == [[0, 0], [0, 1], [21, 10], [7, 3], [0, 0]]
    assert received.columns(2).tolist() == [[0], [0], [22], [7], [0]]


ROWS, DEPTHS = PASSES_HEADER + 6, PASSES_HEADER + 21


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda message: message[:3], "no header"),
        (changed(0, 0), "no header"),
        (changed(1, -1), "2 sequences"),
        (changed(2, 1), "2 sequences"),
        (changed(2, 5), "more rows than fit"),
        (changed(3, 0), "0 sequences"),
        (changed(3, 3), "3 sequences"),
        (lambda message: message[:-1], "announces another number"),
        (changed(PASSES_HEADER, 8 * 16), "a place in the block tables"),
        (changed(PASSES_HEADER + 3, 32), "a block does not exist"),
        (changed(ROWS, 100), "a token"),
        (changed(ROWS + 3, 4), "a previous row"),
        (changed(ROWS + 6, 65), "a context"),
        (changed(ROWS + 9, 8), "a row of the block tables"),
        (changed(ROWS + 12, 1), "a row of a draft is sparse"),
        (changed(ROWS + 6, 63), "a context"),  # of the last pass
        (changed(DEPTHS, 4), "a pass"),
        (changed(DEPTHS + 1, 0), "a pass"),
        (changed(DEPTHS, 1), "not in order"),
    ],
)
def test_passes_that_cannot_be_are_refused(change: Callable[[Ints], Ints], what: str) -> None:
    with pytest.raises(InternalError, match=f"a step is malformed: .*{what}"):
        LIMITS.parse_passes(change(draft().to_message()), max_sequences=2, max_passes=3)
