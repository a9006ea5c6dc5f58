from diptych.workers.core.block_manager import BlockManager
from diptych.workers.core.prefix_cache import HASH_BYTES, PrefixCache, block_hashes
from diptych.workers.core.sequence import Sequence

from ...support.sequences import make_sequence

BLOCK = 4


def compute(sequence: Sequence, manager: BlockManager, cache: PrefixCache) -> None:
    """What the scheduler and engine do for a sequence, in one go."""
    cached = cache.match(sequence)
    manager.share(cached)
    num = -(-sequence.num_tokens // BLOCK) - len(cached)
    sequence.block_table = cached + manager.allocate(num)
    sequence.num_computed = sequence.num_tokens
    cache.insert(sequence, len(cached))


def make(num_blocks: int = 16) -> tuple[BlockManager, PrefixCache]:
    manager = BlockManager(num_blocks)
    return manager, PrefixCache(manager, BLOCK)


def test_a_name_stands_for_the_whole_prefix_and_the_salt() -> None:
    a = block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], BLOCK)
    assert len(a) == 2
    assert all(len(name) == HASH_BYTES for name in a)
    assert block_hashes([1, 2, 3, 4, 5, 6, 7, 8], BLOCK) == a
    assert block_hashes([0, 2, 3, 4, 5, 6, 7, 8], BLOCK)[1] != a[1]
    assert block_hashes([1, 2, 3, 4, 5, 6, 7, 8], BLOCK, b"tenant")[0] != a[0]
    assert block_hashes([1, 2, 3, 4, 5, 6, 7, 8], BLOCK, start=a[:1]) == a


def test_finds_the_longest_prefix_and_leaves_one_token_to_compute() -> None:
    manager, cache = make()
    first = make_sequence(list(range(8)))
    compute(first, manager, cache)
    assert cache.match(make_sequence([*range(8), 99])) == first.block_table
    assert cache.match(make_sequence(list(range(8)))) == first.block_table[:1]
    assert cache.match(make_sequence([0, 1, 2, 3, 9, 9, 9, 9, 9])) == first.block_table[:1]
    assert cache.match(make_sequence([9, *range(8)])) == []


def test_salts_do_not_share() -> None:
    manager, cache = make()
    compute(make_sequence(list(range(9)), salt=b"a"), manager, cache)
    assert cache.match(make_sequence(list(range(9)), salt=b"b")) == []


def test_a_second_copy_gives_way_to_the_first() -> None:
    manager, cache = make()
    first, second = make_sequence(list(range(8))), make_sequence(list(range(8)))
    for sequence in (first, second):  # both admitted before either was computed
        sequence.block_table = manager.allocate(2)
        sequence.num_computed = 8
    cache.insert(first, 0)
    cache.insert(second, 0)
    assert second.block_table == first.block_table
    assert manager.num_free == 14
    assert manager.check_integrity([first.block_table, second.block_table]) == 0


def test_eviction_forgets_leaves_first_and_tells() -> None:
    manager, cache = make(num_blocks=3)
    sequence = make_sequence(list(range(12)))
    compute(sequence, manager, cache)
    names = sequence.block_hashes
    assert cache.take_events() == (names, [])
    manager.release(sequence.block_table)
    manager.allocate(2)
    assert cache.take_events() == ([], [names[2], names[1]])
    assert cache.names() == [names[0]]
    cache.check_integrity()


def test_a_name_that_came_and_went_is_told_once() -> None:
    manager, cache = make(num_blocks=1)
    for start in (0, 10, 0):
        sequence = make_sequence(list(range(start, start + 4)))
        sequence.block_table, sequence.num_computed = manager.allocate(1), 4
        cache.insert(sequence, 0)
        manager.release(sequence.block_table)
    stored, removed = cache.take_events()
    assert set(stored) == set(block_hashes(range(4), BLOCK))
    assert set(removed) == set(block_hashes(range(10, 14), BLOCK))


def test_clearing_leaves_held_blocks_with_their_holders() -> None:
    manager, cache = make(num_blocks=4)
    held, idle = make_sequence(list(range(4))), make_sequence(list(range(10, 14)))
    compute(held, manager, cache)
    compute(idle, manager, cache)
    manager.release(idle.block_table)
    cache.clear()
    cache.check_integrity()
    assert manager.check_integrity([held.block_table]) == 0
    manager.release(held.block_table)
    assert manager.num_free == 4
    assert manager.num_cached == 0


def test_switched_off_it_finds_and_keeps_nothing() -> None:
    manager = BlockManager(8)
    cache = PrefixCache(manager, BLOCK, enabled=False)
    compute(make_sequence(list(range(8))), manager, cache)
    assert cache.match(make_sequence(list(range(9)))) == []
    assert cache.take_events() == ([], [])
