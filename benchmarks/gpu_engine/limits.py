"""What a GPU reaches here: the limits that engine_gpu.py holds its figures against."""

import statistics
from collections.abc import Callable

import torch

from diptych.workers.gpu.device import Device

COPIED_BYTES = 1 << 30
LINK_BYTES = 256 << 20
MATRIX = 8192
REPEATS = 20


def seconds_of(call: Callable[[], object]) -> float:
    """On the current stream: the median of REPEATS, after two to warm up; the host is ahead of the device."""
    stamps = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    call()
    call()
    for start, end in stamps:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in stamps) / 1e3


def copy_bytes_s() -> float:
    """Read and written, of random data larger than any cache."""
    source = torch.randn(COPIED_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds_of(lambda: target.copy_(source))


def product_flops() -> float:
    """Of torch's product of two square matrices of random bfloat16."""
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return 2 * MATRIX**3 / seconds_of(lambda: torch.mm(a, b, out=out))


def link_bytes_s(device: Device) -> float:
    """From pinned memory to the device."""
    source = device.pinned((LINK_BYTES,), torch.uint8)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device.torch_device)
    return LINK_BYTES / seconds_of(lambda: target.copy_(source, non_blocking=True))
