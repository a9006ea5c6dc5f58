"""Checksums of blocks of a pool, in host memory or on a device. numpy, no torch."""

from collections.abc import Callable, Sequence

import numpy as np

from .kv_layout import KVMemory, Runs
from .kv_wire import Bytes, checksums

PART_BYTES = 4 << 20  # of device memory at once in host memory


def pool_checksums(
    memory: KVMemory,
    block_ids: Sequence[int],
    first_layer: int,
    num_layers: int,
    change: Callable[[Bytes], Bytes] | None = None,
) -> bytes:
    """As kv_wire.checksums says, of what the pool holds now. May take long: for a thread."""
    layout = memory.layout
    offsets = layout.offsets(memory.num_blocks, block_ids, first_layer, num_layers)
    if memory.device is None:
        assert memory.region.view is not None
        return checksums(memory.region.view, offsets, layout.layer_bytes, change)
    by_block = offsets.swapaxes(0, 1)  # [blocks, ranks, layers]
    step = max(PART_BYTES // (by_block[0].size * layout.layer_bytes), 1)
    found: list[bytes] = []
    for first in range(0, len(by_block), step):
        some = by_block[first : first + step]
        runs = Runs(some.reshape(-1), np.full(some.size, layout.layer_bytes, dtype=np.int64))
        data = memory.device.read(runs.merged())
        places = np.arange(some.size, dtype=np.int64).reshape(some.shape) * layout.layer_bytes
        found.append(checksums(memoryview(data), places.swapaxes(0, 1), layout.layer_bytes, change))
    return b"".join(found)
