"""CUDA's virtual memory, on a GPU; test_joined_memory.py has its use by ranks, by a driver for tests."""

import gc
import os
import weakref

import pytest
import torch

from diptych.workers.device.cuda_device import CudaDevice
from diptych.workers.device.virtual_memory import Mapped, VirtualMemory


def map_what_was_sent(memory: VirtualMemory) -> Mapped:
    """Two pieces of a granule, made, exported and imported; nothing but the mapping is left of them."""
    made = [memory.create(memory.granularity) for _ in range(2)]
    descriptors = [memory.descriptor_of(handle) for handle in made]
    imported = [memory.imported(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    mapped = memory.map(imported, memory.granularity)
    for handle in (*made, *imported):
        memory.release(handle)
    return mapped


def fill_and_copy(device: CudaDevice, memory: VirtualMemory, mapped: Mapped) -> None:
    size, pool = memory.granularity, memory.tensor(mapped)
    assert (pool.shape, pool.dtype, pool.data_ptr()) == ((2 * size,), torch.uint8, mapped.address)
    pool.copy_(torch.arange(2 * size, device=pool.device).remainder(251))
    expected = torch.arange(2 * size).remainder(251).to(torch.uint8)
    across, found = slice(size - 1000, size + 1000), device.pinned((2000,), torch.uint8)
    lane = device.lane("copies")
    device.synchronize()
    lane.run(lambda: found.copy_(pool[across], non_blocking=True))
    lane.record().wait()
    assert torch.equal(found, expected[across]) and torch.equal(pool.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_pieces_that_came_by_descriptors_are_one_range(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    device, memory = CudaDevice(torch.device("cuda", 0)), VirtualMemory(0)
    mapped = map_what_was_sent(memory)
    fill_and_copy(device, memory, mapped)
    gone = weakref.ref(mapped)
    del mapped
    gc.collect()
    device.synchronize()
    assert gone() is None and "was not unmapped" not in caplog.text
