"""Checksums of blocks of a pool, in host memory or on a device. numpy, no torch."""

from collections.abc import Iterator, Sequence

from .layout import PoolMemory
from .packing import to_wire
from .wire import Bytes, checksum


def pool_checksums(memory: PoolMemory, block_ids: Sequence[int], first_layer: int, num_layers: int, wire: str) -> bytes:
    """Checksums of blocks, CHECKSUM_BYTES each (kv/wire.py), of what the pool holds now in the dtype `wire`. May
    take long: for a thread."""
    groups, dtype = memory.layout.layer_groups(first_layer, num_layers), memory.layout.dtype

    def travels(block: int) -> Iterator[Bytes]:
        for group in groups:
            runs = memory.layout.runs_of(group, memory.num_blocks, [block]).merged()
            for data in memory.read(runs):
                yield data if wire == dtype else to_wire(data, group.uniform, wire)

    return b"".join(checksum(travels(block)) for block in block_ids)
