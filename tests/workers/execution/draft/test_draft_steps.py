"""Steps of drafts have the blocks of all their tokens."""

import pytest

from diptych.workers.execution.draft.draft_steps import DraftTables, Rows

from ....support.sequences import make_sequence


@pytest.mark.parametrize(("num_further", "width"), [(0, 1), (1, 2), (16, 2), (17, 3)])
def test_tables_reach_as_far_as_further_tokens(num_further: int, width: int) -> None:
    """Passes that are computed at once write their KV where the first one's table says."""
    first, second = make_sequence(list(range(16))), make_sequence([1, 2, 3])
    first.block_table, second.block_table = [7, 3, 5], [2]
    tables = DraftTables([first, second], block_size=16)
    step = tables.step(Rows([second, first], [2, 15], [[4], [5]], [second, first]), num_further)
    assert step.tables.tolist() == [[2, 0, 0][:width], [7, 3, 5][:width]]
    assert step.context_lens.tolist() == [3, 16]
