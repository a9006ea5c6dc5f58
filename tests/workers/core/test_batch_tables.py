"""Rows of block tables that persist between steps equal the sequences' own tables."""

import random
from weakref import ref

from diptych.workers.core.batch_tables import FIRST_ROWS, BatchTables
from diptych.workers.core.sequence import ScheduledSequence, Sequence

from ...support.sequences import make_sequence

BLOCK_SIZE = 4


def sequence_of(num_tokens: int, blocks: list[int]) -> Sequence:
    sequence = make_sequence(list(range(1, num_tokens + 1)))
    sequence.block_table = blocks
    return sequence


def found(tables: BatchTables, entries: list[ScheduledSequence]) -> list[list[int]]:
    """The blocks of each entry's tokens according to the arrays."""
    rows = tables.update(entries)
    nums = [-(-(e.sequence.num_computed + e.num_new) // BLOCK_SIZE) for e in entries]
    return [tables.array[row, :num].tolist() for row, num in zip(rows, nums, strict=True)]


def expected(entries: list[ScheduledSequence]) -> list[list[int]]:
    return [e.sequence.block_table[: -(-(e.sequence.num_computed + e.num_new) // BLOCK_SIZE)] for e in entries]


def test_a_decode_that_crosses_a_block() -> None:
    tables, sequence = BatchTables(BLOCK_SIZE, 8), sequence_of(3, [7])
    assert found(tables, [ScheduledSequence(sequence, 3)]) == [[7]]
    sequence.num_computed = 3
    assert found(tables, [ScheduledSequence(sequence, 1)]) == [[7]]
    sequence.num_computed = 4
    sequence.block_table += [5]
    assert found(tables, [ScheduledSequence(sequence, 1)]) == [[7, 5]]


def test_blocks_that_the_prefix_cache_replaced() -> None:
    """Another sequence stored the same tokens first: the blocks that the last step filled are its blocks now."""
    tables, sequence = BatchTables(BLOCK_SIZE, 8), sequence_of(10, [1, 2, 3])
    assert found(tables, [ScheduledSequence(sequence, 9)]) == [[1, 2, 3]]
    sequence.num_computed = 9
    sequence.block_table[0], sequence.block_table[1] = 11, 12
    assert found(tables, [ScheduledSequence(sequence, 1)]) == [[11, 12, 3]]


def test_a_last_block_that_was_copied() -> None:
    tables, sequence = BatchTables(BLOCK_SIZE, 8), sequence_of(7, [1, 2])
    assert found(tables, [ScheduledSequence(sequence, 5)]) == [[1, 2]]
    sequence.num_computed = 5
    sequence.block_table[1] = 9
    assert found(tables, [ScheduledSequence(sequence, 1)]) == [[1, 9]]


def test_a_sequence_that_was_preempted_has_other_blocks() -> None:
    tables, sequence = BatchTables(BLOCK_SIZE, 8), sequence_of(8, [1, 2])
    assert found(tables, [ScheduledSequence(sequence, 8)]) == [[1, 2]]
    sequence.block_table, sequence.num_computed = [4, 2], 0
    assert found(tables, [ScheduledSequence(sequence, 8)]) == [[4, 2]]


def test_more_sequences_than_rows_and_some_forgotten() -> None:
    tables = BatchTables(BLOCK_SIZE, 8)
    many = [sequence_of(8, [i, i + 1]) for i in range(3 * FIRST_ROWS)]
    entries = [ScheduledSequence(s, 8) for s in many]
    assert found(tables, entries) == expected(entries)
    assert found(tables, entries[:2]) == expected(entries[:2])
    assert found(tables, entries[::-1]) == expected(entries[::-1])
    assert len(tables.array) == 4 * FIRST_ROWS


def test_any_history() -> None:
    generator = random.Random(7)
    tables, running = BatchTables(BLOCK_SIZE, 64), list[Sequence]()
    for _ in range(2000):
        if len(running) < 40 and generator.random() < 0.3:
            num = generator.randrange(1, 40)
            running.append(sequence_of(num, [generator.randrange(1000) for _ in range(-(-num // BLOCK_SIZE))]))
        entries = [ScheduledSequence(s, generator.randint(1, s.num_uncomputed)) for s in running]
        generator.shuffle(entries)
        entries = entries[: generator.randrange(1, 50)]
        if entries:
            assert found(tables, entries) == expected(entries)
        for entry in entries:
            live(generator, entry, running)


def live(generator: random.Random, entry: ScheduledSequence, running: list[Sequence]) -> None:
    """What an engine may do to a sequence after a step."""
    sequence, first = entry.sequence, entry.sequence.num_computed // BLOCK_SIZE
    sequence.num_computed += entry.num_new
    for i in range(first, sequence.num_computed // BLOCK_SIZE):
        if generator.random() < 0.2:
            sequence.block_table[i] = generator.randrange(1000)
    if sequence.num_uncomputed == 0:
        sequence.token_ids.append(1)
    if generator.random() < 0.05 or sequence.num_tokens > 200:
        running.remove(sequence)
    elif generator.random() < 0.05:
        sequence.num_computed = 0
        sequence.block_table = [generator.randrange(1000) for _ in range(-(-sequence.num_tokens // BLOCK_SIZE))]
    while len(sequence.block_table) * BLOCK_SIZE < sequence.num_tokens:
        sequence.block_table.append(generator.randrange(1000))


def test_what_the_step_before_fills_may_be_replaced_after_the_next_is_written() -> None:
    """Step n + 1 is written before the books know step n; the cache replaces n's block; n + 2 is written."""
    tables, sequence = BatchTables(BLOCK_SIZE, 8), sequence_of(4, [1, 2])
    sequence.num_computed = 3  # step n computes the fourth token, and so fills block 1
    entry = ScheduledSequence(sequence, 1)
    [row] = tables.update([entry], [0])
    assert tables.array[row, :2].tolist() == [1, 2]
    sequence.num_computed, sequence.token_ids = 4, [1, 2, 3, 4, 5]
    sequence.block_table[0] = 9
    assert tables.update([entry], [0]) == [row]
    assert tables.array[row, :2].tolist() == [9, 2]


def test_rows_outlive_no_sequence() -> None:
    """Tokens of those that were computed lately would take gigabytes, if contexts are long. Another sequence may be
    where one was that is gone."""
    tables = BatchTables(BLOCK_SIZE, 8)
    for number in range(3 * FIRST_ROWS):
        sequence = sequence_of(8, [number, number + 1])
        gone, entries = ref(sequence), [ScheduledSequence(sequence, 8)]
        assert found(tables, entries) == expected(entries)
        del sequence, entries
        assert gone() is None
    assert len(tables.array) <= 2 * FIRST_ROWS
