"""Who holds which blocks, against a plain scan."""

import random

import pytest

from diptych.cluster.routing.prefix_index import PrefixIndex
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
