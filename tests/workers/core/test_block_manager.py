import random

import pytest

from diptych.workers.common.errors import OutOfBlocks
from diptych.workers.core.block_manager import BlockManager


def test_allocation_takes_all_or_nothing() -> None:
    manager = BlockManager(4)
    held = manager.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 KV blocks are needed, but 1 of 4 are free"):
        manager.allocate(2)
    assert manager.num_free == 1
    manager.release(held)
    assert manager.num_free == 4


def test_a_generation_names_one_content() -> None:
    manager = BlockManager(1)
    (block,) = manager.allocate(1)
    first = manager.generations[block]
    manager.release([block])
    assert manager.allocate(1) == [block]
    assert manager.generations[block] == first + 1


def test_the_first_use_of_a_block_is_told_once_and_in_ascending_order() -> None:
    told: list[int] = []
    manager = BlockManager(6, told.append)
    manager.release(manager.allocate(3))
    manager.allocate(5)
    manager.allocate(1)
    assert told == list(range(6))


def test_leased_blocks_outlive_their_sequence() -> None:
    manager = BlockManager(2)
    table = manager.allocate(2)
    manager.lease(table)
    manager.release(table)
    assert (manager.num_free, manager.num_leased) == (0, 2)
    manager.end_lease(table)
    assert (manager.num_free, manager.num_leased) == (2, 0)


def test_quarantined_blocks_are_not_free_until_settled() -> None:
    manager = BlockManager(2)
    table = manager.allocate(2)
    manager.quarantine(table)
    assert (manager.num_free, manager.num_quarantined) == (0, 2)
    assert manager.check_integrity([]) == 0
    manager.end_quarantine(table)
    assert manager.num_free == 2


def test_eviction_takes_the_oldest_and_children_before_parents() -> None:
    manager = BlockManager(4)
    evicted: list[int] = []
    manager.on_evict = evicted.append
    first, second = manager.allocate(2), manager.allocate(2)
    for block in first + second:
        manager.mark_cached(block)
    manager.release(second)
    manager.release(first)
    manager.allocate(3)
    assert evicted == [second[1], second[0], first[1]]


def test_sharing_an_evictable_block_saves_it() -> None:
    manager = BlockManager(2)
    (kept, lost) = manager.allocate(2)
    manager.mark_cached(kept)
    manager.mark_cached(lost)
    manager.release([kept, lost])
    manager.share([kept])
    assert manager.allocate(1) == [lost]
    with pytest.raises(OutOfBlocks):
        manager.allocate(1)


def test_integrity_check_sees_a_lost_and_a_forgotten_reference() -> None:
    manager = BlockManager(4)
    table = manager.allocate(2)
    assert manager.check_integrity([table]) == 0
    assert manager.check_integrity([]) == 2
    assert manager.check_integrity([[*table, table[0]]]) == 1


def test_releasing_twice_is_caught() -> None:
    manager = BlockManager(1)
    table = manager.allocate(1)
    manager.release(table)
    with pytest.raises(AssertionError, match="released once too often"):
        manager.release(table)


@pytest.mark.parametrize("seed", range(20))
def test_random_holders_never_lose_a_block(seed: int) -> None:
    rng = random.Random(seed)
    manager = BlockManager(16)
    tables: list[list[int]] = []
    leases: list[list[int]] = []
    for _ in range(300):
        roll = rng.random()
        if roll < 0.4 and manager.num_free:
            tables.append(manager.allocate(rng.randint(1, manager.num_free)))
            if rng.random() < 0.5:
                manager.mark_cached(tables[-1][0])
        elif roll < 0.6 and tables:
            manager.release(tables.pop(rng.randrange(len(tables))))
        elif roll < 0.75 and tables:
            leases.append(list(rng.choice(tables)))
            manager.lease(leases[-1])
        elif roll < 0.9 and leases:
            manager.end_lease(leases.pop())
        elif tables:
            tables.append(list(rng.choice(tables)))
            manager.share(tables[-1])
        assert manager.check_integrity(tables) == 0


def test_what_a_step_may_write_rests_until_it_is_over() -> None:
    manager = BlockManager(4)
    first, second, third = (manager.allocate(1) for _ in range(3))
    manager.begin_step()
    manager.release(first)
    manager.begin_step()  # without `first`
    manager.release(second)
    assert manager.num_free == 1
    manager.end_step()
    assert manager.num_free == 2 and manager.check_integrity([third]) == 0
    manager.release(third)
    manager.end_step()
    assert manager.num_free == 4 and manager.check_integrity([]) == 0


def test_a_cached_block_that_rests_can_be_shared() -> None:
    manager = BlockManager(2)
    table = manager.allocate(1)
    manager.mark_cached(table[0])
    manager.begin_step()
    manager.release(table)
    manager.share(table)
    manager.end_step()
    assert manager.num_free == 1 and manager.check_integrity([table]) == 0
    manager.release(table)
    assert manager.num_free == 2 and manager.num_cached == 1
