"""Who holds which blocks, against a plain scan."""

import random

import pytest

from diptych.cluster.routing.prefix_index import BlockSet, PrefixIndex
from diptych.proto import worker_pb2
from diptych.workers.common.errors import InternalError
from diptych.workers.core.prefix_cache import block_hashes


def names(count: int, seed: int = 0) -> list[bytes]:
    return block_hashes([seed] * count, 1)


def events(stored: list[bytes], removed: list[bytes] | None = None, cleared: bool = False) -> worker_pb2.BlockEvents:
    return worker_pb2.BlockEvents(stored=stored, removed=removed or [], cleared=cleared)


def test_leading_blocks_of_each_worker() -> None:
    index = PrefixIndex()
    assert not index
    prompt = names(6)
    index.apply("a", events(prompt[:2]), 100)
    index.apply("b", events(prompt[:5]), 100)
    index.apply("c", events(names(4, seed=1)), 100)
    assert index
    assert index.match(prompt) == {"a": 2, "b": 5}
    assert index.match(prompt[:1]) == {"a": 1, "b": 1}
    assert index.match([]) == {}
    index.apply("b", events([], removed=prompt[3:5]), 100)
    index.apply("a", events(prompt[:4], cleared=True), 100)
    assert index.match(prompt) == {"a": 4, "b": 3}
    index.drop("a")
    index.drop("a")
    assert index.match(prompt) == {"b": 3}
    index.apply("b", events([], cleared=True), 100)
    index.drop("c")
    assert not index


def test_names_that_cannot_be_are_refused() -> None:
    index = PrefixIndex()
    with pytest.raises(InternalError, match="16 bytes"):
        index.apply("a", events([b"short"]), 100)
    with pytest.raises(InternalError, match="reports 5 cached blocks"):
        index.apply("a", events(names(5)), 4)


def test_bisecting_finds_what_a_scan_finds() -> None:
    random_ = random.Random(5)
    prompt = names(37)
    for _ in range(200):
        index = PrefixIndex()
        held = {f"w{i}": random_.randint(0, 37) for i in range(4)}
        for worker, count in held.items():
            index.apply(worker, events(prompt[:count]), 100)
        asked = random_.randint(1, 37)
        assert index.match(prompt[:asked]) == {w: min(n, asked) for w, n in held.items() if n}


def test_a_set_of_names_is_one_whatever_it_keeps_in_its_table() -> None:
    random_ = random.Random(7)
    held, plain = BlockSet(), set[bytes]()
    pool = [random_.randbytes(16) for _ in range(9000)]
    for step in range(60):
        added = random_.sample(pool, random_.choice([1, 40, 900, 3000]))
        held.add([name for name in added if name not in plain])
        plain.update(added)
        gone = random_.sample(sorted(plain), random_.choice([0, 30, len(plain) // 3]))
        held.remove(gone)
        plain.difference_update(gone)
        if step % 7 == 0:
            held.settle()
        assert len(held) == len(plain)
        assert [name in held for name in pool] == [name in plain for name in pool]
    held.remove(sorted(plain))
    held.settle()
    assert len(held) == 0
    assert not any(name in held for name in pool)


def test_names_at_both_ends_of_the_table() -> None:
    held, ends = BlockSet(), [bytes(16), b"\xff" * 16, b"\xff" * 7 + bytes(9), bytes(7) + b"\x01" + bytes(8)]
    held.add(ends)
    held.settle()
    assert all(name in held for name in ends)
    assert b"\xfe" * 16 not in held
    held.add(ends)
    held.settle()
    assert len(held) == 4, "names that are sent again count once"


def test_a_name_counts_once_where_a_worker_sends_it_again() -> None:
    index, held = PrefixIndex(), names(3000)
    index.apply("a", events(held), 3000)
    index.apply("a", events(held[:1500]), 3000)
    assert len(index) == 3000
    with pytest.raises(InternalError, match="reports 3001"):
        index.apply("a", events(names(1, seed=1)), 3000)


def test_a_full_index_forgets_some_and_says_nothing_wrong() -> None:
    index, random_ = PrefixIndex(max_blocks=10_000), random.Random(3)
    held = {f"w{i}": [random_.randbytes(16) for _ in range(6_000)] for i in range(4)}
    for worker, its in held.items():
        index.apply(worker, events(its), 6_000)
    assert 7_000 <= len(index) <= 10_000
    for worker, its in held.items():
        found = [index.match([name]) for name in its]
        assert all(each in ({}, {worker: 1}) for each in found)
        assert sum(map(bool, found)) > 1_000, "each worker keeps a part"
    index.drop("w0")
    before = len(index)
    index.apply("w1", events([random_.randbytes(16)]), 6_001)
    assert len(index) == before + 1, "what a worker that left held is free"


def test_a_router_that_joins_late_knows_as_much_by_the_snapshot() -> None:
    random_, early, late = random.Random(11), PrefixIndex(), PrefixIndex()
    held = names(2_000)
    early.apply("a", events(held[:800]), 4_000)
    for start in range(800, 2_000, 16):
        early.apply("a", events(held[start : start + 16], removed=names(1, seed=start)), 4_000)
    late.apply("a", events(held, cleared=True), 4_000)
    for _ in range(50):
        asked = held[: random_.randint(1, 2_000)]
        assert early.match(asked) == late.match(asked) == {"a": len(asked)}
