import pytest
import torch

from diptych.kernels.kv.block_copy import copy_blocks_triton, copy_blocks_twin

from .common import DEVICE, DTYPES, Launch, meta, normal


def launch() -> None:
    pool, ids = meta(100, 32, 2, 16, 8, 128), meta(7, dtype=torch.int64)
    copy_blocks_triton(pool, pool, ids, ids)
    copy_blocks_triton(pool, meta(7, 32, 2, 16, 8, 128), ids, None)
    copy_blocks_triton(meta(7, 32, 2, 16, 8, 128), pool, None, ids)


LAUNCHES = [Launch("copy, gather, scatter", launch)]


def ids(*of: int) -> torch.Tensor:
    return torch.tensor(of, device=DEVICE)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("is_layer_major", [False, True])
@pytest.mark.parametrize("dim", [7, 520])
def test_copy_blocks(dim: int, is_layer_major: bool, dtype: torch.dtype) -> None:
    """Within a pool, out of it and into it; an id below 0 copies nothing."""
    pools: list[torch.Tensor] = []
    for run in (copy_blocks_twin, copy_blocks_triton):
        pool = (normal(*((3, 9) if is_layer_major else (9, 3)), 2, 5, dim, dtype=torch.float32) * 9).to(dtype)
        blocks = pool.transpose(0, 1) if is_layer_major else pool
        buffer = torch.zeros(4, 3, 2, 5, dim, device=DEVICE).to(dtype)
        before = blocks.clone()
        run(blocks, blocks, ids(8, 0, -1, 3), ids(1, 2, 4, -1))
        assert torch.equal(blocks[ids(1, 2)], before[ids(8, 0)]) and torch.equal(blocks[3:], before[3:])
        run(blocks, buffer, ids(7, 7, 5), None)
        assert torch.equal(buffer[:3], before[ids(7, 7, 5)]) and not buffer[3].any()
        run(buffer, blocks, None, ids(3, 6, 0))
        pools.append(pool)
    assert torch.equal(*pools)
