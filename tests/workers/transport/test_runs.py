"""Copies between ranges of two memories."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.workers.kv.device_kv import CopyList
from diptych.workers.kv.layout import BLOCK_MAJOR, LAYER_MAJOR, Copies, KVLayout, Runs
from diptych.workers.transport.runs import (
    FEW_COPIES,
    LARGE_BYTES,
    Scatter,
    by_pieces,
    equally_spaced,
    gather,
    in_parts,
    listed,
    shares_of,
)

from ...support.handoff_pair import SMALL, make_memory

NUM_BLOCKS = 6
BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True)
LAYERS = st.sampled_from([(0, 3), (0, 1), (1, 2), (2, 1)])


def test_blocks_that_touch_are_one_run() -> None:
    memory = make_memory(SMALL, NUM_BLOCKS)
    size = SMALL.block_bytes
    assert pairs(memory.runs([1, 2, 3, 5, 4], 0, 3).merged()) == [(size, 3 * size), (5 * size, size), (4 * size, size)]
    assert pairs(memory.runs([1, 2], 0, 2).merged()) == [
        (size, 2 * SMALL.layer_bytes),
        (2 * size, 2 * SMALL.layer_bytes),
    ]


def test_runs_are_cut_where_pieces_end() -> None:
    runs = Runs(np.array([0, 25, 10, 8, 39, 20]), np.array([10, 3, 1, 25, 2, 20]))
    assert pairs(runs.cut(10)) == [
        *((0, 10), (25, 3), (10, 1)),
        *((8, 2), (10, 10), (20, 10), (30, 3)),
        *((39, 1), (40, 1)),
        *((20, 10), (30, 10)),
    ]
    assert pairs(runs.cut(100)) == pairs(runs)
    assert not pairs(Runs(runs.offsets[:0], runs.lengths[:0]).cut(10))


def pairs(runs: Runs) -> list[tuple[int, int]]:
    return list(zip(runs.offsets.tolist(), runs.lengths.tolist(), strict=True))


@settings(deadline=None)
@given(BLOCKS, LAYERS, st.integers(1, 5000), st.integers(1, 5000), st.randoms(use_true_random=False))
def test_what_is_gathered_arrives_whatever_the_pieces(
    blocks: list[int], layers: tuple[int, int], chunk_bytes: int, other_bytes: int, rng: object
) -> None:
    source, target = make_memory(SMALL, NUM_BLOCKS, seed=1), make_memory(SMALL, NUM_BLOCKS)
    assert source.region.view is not None and target.region.view is not None
    into = sorted(blocks)
    scatter = Scatter(target.region.view, target.runs(into, *layers))
    stream = b"".join(gather(source.region.view, source.runs(blocks, *layers), chunk_bytes))
    for start in range(0, len(stream), other_bytes):
        scatter.write(stream[start : start + other_bytes])
    assert scatter.num_missing == 0
    expected = bytearray(target.region.num_bytes)
    for theirs, ours in zip(blocks, into, strict=True):
        ((start, size),) = pairs(source.runs([theirs], *layers))
        ((to, _),) = pairs(target.runs([ours], *layers))
        expected[to : to + size] = source.region.view[start : start + size]
    assert target.region.view == expected


def test_more_than_there_is_room_for_is_refused_and_not_written() -> None:
    target = make_memory(SMALL, NUM_BLOCKS)
    assert target.region.view is not None
    scatter = Scatter(target.region.view, Runs(np.array([3]), np.array([10])))
    scatter.write(b"x" * 4)
    with pytest.raises(ValueError, match="received 7 bytes, but only 6 are missing"):
        scatter.write(b"y" * 7)
    assert bytes(target.region.view[:15]) == b"\0" * 3 + b"x" * 4 + b"\0" * 8


@pytest.mark.parametrize("num_bytes", [1, 7, 64, 1000, 10_000])
def test_parts_are_the_same_bytes_in_order(num_bytes: int) -> None:
    rng = random.Random(num_bytes)
    lengths = np.array([rng.randint(1, 90) for _ in range(40)])
    runs = Runs(np.array([rng.randrange(10_000) for _ in lengths]), lengths)
    parts = list(in_parts(runs, num_bytes))
    assert [part.num_bytes for part in parts[:-1]] == [num_bytes] * (len(parts) - 1)
    assert 0 < parts[-1].num_bytes <= num_bytes
    view = memoryview(rng.randbytes(10_100))
    whole = b"".join(gather(view, runs, 1 << 20))
    assert b"".join(b"".join(gather(view, part, 1 << 20)) for part in parts) == whole
    assert not list(in_parts(Runs(runs.offsets[:0], runs.lengths[:0]), num_bytes))


def copies_of(layout: KVLayout, blocks: list[int], others: list[int]) -> Copies:
    return Copies.of(layout.runs(50, blocks, 1, 3), layout.runs(40, others, 1, 3))


@pytest.mark.parametrize("axis_order", [BLOCK_MAJOR, LAYER_MAJOR])
@pytest.mark.parametrize(
    ("blocks", "others", "num"),
    [([7], [3], 1), ([7, 8, 9], [3, 4, 5], 1), ([7, 8, 20, 3], [3, 4, 5, 30], 3), ([9, 2, 31], [30, 3, 17], 3)],
)
def test_equally_spaced_runs_are_one_copy(axis_order: str, blocks: list[int], others: list[int], num: int) -> None:
    layout = KVLayout("float32", 4, 4, 2, 8, "m", axis_order=axis_order)
    copies = copies_of(layout, blocks, others)
    rows = equally_spaced(copies, 1 << 20, 1 << 30)
    apart = [(row.target - (1 << 20), row.source - (1 << 30), row.num_bytes) for of in rows for row in of.apart()]
    expected = zip(copies.local.tolist(), copies.remote.tolist(), copies.lengths.tolist(), strict=True)
    assert sorted(apart) == sorted(expected)
    if axis_order == LAYER_MAJOR:
        assert [row.num for row in rows] == [3] * num
    else:
        assert len(rows) <= len(copies.lengths)


@pytest.mark.parametrize("seed", range(20))
def test_any_copies_stay_what_they_are(seed: int) -> None:
    rng = random.Random(seed)
    num = rng.randint(0, 8)
    starts = [rng.sample(range(0, 400, 20), num) for _ in range(2)]
    lengths = [rng.choice([10, 20, 20, 20]) for _ in range(num)]
    copies = Copies(*(np.array(column, dtype=np.int64) for column in (*starts, lengths)))
    rows = equally_spaced(copies, 0, 0)
    assert all(row.num == 1 or min(row.target_pitch, row.source_pitch) >= row.num_bytes for row in rows)
    found = sorted((row.source, row.target, row.num_bytes) for of in rows for row in of.apart())
    assert found == sorted(zip(*starts, lengths, strict=True))


def bytes_of(copies: Copies) -> dict[int, int]:
    """Place of each byte in our region, by its place in the peer's."""
    rows = zip(copies.remote.tolist(), copies.local.tolist(), copies.lengths.tolist(), strict=True)
    return {remote + i: local + i for remote, local, length in rows for i in range(length)}


@pytest.mark.parametrize(("remote_bytes", "local_bytes"), [(100, 40), (30, 100), (37, 23), (1000, 1000), (1000, 7)])
def test_copies_between_pieces_stay_within_one_of_each_side(remote_bytes: int, local_bytes: int) -> None:
    random = np.random.default_rng(5)
    lengths = random.integers(1, 60, 12)
    gaps = random.integers(0, 2, 12) * 5  # some are adjacent
    remote = np.cumsum(lengths + gaps) - lengths
    copies = Copies(remote, random.permutation(12) * 60, lengths)
    parts = list(by_pieces(copies, remote_bytes, local_bytes))
    found: dict[int, int] = {}
    pairs: list[tuple[int, int]] = []
    for part in parts:
        places = bytes_of(part)
        [pair] = {(there // remote_bytes, here // local_bytes) for there, here in places.items()}
        pairs.append(pair)
        found |= places
    assert found == bytes_of(copies) and sum(part.num_bytes for part in parts) == copies.num_bytes
    assert len(set(pairs)) == len(pairs), "those of one pair of pieces come together"


def test_copies_between_whole_regions_stay_as_they_are() -> None:
    copies = Copies(np.array([0, 50]), np.array([70, 10]), np.array([20, 30]))
    [found] = by_pieces(copies, 100, 100)
    assert [column.tolist() for column in (found.remote, found.local, found.lengths)] == [[0, 50], [70, 10], [20, 30]]


MANY = FEW_COPIES + 1


def even_copies(num: int, num_bytes: int) -> Copies:
    """Every other run of a peer, in our region one after the other, backwards."""
    place = np.arange(num, dtype=np.int64)
    return Copies(place * 2 * num_bytes, place[::-1] * num_bytes, np.full(num, num_bytes, dtype=np.int64))


@pytest.mark.parametrize(
    ("num", "num_bytes", "target", "is_listed"),
    [
        (MANY, 256, 1 << 40, True),
        (MANY, 16, (1 << 62) + 16, True),
        (FEW_COPIES, 256, 1 << 40, False),
        (0, 256, 1 << 40, False),
        (MANY, 256 + 8, 1 << 40, False),
        (MANY, 256, (1 << 40) + 8, False),
        (MANY, LARGE_BYTES, 1 << 40, False),
        (MANY, LARGE_BYTES - 16, 1 << 40, True),
    ],
)
def test_many_aligned_copies_are_listed(num: int, num_bytes: int, target: int, is_listed: bool) -> None:
    copies = even_copies(num, num_bytes)
    found = listed(copies, target, 1 << 41)
    assert (found is not None) == is_listed
    if found is not None:
        assert (found.targets - target).tolist() == copies.local.tolist()
        assert (found.sources - (1 << 41)).tolist() == copies.remote.tolist()
        assert found.lengths.tolist() == copies.lengths.tolist()


@pytest.mark.parametrize("side", ["remote", "local", "lengths"])
def test_one_copy_that_is_not_aligned_keeps_all_from_a_list(side: str) -> None:
    copies = even_copies(MANY, 256)
    getattr(copies, side)[3] += 8
    assert listed(copies, 1 << 40, 1 << 41) is None


@pytest.mark.parametrize(("most", "most_bytes", "num_shares"), [(40, 1 << 20, 1), (20, 1 << 20, 2), (40, 1600, 7)])
def test_shares_of_a_list_are_all_of_it(most: int, most_bytes: int, num_shares: int) -> None:
    copies = listed(even_copies(40, 256), 0, 0)
    assert copies is not None
    shares = list(shares_of(copies, most, most_bytes))
    assert len(shares) == num_shares and max(len(share.lengths) for share in shares) <= most
    for i, column in enumerate(copies):
        assert np.concatenate([share[i] for share in shares]).tolist() == column.tolist()


def test_a_share_has_one_copy_at_least() -> None:
    copies = CopyList(*(np.array([1 << 30] * 2, dtype=np.int64) for _ in range(3)))
    assert [len(share.lengths) for share in shares_of(copies, 9, 1 << 28)] == [1, 1]


def test_no_copies_are_split_into_none() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert sum(len(part.lengths) for part in by_pieces(Copies(none, none, none), 10, 20)) == 0
