from functools import partial

import numpy as np
import pytest
import torch

from diptych.kernels.kv.run_copy import TILES, RunTile, copy_runs_triton, copy_runs_twin, list_of

from .common import DEVICE, Launch, meta


def launch(tile: RunTile) -> None:
    copy_runs_triton(meta(3, 1001, dtype=torch.int64), tile, 3)


LAUNCHES = [Launch(f"{tile.rows} of {tile.chunk_bytes} B", partial(launch, tile)) for tile in TILES]
LENGTHS = {
    "blocks": (131072, 65536, 131072 - 16, 16, 65536 + 16),
    "layers": (4096, 4096 - 16, 16, 9000 - 8, *[4096] * 30),
    "vectors": (256, 16, 240, *[256] * 300),
    "a block among vectors": (256, 131072 + 48, *[256] * 40),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("num_programs", [None, 3])
def test_copy_runs(num_programs: int | None, name: str) -> None:
    """Runs in another order in the source, with gaps in the target, which stay as they are."""
    lengths = np.array(LENGTHS[name], dtype=np.int64)
    ends, order = np.cumsum(lengths + 32), np.random.default_rng(0).permutation(len(lengths))
    source_starts = np.empty_like(lengths)
    source_starts[order] = np.cumsum(lengths[order]) - lengths[order]
    source = torch.randint(0, 256, (int(lengths.sum()),), dtype=torch.uint8, device=DEVICE)
    targets = [torch.full((int(ends[-1]),), 7, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    for run, target in zip((copy_runs_twin, copy_runs_triton), targets, strict=True):
        starts = ends - lengths - 32
        if run is copy_runs_twin and DEVICE != "cpu":  # it copies what the host sees
            for at, read, num_bytes in zip(starts.tolist(), source_starts.tolist(), lengths.tolist(), strict=True):
                target[at : at + num_bytes] = source[read : read + num_bytes]
            continue
        listed = list_of(target.data_ptr() + starts, source.data_ptr() + source_starts, lengths)
        numbers = torch.from_numpy(listed.numbers).to(DEVICE)
        if run is copy_runs_twin:
            run(numbers, listed.tile, listed.num_chunks)
        else:
            copy_runs_triton(numbers, listed.tile, listed.num_chunks, num_programs)
    assert torch.equal(*targets)
    assert (targets[0] == 7).sum() >= 32 * len(lengths)


@pytest.mark.parametrize("tile", TILES)
def test_no_runs_are_no_launch(tile: RunTile) -> None:
    copy_runs_triton(torch.empty(3, 0, dtype=torch.int64, device=DEVICE), tile, 1)
