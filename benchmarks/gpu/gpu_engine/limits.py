"""Limits of this GPU, measured; engine_gpu.py compares its figures with them."""

import statistics
from collections.abc import Callable

import torch

from diptych.workers.device.device import Device

from ...common.roofline import Roofline
from ..kernel_bench.runner import find_limits
from ..kernel_bench.timing import CudaClock

LINK_BYTES = 256 << 20
OF_FAKE = Roofline(0, 1e9, 0.0, 1e12)  # made up
REPEATS = 20


def seconds_of(call: Callable[[], object]) -> float:
    """Measure a call on the current stream (s): the median of REPEATS, after two to warm up; the host is ahead of the
    device."""
    stamps = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    call()
    call()
    for start, end in stamps:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in stamps) / 1e3


def roofline() -> Roofline:
    """Measure the device's own memory and matrix units, as kernels.py does."""
    found = find_limits(CudaClock())
    return Roofline(0, found.bytes_per_s, 0.0, found.flops_per_s)


def link_bytes_s(device: Device) -> float:
    """Measure copies from pinned memory to the device (bytes/s)."""
    source = device.pinned((LINK_BYTES,), torch.uint8)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device.torch_device)
    return LINK_BYTES / seconds_of(lambda: target.copy_(source, non_blocking=True))
