"""libcuda through ctypes: memory of another process is mapped and copied, and outlives that process."""

import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from diptych.workers.common.errors import TransportError
from diptych.workers.device.cuda_device import CudaDevice
from diptych.workers.device.cuda_driver import LibCuda, copy_of
from diptych.workers.device.fake_device import FakeDevice
from diptych.workers.device.virtual_memory import driver_of
from diptych.workers.kv.device_kv import CopyList, CopyRows

NUM = 3 << 20  # of int64: more than one of torch's small allocations
MAKER = f"""
import sys, torch
from diptych.workers.device.cuda_driver import LibCuda
before = torch.zeros(1 << 20, device="cuda")
made = torch.arange({NUM}, device="cuda")
torch.cuda.synchronize()
cuda = LibCuda(0)
handle, offset = cuda.export(made.data_ptr())
print(handle.hex(), offset, cuda.device_uuid.hex(), flush=True)
sys.stdin.read()
"""


def test_a_device_for_tests_has_no_driver() -> None:
    assert driver_of(FakeDevice()) is None


def test_rows_are_described_as_the_driver_reads_them() -> None:
    """CUDA_MEMCPY2D of a 64-bit machine: sixteen words."""
    words = struct.unpack("<16Q", bytes(copy_of(CopyRows(1 << 40, 3 << 40, 800, 1000, 1600, 2400))))
    source, target = (0, 0, 2, 0, 3 << 40, 0, 2400), (0, 0, 2, 0, 1 << 40, 0, 1600)
    assert words == (*source, *target, 800, 1000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_machine_without_cuda_says_so() -> None:
    with pytest.raises(TransportError):
        LibCuda(0)


@pytest.mark.e2e
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_memory_of_another_process_is_copied_also_when_that_has_died() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    cuda, lane, target = LibCuda(0), device.lane("copies"), torch.empty(NUM, dtype=torch.int64, device="cuda")
    command = [sys.executable, "-c", MAKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        handle, offset, uuid = maker.stdout.readline().split()
        assert bytes.fromhex(uuid) == cuda.device_uuid and cuda.can_reach(bytes.fromhex(uuid))
        address, num_bytes = cuda.open(bytes.fromhex(handle))
        assert num_bytes is None or num_bytes >= int(offset) + NUM * 8

        def copied() -> bool:
            target.zero_()
            device.synchronize()
            lane.run(lambda: cuda.copy([CopyRows(target.data_ptr(), address + int(offset), NUM * 8)]))
            lane.record().wait()
            return torch.equal(target, torch.arange(NUM, device="cuda"))

        assert copied()
        target.zero_()
        device.synchronize()  # rows of 100 numbers out of 300, and into 200
        wide = CopyRows(target.data_ptr(), address + int(offset), 800, 1000, 1600, 2400)
        lane.run(lambda: cuda.copy([wide]))
        lane.record().wait()
        expected = torch.arange(300_000, device="cuda").view(1000, 300)[:, :100]
        assert torch.equal(target[:200_000].view(1000, 200)[:, :100], expected)
        assert not target[:200_000].view(1000, 200)[:, 100:].any()

        def listed(num_bytes: int) -> bool:
            """Copy half of all runs, in reverse order, by the kernel, on a thread that torch has not used yet."""
            target.zero_()
            device.synchronize()
            place = np.arange(NUM * 8 // num_bytes // 2, dtype=np.int64) * 2 * num_bytes
            copies = CopyList(
                target.data_ptr() + place, address + int(offset) + place[::-1], np.full(len(place), num_bytes)
            )
            with ThreadPoolExecutor(1) as thread:
                thread.submit(lane.run, lambda: cuda.copy_list(copies)).result()
            lane.record().wait()
            found = target[: len(place) * num_bytes // 4].view(len(place), 2, -1)
            expected = torch.arange(NUM, device="cuda")[: found.numel()].view_as(found)[:, 0].flip(0)
            return torch.equal(found[:, 0], expected) and not found[:, 1].any()

        cuda.load_kernel()
        assert cuda.takes_lists and all(listed(num_bytes) for num_bytes in (1 << 20, 4096, 256))
        maker.kill()
        maker.wait()
        assert copied() and listed(4096), "the mapping did not outlive the process"
    cuda.close(address)
    with pytest.raises(TransportError):
        cuda.open(bytes(64))
