"""Measures the loading of weights from a mapped file that is in memory to a device (workers/device/upload.py)."""

import os
import tempfile
import time
from collections.abc import Iterator

import torch

from diptych.workers.device.device import Device
from diptych.workers.device.upload import Upload

from .report import Figure

NUM_BYTES = 1 << 30
WRITTEN_BYTES = 1 << 24


def loading(device: Device, link_bytes_s: float, num_bytes: int = NUM_BYTES) -> Iterator[Figure]:
    """num_bytes: a multiple of WRITTEN_BYTES. The better of two times: the file is in memory then."""
    with tempfile.NamedTemporaryFile() as file:
        part = os.urandom(WRITTEN_BYTES)
        for _ in range(num_bytes // WRITTEN_BYTES):
            file.write(part)
        file.flush()
        for dtype in (torch.bfloat16, torch.float32):
            seconds = min(_seconds(device, file.name, num_bytes, dtype) for _ in range(2))
            case = f"{dtype} to bfloat16".removeprefix("torch.")
            rate = num_bytes / seconds
            yield Figure("loading", case, rate / 1e9, "GB/s", rate / link_bytes_s, "a copy of pinned memory")


def _seconds(device: Device, name: str, num_bytes: int, dtype: torch.dtype) -> float:
    num = num_bytes // dtype.itemsize
    target = torch.empty(num, dtype=torch.bfloat16, device=device.torch_device)
    stored = torch.from_file(name, shared=False, size=num, dtype=dtype)
    with Upload(device) as upload:
        began = time.perf_counter()
        upload.put(target, stored, lambda _num_bytes: None)
        device.synchronize()
        return time.perf_counter() - began
