"""Which blocks and tokens count as having the draft's KV once some of it arrived, or blocks were replaced."""

import pytest

from diptych.workers.core.block_manager import BlockManager
from diptych.workers.core.draft_kv import DraftKV
from diptych.workers.core.sequence import Sequence

from ...support.sequences import make_request

BLOCK = 4


class Books:
    """A sequence with so many computed tokens in five blocks, of which `marked` have the draft's KV."""

    def __init__(self, num_computed: int, marked: tuple[int, ...] = ()) -> None:
        self.manager = BlockManager(8)
        self.draft_kv = DraftKV(self.manager, BLOCK)
        self.sequence = Sequence("0/1", make_request([1] * 20, 4), [1] * 20, 20, deadline=1e9, arrival=0)
        self.sequence.block_table = self.manager.allocate(5)
        self.sequence.num_computed = num_computed
        for position in marked:
            self.sequence.num_draft_computed = position * BLOCK
            self.draft_kv.advance(self.sequence, (position + 1) * BLOCK)
        self.sequence.num_draft_computed = 0

    def marks(self) -> list[bool]:
        return [self.draft_kv.has(block) for block in self.sequence.block_table]


@pytest.mark.parametrize(
    ("num_computed", "num_held", "marked", "num_arrived", "num_counted"),
    [
        (17, 0, (), 17, 17),
        (17, 0, (), 10, 10),
        (17, 0, (), 0, 0),
        (17, 8, (0, 1), 17, 17),
        (17, 8, (0, 1), 10, 10),
        (17, 8, (0, 1), 8, 8),
        (17, 8, (0, 1), 0, 8),  # more was here than came
        (17, 8, (0, 1), 6, 8),
        (17, 8, (0,), 17, 4),
        (17, 8, (0,), 6, 4),  # what came of the second block was not read: the block was here
        (17, 8, (1,), 17, 0),
        (17, 8, (), 3, 0),
        (19, 0, (), 20, 19),  # the last token is computed again
        (19, 16, (0, 1, 2, 3), 20, 19),
    ],
)
def test_what_arrived_counts_as_far_as_nothing_is_missing_before_it(
    num_computed: int, num_held: int, marked: tuple[int, ...], num_arrived: int, num_counted: int
) -> None:
    books = Books(num_computed, marked)
    books.draft_kv.received(books.sequence, num_held, num_arrived)
    assert books.sequence.num_draft_computed == num_counted
    arrived = range(num_held // BLOCK, num_arrived // BLOCK)
    assert books.marks() == [position in marked or position in arrived for position in range(5)]


def test_a_block_that_is_reused_has_lost_its_mark() -> None:
    books = Books(17, (0, 1, 2))
    assert books.draft_kv.num_leading(books.sequence.block_table) == 12
    books.manager.release(books.sequence.block_table)
    again = books.manager.allocate(8)
    assert books.draft_kv.num_leading(again) == 0 and not any(books.draft_kv.has(block) for block in again)


@pytest.mark.parametrize(("num_counted", "num_left"), [(17, 4), (8, 4), (5, 4), (4, 4), (3, 3)])
def test_a_block_put_in_the_place_of_another_counts_for_what_it_has(num_counted: int, num_left: int) -> None:
    """The second block is replaced by one without the draft's KV, the third by one with it."""
    books = Books(17, (0, 1, 2, 3))
    sequence = books.sequence
    sequence.block_table[1:3] = books.manager.allocate(2)
    sequence.num_draft_computed = 8
    books.draft_kv.advance(sequence, 12)
    sequence.num_draft_computed = num_counted
    for position in (1, 2):
        books.draft_kv.replaced(sequence, position)
    assert sequence.num_draft_computed == num_left


def test_a_block_with_the_drafts_kv_in_the_place_of_another_takes_nothing_away() -> None:
    books = Books(17, (0, 1))
    books.sequence.num_draft_computed, books.sequence.block_table[1] = 4, books.manager.allocate(1)[0]
    books.draft_kv.advance(books.sequence, 8)
    books.sequence.num_draft_computed = 17
    books.draft_kv.replaced(books.sequence, 1)
    assert books.sequence.num_draft_computed == 17
