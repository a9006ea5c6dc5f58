"""How runs are listed for the kernel that copies them."""

import numpy as np
import pytest

from diptych.kernels.kv.run_copy import TILES, list_of

LENGTHS = {
    "blocks": [2 << 20] * 1024,
    "layers": [16 << 10] * 300,
    "vectors": [256] * 5000,
    "one": [16],
    "a long one among short ones": [256] * 3000 + [10 << 20] + [272] * 100,
    "all kinds": [16 * n for n in range(1, 4000, 7)],
}


@pytest.mark.parametrize("name", LENGTHS)
def test_every_byte_is_listed_once(name: str) -> None:
    """The list has at most twice as many runs, and a launch four times as many chunks as there are."""
    lengths = np.array(LENGTHS[name], dtype=np.int64)
    targets, sources = np.cumsum(lengths + 16) - lengths, (1 << 40) + np.cumsum(lengths[::-1])[::-1]
    (to, of, num_bytes), tile, num_chunks = list_of(targets, sources, lengths)
    assert tile in TILES and num_bytes.min() > 0 and num_bytes.max() <= num_chunks * tile.chunk_bytes
    assert len(num_bytes) <= 2 * len(lengths)
    needed = int((-(-lengths // tile.chunk_bytes)).sum())
    assert len(num_bytes) * num_chunks <= 4 * needed
    nth = np.searchsorted(targets, to, side="right") - 1
    assert ((to - targets[nth]) == (of - sources[nth])).all()
    assert (np.bincount(nth, num_bytes) == lengths).all()
    starts = np.sort(to)
    assert (starts[:-1] + num_bytes[np.argsort(to)][:-1] <= starts[1:]).all()


@pytest.mark.parametrize(
    ("length", "tile"), [(2 << 20, 0), (64 << 10, 0), (32 << 10, 1), (4096, 1), (2048, 2), (16, 2)]
)
def test_the_tile_suits_the_runs(length: int, tile: int) -> None:
    many = np.full(100, length, dtype=np.int64)
    assert list_of(many, many, many).tile == TILES[tile]
